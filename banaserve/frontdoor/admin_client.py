"""A client of the admin API, for commands and benchmarks. Imports neither torch nor vllm."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec

from banaserve.base.errors import UserError
from banaserve.contracts.control_api import (
    ControllerStatus,
    DecisionRecord,
    NodeRequest,
    PauseRequest,
    RoleRequest,
    ScaleRequest,
    ServerStatus,
)
from banaserve.contracts.instances import DrainState, NodeChange, NodeStatus, RoleChange, Scaling
from banaserve.contracts.migration_api import (
    ClusterPlacement,
    ExpertLoad,
    ExpertLoadRequest,
    GuestSharing,
    Migration,
    MigrationRequest,
    Overlapping,
    OverlapRequest,
    ShareRequest,
)
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.contracts.trace_events import RequestSummary, RequestTrace
from banaserve.frontdoor.page.records import PageCode

T = TypeVar("T")
Ask = TypeVar("Ask")
State = TypeVar("State")
_TIMEOUT_S = 60.0
_FETCH_TIMEOUT_S = 3600.0
"""Timeout of an answer that may come only after a model has been fetched."""


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


class RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Handler of redirects that shows a key to no other server."""

    def redirect_request(
        self, req: urllib.request.Request, *told: Any, **named: Any
    ) -> urllib.request.Request | None:
        made = super().redirect_request(req, *told, **named)
        if made is not None and (made.type, made.host) != (req.type, req.host):
            made.remove_header("Authorization")
        return made


