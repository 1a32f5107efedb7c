"""``banaserve restart``: replace all engines one by one, with other weights or options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from banaserve.cli.admin.following import followed
from banaserve.cli.admin.migrate import JsonOption
from banaserve.cli.admin.options import ServerOptions, with_server_options
from banaserve.cli.console import print_error
from banaserve.engine.vllm.restart.api import RestartRequest, RollingRestart
from banaserve.errors import UserError

app = typer.Typer(name="restart", add_completion=False)


@app.command()
@with_server_options
def restart(
    server: ServerOptions,
    vllm_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] VLLM_OPTIONS", help="Added to those of the engines; the last counts."
        ),
    ] = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One engine after the other; no request is lost.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="Folder or name of weights of the same architecture.")
    ] = "",
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            help="How long an engine is kept for streams that no other one can take; 0 is "
            "serve's --request-timeout.",
        ),
    ] = 0.0,
    abort: Annotated[
        bool, typer.Option("--abort", help="Give up the one under way; what it changed goes back.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replace all engines of a running server."""
    client = server.client()
    if abort:
        found = _under_way(client.restarts.last())
        client.restarts.abort(found.id)
    elif not rolling:
        raise UserError(
            "all engines at once would end every request: give --rolling, which replaces one after "
            "the other"
        )
    else:
        ask = RestartRequest(_path(model), vllm_options or [], timeout_s)
        found = client.restarts.begin(ask)
    found = followed(client.restarts, found, _progress, is_silent=as_json, aborts=False)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
    elif found.state == "done":
        typer.echo(f"{len(found.engines)} engines replaced in {found.seconds:.1f} s")
    if found.state != "done":
        print_error(_failure(found))
        raise typer.Exit(1)


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
