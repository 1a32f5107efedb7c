"""``banaserve restart``: replace all engines one by one, with other weights or options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from banaserve.base.arguments import argument, option
from banaserve.base.errors import UserError
from banaserve.cli.admin.following import ended, followed
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.contracts.restart_api import RestartRequest, RollingRestart


@dataclass(frozen=True, kw_only=True)
class RestartOptions(JsonOptions):
    """Options of ``banaserve restart``."""

    vllm_options: tuple[str, ...] = argument(
        "added to those of the engines; the last counts", (), metavar="[--] VLLM_OPTIONS"
    )
    rolling: bool = option("one engine after the other; no request is lost", False)
    model: str = option("folder or name of weights of the same architecture", "")
    timeout_s: float = option(
        "time for which an engine is kept for streams that no other one can take; 0 is serve's "
        "--request-timeout",
        0.0,
    )
    abort: bool = option("give up the one under way; what it changed goes back", False)


def restart(asked: RestartOptions) -> int:
    """Replace all engines of a running server."""
    restarts = asked.client().restarts
    if asked.abort:
        found = _under_way(restarts.last())
        restarts.abort(found.id)
    elif not asked.rolling:
        raise UserError(
            "all engines at once would end every request: give --rolling, which replaces one after "
            "the other"
        )
    else:
        options = list(asked.vllm_options)
        found = restarts.begin(RestartRequest(_path(asked.model), options, asked.timeout_s))
    found = followed(restarts, found, _progress, is_silent=asked.as_json, aborts=False)
    done = f"{len(found.engines)} engines replaced in {found.seconds:.1f} s"
    return ended(found, asked.as_json, [done], _failure(found), code=1)


def _progress(found: RollingRestart) -> str:
    return f"{found.state}: {found}" if found.is_open else ""


def _under_way(restarts: list[RollingRestart]) -> RollingRestart:
    for one in restarts:
        if one.is_open:
            return one
    raise UserError("no rolling restart is under way")


def _path(model: str) -> str:
    """Return a folder as an absolute path: the server may have another working directory."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def _failure(found: RollingRestart) -> str:
    words = f"the restart {found.state}: {found.reason}"
    names = [one.instance for one in found.engines if one.state == "taken back"]
    if names:
        words += f"; {', '.join(names)} went back to what was"
    return words


app = App(restart)