class ServerApi:
    """HTTP API of a server; every call blocks.

    Args:
        url: URL of the front door, without a path.
        certificate: File of the server's TLS certificate or its authority's; empty for the
            authorities that this machine trusts.
        is_own: True if ``certificate`` is the server's own: its host name is not checked.

    Attributes:
        bad_key, no_answer: Messages on a refused key, and on a server that cannot be reached.
        key_codes: Statuses of an answer that refuses the key.

    Raises:
        UserError: The certificate cannot be read.
    """

    bad_key = "the server refuses the admin key: give its --admin-key"
    key_codes: tuple[HTTPStatus, ...] = (HTTPStatus.UNAUTHORIZED,)
    no_answer = "no banaserve answers at {url}: {reason}"

    def __init__(self, url: str, key: str, certificate: str = "", is_own: bool = False) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        context = _trusting(certificate, is_own) if certificate else None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        handlers.append(RedirectHandler())
        if _is_here(self.url):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    @contextlib.contextmanager
    def asked(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a request.

        Raises:
            UserError: The request is refused, or the server cannot be reached.
        """
        try:
            request = urllib.request.Request(self.url + path, body, self._headers, method=method)
            with self._opener.open(request, timeout=timeout_s) as answer:
                yield answer
        except urllib.error.HTTPError as refused:
            raise UserError(self._refusal(refused)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise UserError(self.no_answer.format(url=self.url, reason=reason)) from None

    def _refusal(self, refused: urllib.error.HTTPError) -> str:
        if refused.code in self.key_codes:
            return self.bad_key
        try:
            return msgspec.json.decode(refused.read(), type=_ErrorBody).error.message
        except (ValueError, OSError, http.client.HTTPException):
            return f"the server answers {refused.code} {refused.reason}"


@dataclass(frozen=True)
class OperationClient(Generic[Ask, State]):
    """Client of one kind of operation; an operation goes on after the call that begins it.

    Each method raises ``UserError`` if the request is refused or the server cannot be reached.

    Attributes:
        name: Last part of the operations' path.
        kind: Type of an operation's state.
        begin_timeout_s: Maximum time that ``begin`` waits for its answer, in seconds.
    """

    server: AdminClient
    name: str
    kind: type[State]
    begin_timeout_s: float = _TIMEOUT_S

    def begin(self, ask: Ask) -> State:
        """Begin an operation."""
        return self.server.call("POST", self.name, self.kind, ask, self.begin_timeout_s)

    def show(self, identity: str, wait_s: float = 0.0) -> State:
        """Return the state of the operation with this id, at its end or after ``wait_s``."""
        return self.server.call("GET", f"{self.name}/{identity}?wait_s={wait_s:g}", self.kind)

    def abort(self, identity: str) -> State:
        """End the operation with this id early: what can be undone is undone."""
        return self.server.call("DELETE", f"{self.name}/{identity}", self.kind)

    def last(self) -> list[State]:
        """Return the last operations, the oldest first, if the server keeps those of this kind."""
        return self.server.call("GET", self.name, list[self.kind])  # type: ignore[name-defined]


class AdminClient(ServerApi):
    """Client of one server's admin API.

    Each method raises ``UserError`` if the request is refused or the server cannot be reached.
    """

    def __init__(self, url: str, key: str, certificate: str = "", is_own: bool = False) -> None:
        super().__init__(url, key, certificate, is_own)
        self.migrations = OperationClient[MigrationRequest, Migration](
            self, "migrations", Migration
        )
        self.roles = OperationClient[RoleRequest, RoleChange](self, "roles", RoleChange)
        self.scalings = OperationClient[ScaleRequest, Scaling](self, "scalings", Scaling)
        self.restarts = OperationClient[RestartRequest, RollingRestart](
            self, "restarts", RollingRestart, _FETCH_TIMEOUT_S
        )
        self.node_changes = OperationClient[NodeRequest, NodeChange](
            self, "node-changes", NodeChange
        )

    def page_code(self) -> PageCode:
        """Get a code that opens the page once."""
        return self.call("POST", "page-code", PageCode)

    def overlap(self, ask: OverlapRequest) -> Overlapping:
        """Set whether an instance and its guests compute at once, or in turn."""
        return self.call("POST", "overlap", Overlapping, ask)

    def share(self, ask: ShareRequest) -> GuestSharing:
        """Bound the share of an instance's device that guests beside the instance take."""
        return self.call("POST", "share", GuestSharing, ask)

    def expert_load(self, ask: ExpertLoadRequest) -> ExpertLoad:
        """Return how often each of an instance's experts is chosen."""
        return self.call("POST", "expert-load", ExpertLoad, ask)

    def placement(self) -> ClusterPlacement:
        """Return which modules run on which instances."""
        return self.call("GET", "placement", ClusterPlacement)

    def status(self) -> ServerStatus:
        """Return the state of instances, moves and the orchestrator."""
        return self.call("GET", "status", ServerStatus)

    def decisions(self, last: int | None = None) -> list[DecisionRecord]:
        """Return the orchestrator's decisions, the oldest first."""
        return self.call("GET", f"decisions{_last(last)}", list[DecisionRecord])

    def requests(self, last: int | None = None) -> list[RequestSummary]:
        """Return summaries of the last requests, the oldest first."""
        return self.call("GET", f"traces{_last(last)}", list[RequestSummary])

    def trace(self, request_id: str) -> RequestTrace:
        """Return the trace of a request: the instances it ran on and its outcome.

        Args:
            request_id: Id of the request, or an unambiguous beginning of the id.
        """
        return self.call("GET", f"traces/{_quoted(request_id)}", RequestTrace)

    def set_paused(self, paused: bool) -> ControllerStatus:
        """Pause or resume the orchestrator."""
        return self.call("POST", "orchestrator", ControllerStatus, PauseRequest(paused))

    def drain(self, instance: str) -> DrainState:
        """Let the streams of an instance go on elsewhere, and send it no more requests."""
        return self.call("POST", f"drains/{_quoted(instance)}", DrainState)

    def show_drain(self, instance: str, wait_s: float = 0.0) -> DrainState:
        """Return what is left on a drained instance, when nothing is left or after ``wait_s``."""
        return self.call("GET", f"drains/{_quoted(instance)}?wait_s={wait_s:g}", DrainState)

    def release(self, instance: str) -> DrainState:
        """Let an instance that was drained serve again."""
        return self.call("DELETE", f"drains/{_quoted(instance)}", DrainState)

    def nodes(self) -> list[NodeStatus]:
        """Return the nodes that engines run on."""
        return self.call("GET", "nodes", list[NodeStatus])

    def run(self, ask: MigrationRequest, timeout_s: float = 600.0) -> Migration:
        """Begin a migration and wait until it succeeds or fails; longer is an error, too."""
        migration = self.migrations.begin(ask)
        for _ in range(int(timeout_s)):
            if not migration.is_open:
                return migration
            migration = self.migrations.show(migration.id, wait_s=1.0)
        raise UserError(f"migration {migration.id} has not ended in {timeout_s:.0f} s")

    def call(
        self, method: str, path: str, kind: type[T], ask: Any = None, timeout_s: float = _TIMEOUT_S
    ) -> T:
        """Send ``ask``, if any, to a path below ``/admin``; return the answer, read as ``kind``."""
        body = None if ask is None else msgspec.json.encode(ask)
        with self.asked(method, f"/admin/{path}", body, timeout_s) as answer:
            return msgspec.json.decode(answer.read(), type=kind)


def _trusting(certificate: str, is_own: bool) -> ssl.SSLContext:
    """Return a TLS context that trusts the file's certificates and no others."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(certificate)
    except OSError as error:  # ssl.SSLError is an OSError with its own reason
        reason = error.strerror or getattr(error, "reason", None) or error
        raise UserError(f"cannot read the certificate {certificate}: {reason}") from None
    # The server's own certificate need not be an authority's.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not is_own
    return context


def _is_here(url: str) -> bool:
    """Return whether ``url`` is on this machine: a proxy, which would see the key, is not used."""
    host = None
    try:
        host = urllib.parse.urlsplit(url).hostname
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _last(number: int | None) -> str:
    """Return the query for the last ``number`` records; for all that are kept, if it is None."""
    return "" if number is None else f"?last={number}"
