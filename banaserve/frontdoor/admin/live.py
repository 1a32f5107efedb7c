"""Live state of the server for its page, a stream of server-sent events, and a tab's access."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import psutil
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.base.clock import Clock
from banaserve.frontdoor.admin.answers import PREFIX, answer
from banaserve.frontdoor.admin.control import Control
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.frontdoor.metrics import StoreStatsReader
from banaserve.frontdoor.middleware.api_keys import digest_of
from banaserve.frontdoor.page.records import PageCode, PageToken
from banaserve.frontdoor.page.snapshot import WINDOW_S, modules_away, snapshot_of
from banaserve.frontdoor.page.viewers import PageState, Viewers
from banaserve.kvstore.stats import StoreStats
from banaserve.migration.units.registry import write_modules
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.tracing.request_log import RequestLog

_DECISIONS, _REQUESTS = 40, 30
_STORE_S = 0.5
"""Timeout of the store's answer, in seconds: a store that hangs is shown as one that does not
answer, and delays nothing else."""
_SEND_S = 20.0
"""Time after which a browser that reads nothing is dropped, in seconds; it reconnects later."""


class LivePage:
    """Source of the page's snapshots of a running server; asks no engine.

    Args:
        clock: Clock of ``requests``.
        store_stats: Returns the store's statistics, may block and may raise
            StoreUnavailableError; None without a store.

    Attributes:
        access: Codes and tokens with which a browser tab reads the page's data.
    """

    def __init__(
        self,
        control: Control,
        coordinator: Coordinator,
        requests: RequestLog,
        clock: Clock,
        store_stats: Callable[[], StoreStats] | None,
    ) -> None:
        self._control = control
        self._coordinator = coordinator
        self._requests = requests
        self._clock = clock
        self._store = StoreStatsReader(store_stats, _STORE_S) if store_stats is not None else None
        self.access = PageAccess(clock)
        self.viewers = Viewers(self.read_state, clock)
        psutil.cpu_percent()  # the next call counts from here

    async def read_state(self) -> PageState:
        """Return everything that the page shows."""
        control, coordinator = self._control, self._coordinator
        stats = await self._store.stats() if self._store is not None else None
        status = control.status(coordinator, with_nodes=False)
        away = {
            host.id: [
                modules_away(write_modules(unit.modules), unit.at, str(unit.modules))
                for unit in host.units(coordinator.guests)
            ]
            for host in coordinator.hosts.values()
        }
        moving = {
            migration_id: [write_modules(unit) for unit in units]
            for host in coordinator.hosts.values()
            for migration_id, units in host.moving.items()
        }
        facts, now_s = coordinator.facts, self._clock.now()
        snapshot = snapshot_of(
            status,
            (facts.num_layers, facts.num_kv_heads),
            away,
            coordinator.recent(),
            moving,
            self._requests.lately(now_s - WINDOW_S),
            now_s,
            stats,
            self._requests.last(_REQUESTS),
            psutil.cpu_percent() / 100,
        )
        return PageState(snapshot, control.controller.log.last(_DECISIONS))


def live_routes(page: LivePage) -> list[Route]:
    """Return the page's route; like all of the admin API it needs a key or token in a header."""
    return [Route(f"{PREFIX}/live", _live(page.viewers), methods=["GET"])]


def _live(viewers: Viewers) -> Callable[[Request], object]:
    async def live(_: Request) -> Response:
        if viewers.is_full:
            return refuse(
                "viewers",
                HTTPStatus.SERVICE_UNAVAILABLE,
                "too many pages are open: close one and try again",
                {"Retry-After": "5"},
            )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream: Response = EventSourceResponse(
            viewers.events(), headers=headers, send_timeout=_SEND_S
        )
        return stream

    return live


CODE_S = 900.0
_MAX_CODES, _MAX_TOKENS = 8, 64
"""Maximum numbers of codes and tokens: a further one replaces the oldest."""


class PageAccess:
    """Codes and tokens of 256 random bits each, of which only digests are kept.

    Codes and tokens end with the server. Tries are not limited: a limit could lock out the holder
    of a code, and 256 random bits cannot be guessed. Used on the event loop only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._codes: deque[tuple[bytes, float]] = deque(maxlen=_MAX_CODES)
        self._tokens: deque[bytes] = deque(maxlen=_MAX_TOKENS)

    def new_code(self) -> str:
        """Return a code that can be exchanged for one token within ``CODE_S`` seconds."""
        code = secrets.token_urlsafe(32)
        self._codes.append((digest_of(code), self._clock.now() + CODE_S))
        return code

    def redeem(self, code: str) -> bool:
        """Return whether a code is valid, and make it invalid."""
        given, now_s = digest_of(code), self._clock.now()
        found = [one for one in self._codes if secrets.compare_digest(given, one[0])]
        for one in found:
            self._codes.remove(one)
        return any(now_s < until_s for _, until_s in found)

    def new_token(self) -> str:
        """Return a token for the admin API, valid until ``forget`` or the server's end."""
        token = secrets.token_urlsafe(32)
        self._tokens.append(digest_of(token))
        return token

    def opens(self, token: str) -> bool:
        """Return whether a token is valid."""
        return bool(self._held(token))

    def forget(self, token: str) -> None:
        """Make a token invalid."""
        for one in self._held(token):
            self._tokens.remove(one)

    def answer(self, method: str, path: str, given: str, *, is_key: bool) -> Response | None:
        """Return the answer to a request about codes or tokens; None for any other request.

        Args:
            path: Request's path below the root path.
            given: Bearer's credential: the admin key, a code or a token.
            is_key: True if the credential is the admin key, which alone obtains codes.
        """
        match method, path.removeprefix(PREFIX):
            case "POST", "/page-code" if is_key:
                return _secret(PageCode(self.new_code(), CODE_S))
            case "POST", "/page-token" if is_key or self.redeem(given):
                return _secret(PageToken(self.new_token()))
            case "DELETE", "/page-token" if self.opens(given):
                self.forget(given)
                return Response(status_code=204)
        return None

    def _held(self, token: str) -> list[bytes]:
        given = digest_of(token)
        return [one for one in self._tokens if secrets.compare_digest(given, one)]


def _secret(value: msgspec.Struct) -> Response:
    response = answer(value)
    response.headers["Cache-Control"] = "no-store"
    return response
