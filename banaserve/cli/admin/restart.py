"""``banaserve restart``: replace all engines one by one, with other weights or options."""

from __future__ import annotations

from pathlib import Path

from banaserve.base.arguments import argument, option
from banaserve.base.errors import UserError
from banaserve.cli.admin.operation_progress import follow
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.contracts.restart_api import RestartRequest, RollingRestart


def restart(
    asked: JsonOptions,
    vllm_options: tuple[str, ...] = argument(
        "added to those of the engines; the last counts", (), metavar="[--] VLLM_OPTIONS"
    ),
    rolling: bool = option("one engine after the other; no request is lost", False),
    model: str = option("folder or name of weights of the same architecture", ""),
    timeout_s: float = option(
        "time for which an engine is kept for streams that no other one can take; 0 is serve's "
        "--request-timeout",
        0.0,
    ),
    abort: bool = option("give up the one under way; what it changed goes back", False),
) -> int:
    """Replace all engines of a running server."""
    restarts = asked.client().restarts
    if abort:
        found = next((one for one in restarts.last() if one.is_open), None)
        if found is None:
            raise UserError("no rolling restart is under way")
        restarts.abort(found.id)
    elif not rolling:
        raise UserError(
            "all engines at once would end every request: give --rolling, which replaces one after "
            "the other"
        )
    else:
        found = restarts.begin(RestartRequest(_path(model), list(vllm_options), timeout_s))
    return follow(
        asked,
        restarts,
        found,
        progress=lambda one: f"{one.state}: {one}" if one.is_open else "",
        done=lambda one: f"{len(one.engines)} engines replaced in {one.seconds:.1f} s",
        failure=_failure,
        aborts=False,
        code=1,
    )


def _path(model: str) -> str:
    """Return a folder as an absolute path: the server may have another working directory."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def _failure(found: RollingRestart) -> str:
    words = f"the restart {found.state}: {found.reason}"
    names = [one.instance for one in found.engines if one.state == "taken back"]
    return words + (f"; {', '.join(names)} went back to what was" if names else "")


app = App(restart)
