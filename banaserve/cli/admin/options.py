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

from banaserve.access.key_files import key_of
from banaserve.api.admin_client import AdminClient
from banaserve.errors import UserError
from banaserve.run_dir import find_admin

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_OPTIONS = {
    "port": Annotated[
        int | None, typer.Option("--port", help="Port of one of your servers on this machine.")
    ],
    "run_dir": Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run (the only one of yours).")
    ],
    "url": Annotated[
        str | None, typer.Option("--url", help="Where the server listens, instead of --run-dir.")
    ],
    "admin_key": Annotated[
        str | None,
        typer.Option("--admin-key", help="The server's, where it was given one.", metavar="KEY"),
    ],
    "admin_key_file": Annotated[
        Path | None, typer.Option("--admin-key-file", help="File with that key.", metavar="FILE")
    ],
    "cacert": Annotated[
        Path | None,
        typer.Option(
            "--cacert",
            help="Certificate, or its authority's, of the server at --url (one of your own runs: "
            "that of its --ssl-certfile).",
            metavar="FILE",
        ),
    ],
}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options that select the running server of a command."""

    port: int | None
    run_dir: Path | None
    url: str | None
    admin_key: str | None
    admin_key_file: Path | None
    cacert: Path | None

    def client(self) -> AdminClient:
        """Return a client of the server that the options name.

        Raises:
            UserError: The options name no server or contradict each other, or a file cannot be
                used.
        """
        check_one_server(self.port, self.run_dir, self.url)
        usual = os.environ.get("BANASERVE_ADMIN_KEY", "")
        key = key_of("--admin-key", self.admin_key, self.admin_key_file, usual)
        if self.url is not None:
            certificate = str(self.cacert) if self.cacert is not None else ""
            return AdminClient(self.url, key, certificate)
        if self.cacert is not None:
            raise UserError("--cacert is for --url: that of your own run is known")
        access = find_admin(self.run_dir, self.port)
        return AdminClient(access.url, key or access.key, access.certificate, is_own=True)


def check_one_server(port: int | None, run_dir: Path | None, url: str | None) -> None:
    """Check that at most one option names a server.

    Raises:
        UserError: Several options name a server.
    """
    given = {"--port": port, "--run-dir": run_dir, "--url": url}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} both name a server: leave one out")


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter of a typer command, a ``ServerOptions``, by its options.

    In the help these options come before ``as_json``, or last.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(ServerOptions(**{name: given.pop(name) for name in _OPTIONS}), **given)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    where = next((i for i, one in enumerate(own) if one.name == "as_json"), len(own))
    own[where:where] = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    # typer reads both attributes.
    run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in own}
    return run
