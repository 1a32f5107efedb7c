"""The admin API over instances without engines, as tests of it and of the page want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executor_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.errors import UserError
from banaserve.contracts.control_api import ControllerState
from banaserve.contracts.restart_api import EngineRestart, RestartRequest, RollingRestart
from banaserve.frontdoor.admin.app import AdminMiddleware, Traces
from banaserve.frontdoor.admin.control import Control
from banaserve.frontdoor.admin.live import LivePage
from banaserve.orchestrator.control.routing.registry import make_named
from banaserve.orchestrator.control.turn import Mode
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.orchestrator.planner.loop.loop import Controller, ControllerOptions
from banaserve.serving.operations.node_changes import NodeChanges
from banaserve.serving.operations.roles import Drains
from banaserve.serving.tracing.request_log import RequestLog
from banaserve.serving.tracing.trace_collection import TraceCollector
from scaling_doubles import Cluster, Factory, Machines, scaler_of
from waiting import until

KEY = "the-admin-key"


class Restarts:
    """Takes one restart, which goes on until it is given up."""

    def __init__(self) -> None:
        self.asked: list[RestartRequest] = []
        self.found: dict[str, RollingRestart] = {}

    async def begin(self, ask: RestartRequest) -> RollingRestart:
        if ask.model == "bad":
            raise UserError("no engine could serve it")
        self.asked.append(ask)
        engines = [EngineRestart("p1", "draining", 2), EngineRestart("d0")]
        self.found["s1"] = RollingRestart("s1", "running", engines, ask.model)
        return self.found["s1"]

    def get(self, name: str) -> RollingRestart | None:
        return self.found.get(name)

    def recent(self) -> list[RollingRestart]:
        return list(self.found.values())

    async def wait(self, name: str, _: float) -> RollingRestart:
        return self.found[name]

    def abort(self, name: str) -> RollingRestart:
        self.found[name].state = "aborted"
        return self.found[name]


async def users_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing here is for users")


class Served:
    """The admin API over instances without engines; the loop of the orchestrator stands."""

    async def open(self, folder: Path) -> AdminMiddleware:
        self.world = doubles.World(folder)
        self.world.overseer.start()
        await self.world.executor.discover()
        options = ControllerOptions(mode=Mode.ON, interval_s=3600)
        self.controller = Controller(
            self.world.executor, options, DecisionLog(), WallClock(), lambda: 1.7e9
        )
        self.controller.start()
        await until(lambda: self.controller.status().state is ControllerState.RUNNING)
        drains = Drains(self.world.instances, self.world.roles)
        self.machines = Machines(a="d0 p0", b="p1 x0")
        self.scaler = scaler_of(self.world, drains, Factory(self.machines))
        self.restarts: Any = Restarts()
        cluster: Any = Cluster(self.world)
        launcher: Any = self.machines
        self.nodes = NodeChanges(launcher, self.scaler, cluster, WallClock())
        control = Control(
            self.controller,
            self.world.executor,
            self.world.roles,
            drains,
            self.scaler,
            make_named("round_robin"),
            self.restarts,
            self.nodes,
        )
        coordinator, instances = self.world.cluster.coordinator, self.world.instances
        self.requests = RequestLog(WallClock())
        self.page = LivePage(control, coordinator, self.requests, WallClock(), None)
        traces: Any = Traces(self.requests, TraceCollector(instances, WallClock()))
        return AdminMiddleware(users_app, coordinator, KEY, control, traces, self.page)

    async def close(self) -> None:
        self.page.viewers.close()
        await self.nodes.stop()
        await self.scaler.stop()
        await self.controller.stop()
        await self.world.roles.stop()
        await self.world.overseer.stop()
        await self.world.cluster.close()
