"""``banaserve ui``: the page of a running server, or of a decision log."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from banaserve.api.admin_client import AdminClient
from banaserve.errors import UserError
from banaserve.run_dir import admin_note, find_admin_dir
from banaserve.ui.records import page_link

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
    """Print a link that opens a running server's page, or serve a page for a decision log."""
    if replay is not None:
        _replay(replay, port)
        return
    folder, access = find_admin_dir(run_dir, port or None)
    key = access.key or os.environ.get("BANASERVE_ADMIN_KEY", "")
    if not key:
        typer.echo(f"{access.url}/ui")
        typer.echo("its key: that of --admin-key")
        return
    client = AdminClient(access.url, key, access.certificate, is_own=True)
    found = client.page_code()
    typer.echo(page_link(access.url, found.code))
    typer.echo(f"opens once, within {found.valid_s / 60:g} minutes")
    if access.key:
        typer.echo(f"its key: in {admin_note(folder)}")


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
    """Return a socket bound to ``port``; raise UserError if that is not possible."""
    try:
        return socket.create_server((_LOOPBACK, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: {reason}") from None
