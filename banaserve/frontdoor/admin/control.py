"""Admin API of instances: status, decisions, roles, drains, scalings and nodes; asks no engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.base.errors import MigrationError
from banaserve.base.types import ClusterView, InstanceView
from banaserve.contracts.control_api import (
    ControllerStatus,
    InstanceStatus,
    MoveLine,
    NodeRequest,
    PauseRequest,
    RoleRequest,
    ScaleRequest,
    ServerStatus,
)
from banaserve.contracts.instances import NodeChange, RoleChange, Scaling
from banaserve.contracts.migration_api import Migration
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.frontdoor.admin.answers import (
    answer,
    ask_route,
    last_of,
    operation_routes,
    route,
    value_route,
    wait_s_of,
)
from banaserve.orchestrator.control.measure import judge, load_of
from banaserve.orchestrator.control.move_policies.scoring import module_words
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.orchestrator.control.turn import Mode
from banaserve.orchestrator.planner.loop.decision_format import pressure_words
from banaserve.orchestrator.planner.loop.loop import Controller
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.operation_base import Operations, OperationState
from banaserve.serving.operations.executor import MoveExecutor, seconds_of
from banaserve.serving.operations.node_changes import NodeChanges
from banaserve.serving.operations.roles import Drains, Roles
from banaserve.serving.operations.rolling_restart import RollingRestarts
from banaserve.serving.operations.scale_plan import InstanceCounts
from banaserve.serving.operations.scaler import Scaler

_ENDED_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Control:
    """Components behind these endpoints: those that decide, carry out decisions, and route."""

    controller: Controller
    executor: MoveExecutor
    roles: Roles
    drains: Drains
    scaler: Scaler
    routing: NamedPolicy
    restarts: RollingRestarts
    nodes: NodeChanges

    def status(self, coordinator: Coordinator, *, with_nodes: bool = True) -> ServerStatus:
        """Return instances, operations and the controller; with or without the nodes."""
        view, routing = self.executor.view(), self.routing
        left_out = judge(view).left_out
        replaced = {
            one.instance
            for restart in self.restarts.recent()
            if restart.is_open
            for one in restart.engines
            if one.state in ("draining", "starting")
        }
        instances = [
            _instance(
                one, view, coordinator, self.roles, str(left_out.get(name, "")), name in replaced
            )
            for name, one in view.instances.items()
        ]
        kinds: list[Operations[Any]] = [coordinator, self.roles, self.scaler, self.restarts]
        if with_nodes:
            kinds.append(self.nodes)
        operations: list[OperationState] = [one for kind in kinds for one in kind.recent()]
        ended = [one for one in operations if not one.is_open]
        shown = [one for one in operations if one.is_open] + ended[-_ENDED_SHOWN:]
        return ServerStatus(
            time.time(),
            instances,
            [_line(one) for one in shown],
            self.controller.status(),
            routing.name,
            routing.package,
            self.nodes.nodes() if with_nodes else [],
            pressure_words(view.back_pressure),
        )

    async def pause(self, ask: PauseRequest) -> ControllerStatus:
        if self.controller.status().mode == Mode.OFF:
            raise MigrationError("the orchestrator of this server is off: it begins no step")
        self.controller.set_paused(ask.paused)
        return self.controller.status()

    async def begin_role(self, ask: RoleRequest) -> RoleChange:
        return self.roles.begin(
            ask.instance, ask.role, ask.timeout_s, step_tokens=ask.max_num_batched_tokens
        )

    async def begin_scaling(self, ask: ScaleRequest) -> Scaling:
        wanted = InstanceCounts(ask.prefill, ask.decode, ask.colocated, ask.instances)
        return self.scaler.begin(wanted, ask.timeout_s)

    async def begin_node_change(self, ask: NodeRequest) -> NodeChange:
        if ask.action == "add":
            return self.nodes.begin_add(ask.node)
        return self.nodes.begin_remove(ask.node, ask.timeout_s, are_replaced=ask.are_replaced)


def control_routes(control: Control, coordinator: Coordinator) -> list[Route]:
    return [
        value_route("/status", lambda: control.status(coordinator)),
        route("/decisions", _decisions, control),
        value_route("/orchestrator", control.controller.status),
        ask_route("/orchestrator", PauseRequest, control.pause),
        route("/drains/{id}", _drain_begin, control, method="POST"),
        route("/drains/{id}", _drain_show, control),
        route("/drains/{id}", _drain_release, control, method="DELETE"),
        value_route("/nodes", control.nodes.nodes),
        *operation_routes("roles", "role switch", control.roles, RoleRequest, control.begin_role),
        *operation_routes(
            "scalings", "scaling", control.scaler, ScaleRequest, control.begin_scaling
        ),
        *operation_routes(
            "node-changes", "change of nodes", control.nodes, NodeRequest, control.begin_node_change
        ),
        *operation_routes(
            "restarts", "restart", control.restarts, RestartRequest, control.restarts.begin
        ),
    ]


async def _decisions(control: Control, request: Request) -> Response:
    """Return decisions, the oldest first; ``?last=20``: only the last 20."""
    return answer(control.controller.log.last(last_of(request)))


async def _drain_begin(control: Control, request: Request) -> Response:
    return answer(control.drains.begin(request.path_params["id"]), HTTPStatus.ACCEPTED)


async def _drain_show(control: Control, request: Request) -> Response:
    """Return the state of a drain; ``?wait_s=5``: wait up to 5 s until nothing is left."""
    return answer(await control.drains.state(request.path_params["id"], wait_s_of(request)))


async def _drain_release(control: Control, request: Request) -> Response:
    return answer(control.drains.release(request.path_params["id"]))


def _line(one: OperationState) -> MoveLine:
    seconds = seconds_of(one) if isinstance(one, Migration) else one.seconds
    what = f"rolling restart: {one}" if isinstance(one, RollingRestart) else str(one)
    return MoveLine(one.id, what, one.state, seconds, one.reason)


def _instance(
    one: InstanceView,
    view: ClusterView,
    coordinator: Coordinator,
    roles: Roles,
    left_out: str,
    is_replaced: bool,
) -> InstanceStatus:
    report, host_state = one.report, coordinator.hosts[one.id]
    load = load_of(report) if report is not None else None
    guests = [
        f"{module_words(p.module)} of {host.id}"
        for host in view.instances.values()
        for p in host.placements
        if p.guest == one.id
    ]
    return InstanceStatus(
        id=one.id,
        role=one.role.value,
        state="restarting" if is_replaced else _state(one, coordinator, roles),
        inflight_requests=one.inflight_requests,
        inflight_prefill_tokens=one.inflight_prefill_tokens,
        compute=load.compute if load else None,
        memory=load.memory if load else None,
        num_running=report.num_running if report else 0,
        num_waiting=report.num_waiting if report else 0,
        step_s=report.step_s if report else 0.0,
        step_tokens=report.step_tokens if report else 0.0,
        age_s=one.report_age_s(view.now_s),
        kv_blocks=report.num_kv_blocks if report else 0,
        kv_blocks_gained=host_state.grown_blocks,
        guest_bytes=report.guest_bytes if report else 0,
        epoch=one.epoch,
        away=[f"{module_words(p.module)} at {p.guest}" for p in one.placements],
        guests=guests,
        left_out=left_out,
        gpu_busy_fraction=report.gpu_busy_fraction if report else None,
        gpu_memory_fraction=report.gpu_memory_fraction if report else None,
        node=host_state.instance.place.node,
    )


def _state(one: InstanceView, coordinator: Coordinator, roles: Roles) -> str:
    if any(change.is_open and change.instance == one.id for change in roles.recent()):
        return "draining"
    instance = coordinator.hosts[one.id].instance
    if not instance.is_ready:
        return "down" if instance.place.is_there else "away"
    return "drained" if instance.service.is_drained else "ready"
