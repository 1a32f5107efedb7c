"""``banaserve ui``: the page of a running server, or of a decision log."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from banaserve.base.arguments import option
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import admin_note, find_admin_dir
from banaserve.cli.app import App
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.frontdoor.page.records import page_link

_LOOPBACK = "127.0.0.1"


def ui(
    replay: Path | None = option(
        "show what this decision log tells, with a slider for the time", None, Path, metavar="FILE"
    ),
    port: int = option("port of your server, or of the replay (a free one)", 0, metavar="PORT"),
    run_dir: Path | None = option("folder of the server's run (your only server's)", None, Path),
) -> None:
    """Print a link that opens a running server's page, or serve a page for a decision log."""
    if replay is not None:
        _replay(replay, port)
        return
    folder, access = find_admin_dir(run_dir, port or None)
    key = access.key or os.environ.get("BANASERVE_ADMIN_KEY", "")
    if not key:
        print(f"{access.url}/ui")
        print("its key: that of --admin-key")
        return
    client = AdminClient(access.url, key, access.certificate, is_own=True)
    found = client.page_code()
    print(page_link(access.url, found.code))
    print(f"opens once, within {found.valid_s / 60:g} minutes")
    if access.key:
        print(f"its key: in {admin_note(folder)}")


def _replay(path: Path, port: int) -> None:
    import uvicorn

    from banaserve.frontdoor.page.replay import read_replay, replay_app

    replay = read_replay(path)
    sock = _bound(port)
    print(f"{path}: {replay.num_frames} moments")
    print(f"http://{_LOOPBACK}:{sock.getsockname()[1]}/ui  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(replay_app(replay, path.name), log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[sock])


def _bound(port: int) -> socket.socket:
    """Return a socket bound to ``port``; raise UserError if that is not possible."""
    try:
        return socket.create_server((_LOOPBACK, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port}: {reason}") from None


app = App(ui)
