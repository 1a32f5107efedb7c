"""Options of the commands that talk to a running server's admin API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from banaserve.api.admin_client import AdminClient
from banaserve.errors import UserError
from banaserve.run_dir import AdminAccess, find_admin

RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the run (the only one of yours).")
]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Where the server listens, instead of --run-dir.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--admin-key", help="The server's, where it was given one.", metavar="KEY"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def admin_client(run_dir: Path | None, url: str | None, key: str | None) -> AdminClient:
    """A client of the server that the options name.

    Raises:
        UserError: They name none, or no key is known.
    """
    given = key or os.environ.get("BANASERVE_ADMIN_KEY", "")
    access = AdminAccess(url, "") if url else find_admin(run_dir)
    if not (given or access.key):
        raise UserError("this server was started with an admin key of its own: give --admin-key")
    return AdminClient(access.url, given or access.key)
