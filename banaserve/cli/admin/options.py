"""Options of the commands that talk to a running server's admin API."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from banaserve.base.access.key_files import key_option
from banaserve.base.arguments import option
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient

_GROUP = "server"
_server = partial(option, group=_GROUP)


@dataclass(frozen=True, kw_only=True)
class ServerChoice:
    """Options that select a running server."""

    port: int | None = _server("port of a server on this machine", None, int, metavar="PORT")
    run_dir: Path | None = _server("folder of the server's run (your only server's)", None, Path)
    url: str | None = _server(
        "address of the server, for one that is not yours on this machine", None
    )
    cacert: Path | None = _server(
        "with --url: certificate of the server, or of its authority",
        None,
        Path,
        metavar="FILE",
    )

    def check_server(self) -> None:
        """Check that at most one option names a server.

        Raises:
            UserError: Several options name a server.
        """
        given = {"--port": self.port, "--run-dir": self.run_dir, "--url": self.url}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise UserError(f"{' and '.join(named)} both name a server: leave one out")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ServerChoice):
    """Options of commands that use the server's admin API."""

    admin_key: str = key_option(
        "--admin-key",
        "admin key, if the server was started with one ($BANASERVE_ADMIN_KEY)",
        "file with that key",
        "BANASERVE_ADMIN_KEY",
        group=_GROUP,
        metavar="KEY",
    )

    def client(self) -> AdminClient:
        """Return a client of the server that the options name.

        Raises:
            UserError: The options name no server or contradict each other, or a file cannot be
                used.
        """
        self.check_server()
        if self.url is not None:
            certificate = str(self.cacert) if self.cacert is not None else ""
            return AdminClient(self.url, self.admin_key, certificate)
        if self.cacert is not None:
            raise UserError("--cacert is for --url: that of your own run is known")
        access = find_admin(self.run_dir, self.port)
        key = self.admin_key or access.key
        return AdminClient(access.url, key, access.certificate, is_own=True)


@dataclass(frozen=True, kw_only=True)
class JsonOptions(ServerOptions):
    """Options of a command that can print JSON."""

    as_json: bool = option("print JSON", False, name="--json")
