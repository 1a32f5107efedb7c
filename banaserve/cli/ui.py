"""``banaserve ui``: the page of a running server, or of what a decision log tells."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from banaserve.errors import UserError
from banaserve.run_dir import admin_note, find_admin_dir

app = typer.Typer(name="ui", add_completion=False)
_LOOPBACK = "127.0.0.1"


@app.command()
def ui(
    replay: Annotated[
        Path | None,
        typer.Option(help="Show what this decision log tells, with a slider for the time."),
    ] = None,
    port: Annotated[int, typer.Option(help="Of your server, or of the replay (a free one).")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run (the only one of yours).")
    ] = None,
) -> None:
    """Say where a running server's page is, or serve a page for a decision log."""
    if replay is not None:
        _replay(replay, port)
        return
    folder, access = find_admin_dir(run_dir, port or None)
    typer.echo(f"{access.url}/ui")
    where = f"in {admin_note(folder)}" if access.key else "that of --admin-key"
    typer.echo(f"its key: {where}")


def _replay(path: Path, port: int) -> None:
    import uvicorn

    from banaserve.ui.replay_app import read_replay, replay_app

    replay = read_replay(path)
    sock = _bound(port)
    typer.echo(f"{path}: {replay.num_frames} moments")
    typer.echo(f"http://{_LOOPBACK}:{sock.getsockname()[1]}/ui  (Ctrl-C ends it)")
    config = uvicorn.Config(replay_app(replay, path.name), log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[sock])


def _bound(port: int) -> socket.socket:
    """Raises UserError where it cannot be had."""
    try:
        return socket.create_server((_LOOPBACK, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: {reason}") from None
