"""A client of the admin API, for commands and benchmarks. Imports neither torch nor vllm."""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Generic, Protocol, TypeVar

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


class Call(Protocol):
    """Function that makes one call of the admin API."""

    def __call__(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: bytes | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> T:
        """Return the answer, read as ``kind``.

        Raises:
            UserError: The request is refused, or the server cannot be reached.
        """
        ...


class OperationClient(Generic[Ask, State]):
    """Client of one kind of operation; an operation goes on after the call that begins it.

    Each method raises ``UserError`` if the request is refused or the server cannot be reached.

    Args:
        name: Last part of the operations' path.
        kind: Type of an operation's state.
        begin_timeout_s: Maximum time that ``begin`` waits for its answer, in seconds.
    """

    def __init__(
        self, call: Call, name: str, kind: type[State], begin_timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._call = call
        self._path = f"/admin/{name}"
        self._kind = kind
        self._begin_timeout_s = begin_timeout_s

    def begin(self, ask: Ask) -> State:
        """Begin an operation."""
        body = msgspec.json.encode(ask)
        return self._call("POST", self._path, self._kind, body, self._begin_timeout_s)

    def show(self, name: str, wait_s: float = 0.0) -> State:
        """Return the state of the operation with this id, at its end or after ``wait_s``."""
        return self._call("GET", f"{self._path}/{name}?wait_s={wait_s:g}", self._kind)

    def abort(self, name: str) -> State:
        """End the operation with this id early: what can be undone is undone."""
        return self._call("DELETE", f"{self._path}/{name}", self._kind)

    def last(self) -> list[State]:
        """Return the last operations, the oldest first, if the server keeps those of this kind."""
        return self._call("GET", self._path, list[self._kind])  # type: ignore[name-defined]


class AdminClient:
    """Client of one server's admin API; every call blocks.

    Args:
        url: URL of the front door, without a path.
        certificate: File of the server's TLS certificate or its authority's; empty for the
            authorities that this machine trusts.
        is_own: True if ``certificate`` is the server's own: its host name is not checked.

    Raises:
        UserError: The certificate cannot be read.
    """

    def __init__(self, url: str, key: str, certificate: str = "", is_own: bool = False) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._opener = opener_of(self._url, certificate, is_own)
        call = self._call
        self.migrations = OperationClient[MigrationRequest, Migration](
            call, "migrations", Migration
        )
        self.roles = OperationClient[RoleRequest, RoleChange](call, "roles", RoleChange)
        self.scalings = OperationClient[ScaleRequest, Scaling](call, "scalings", Scaling)
        self.restarts = OperationClient[RestartRequest, RollingRestart](
            call, "restarts", RollingRestart, _FETCH_TIMEOUT_S
        )
        self.node_changes = OperationClient[NodeRequest, NodeChange](
            call, "node-changes", NodeChange
        )

    def page_code(self) -> PageCode:
        """Get a code that opens the page once.

        Raises:
            UserError: There is no page, or the server cannot be reached.
        """
        return self._call("POST", "/admin/page-code", PageCode)

    def overlap(self, ask: OverlapRequest) -> Overlapping:
        """Set whether an instance and its guests compute at once, or in turn.

        Raises:
            UserError: The request is refused, or the server cannot be reached.
        """
        return self._call("POST", "/admin/overlap", Overlapping, msgspec.json.encode(ask))

    def share(self, ask: ShareRequest) -> GuestSharing:
        """Bound the share of an instance's device that guests beside the instance take.

        Raises:
            UserError: The request is refused, or the server cannot be reached.
        """
        return self._call("POST", "/admin/share", GuestSharing, msgspec.json.encode(ask))

    def expert_load(self, ask: ExpertLoadRequest) -> ExpertLoad:
        """Return how often each of an instance's experts is chosen.

        Raises:
            UserError: The request is refused, or the server cannot be reached.
        """
        return self._call("POST", "/admin/expert-load", ExpertLoad, msgspec.json.encode(ask))

    def placement(self) -> ClusterPlacement:
        """Return which modules run on which instances.

        Raises:
            UserError: The server cannot be reached.
        """
        return self._call("GET", "/admin/placement", ClusterPlacement)

    def status(self) -> ServerStatus:
        """Return the state of instances, moves and the orchestrator.

        Raises:
            UserError: The server cannot be reached.
        """
        return self._call("GET", "/admin/status", ServerStatus)

    def decisions(self, last: int | None = None) -> list[DecisionRecord]:
        """Return the orchestrator's decisions, the oldest first.

        Raises:
            UserError: The server cannot be reached.
        """
        query = "" if last is None else f"?last={last}"
        return self._call("GET", f"/admin/decisions{query}", list[DecisionRecord])

    def requests(self, last: int | None = None) -> list[RequestSummary]:
        """Return summaries of the last requests, the oldest first.

        Raises:
            UserError: The server cannot be reached.
        """
        query = "" if last is None else f"?last={last}"
        return self._call("GET", f"/admin/traces{query}", list[RequestSummary])

    def trace(self, request_id: str) -> RequestTrace:
        """Return the trace of a request: the instances it ran on and its outcome.

        Args:
            request_id: Id of the request, or an unambiguous beginning of the id.

        Raises:
            UserError: No request or several match, or the server cannot be reached.
        """
        path = f"/admin/traces/{urllib.parse.quote(request_id, safe='')}"
        return self._call("GET", path, RequestTrace)

    def set_paused(self, paused: bool) -> ControllerStatus:
        """Pause or resume the orchestrator.

        Raises:
            UserError: The server cannot be reached.
        """
        body = msgspec.json.encode(PauseRequest(paused))
        return self._call("POST", "/admin/orchestrator", ControllerStatus, body)

    def drain(self, instance: str) -> DrainState:
        """Let the streams of an instance go on elsewhere, and send the instance no more requests.

        Raises:
            UserError: The request is refused, or the server cannot be reached.
        """
        return self._call("POST", _drain_path(instance), DrainState)

    def show_drain(self, instance: str, wait_s: float = 0.0) -> DrainState:
        """Return what is left on a drained instance; wait up to ``wait_s`` until nothing is left.

        Raises:
            UserError: There is no such drain, or the server cannot be reached.
        """
        return self._call("GET", f"{_drain_path(instance)}?wait_s={wait_s:g}", DrainState)

    def release(self, instance: str) -> DrainState:
        """Let an instance that was drained serve again.

        Raises:
            UserError: The instance was not drained, or the server cannot be reached.
        """
        return self._call("DELETE", _drain_path(instance), DrainState)

    def nodes(self) -> list[NodeStatus]:
        """Return the nodes that engines run on.

        Raises:
            UserError: The server cannot be reached.
        """
        return self._call("GET", "/admin/nodes", list[NodeStatus])

    def run(self, ask: MigrationRequest, timeout_s: float = 600.0) -> Migration:
        """Begin a migration and wait until it succeeds or fails.

        Raises:
            UserError: The migration is refused or takes longer, or the server cannot be reached.
        """
        migration = self.migrations.begin(ask)
        for _ in range(int(timeout_s)):
            if not migration.is_open:
                return migration
            migration = self.migrations.show(migration.id, wait_s=1.0)
        raise UserError(f"migration {migration.id} has not ended in {timeout_s:.0f} s")

    def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: bytes | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> T:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self._url + path, body, headers, method=method)
            with self._opener.open(request, timeout=timeout_s) as response:
                return msgspec.json.decode(response.read(), type=kind)
        except urllib.error.HTTPError as refused:
            raise UserError(_message(refused)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"no banaserve answers at {self._url}: {reason}") from None


def opener_of(url: str, certificate: str, is_own: bool) -> urllib.request.OpenerDirector:
    """Return an opener of requests to the server at ``url``; see ``AdminClient``.

    Raises:
        UserError: The certificate cannot be read.
    """
    context = _trusting(certificate, is_own) if certificate else None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if _is_here(url):
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


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


def _message(refused: urllib.error.HTTPError) -> str:
    if refused.code == 401:
        return "the server refuses the admin key: give its --admin-key"
    try:
        return msgspec.json.decode(refused.read(), type=_ErrorBody).error.message
    except (msgspec.DecodeError, OSError, http.client.HTTPException):
        return f"the server answers {refused.code} {refused.reason}"


def _drain_path(instance: str) -> str:
    return f"/admin/drains/{urllib.parse.quote(instance, safe='')}"
