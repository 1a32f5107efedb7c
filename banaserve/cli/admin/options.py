"""Options of the commands that talk to a running server's admin API."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from banaserve.api.admin_client import AdminClient
from banaserve.errors import UserError
from banaserve.run_dir import AdminAccess, find_admin

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_RUN_DIR = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the run (the only one of yours).")
]
_URL = Annotated[
    str | None, typer.Option("--url", help="Where the server listens, instead of --run-dir.")
]
_KEY = Annotated[
    str | None,
    typer.Option("--admin-key", help="The server's, where it was given one.", metavar="KEY"),
]
_OPTIONS = {"run_dir": _RUN_DIR, "url": _URL, "admin_key": _KEY}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options that say which running server a command talks to."""

    run_dir: Path | None
    url: str | None
    admin_key: str | None

    def client(self) -> AdminClient:
        """Return a client of the server that the options name.

        Raises:
            UserError: They name none, or no key is known.
        """
        given = self.admin_key or os.environ.get("BANASERVE_ADMIN_KEY", "")
        access = AdminAccess(self.url, "") if self.url else find_admin(self.run_dir)
        if not (given or access.key):
            raise UserError(
                "this server was started with an admin key of its own: give --admin-key"
            )
        return AdminClient(access.url, given or access.key)


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter of a typer command, a ``ServerOptions``, by its options.

    They come before ``as_json`` in the help, or last.
    """

    @functools.wraps(command)
    def run(run_dir: Path | None, url: str | None, admin_key: str | None, **given: Any) -> None:
        command(ServerOptions(run_dir, url, admin_key), **given)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    where = next((i for i, one in enumerate(own) if one.name == "as_json"), len(own))
    own[where:where] = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    # typer reads both.
    run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in own}
    return run
