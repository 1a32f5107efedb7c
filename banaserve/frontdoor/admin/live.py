"""Live state of the server for its page: ``GET /admin/live``, a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import msgspec
import psutil
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.base.clock import Clock
from banaserve.contracts.migration_api import UnitModules
from banaserve.frontdoor.admin.answers import PREFIX
from banaserve.frontdoor.admin.control import Control
from banaserve.frontdoor.admin.page_access import PageAccess
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.frontdoor.metrics import StoreStatsReader
from banaserve.frontdoor.page.figures import WINDOW_S
from banaserve.frontdoor.page.snapshot import modules_away, snapshot_of
from banaserve.frontdoor.page.viewers import PageState, Viewers
from banaserve.kvstore.stats import StoreStats
from banaserve.migration.units.base import MigrationUnit
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
        viewers: Viewers of the page.
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
                modules_away(_plain(unit.modules), unit.at, str(unit.modules))
                for unit in host.units(coordinator.guests)
            ]
            for host in coordinator.hosts.values()
        }
        moving = {
            migration_id: [_plain(unit) for unit in units]
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


def _plain(unit: MigrationUnit) -> UnitModules:
    found: UnitModules = msgspec.convert(write_modules(unit), UnitModules)
    return found


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
