"""Admin API of instances: status, decisions, roles, drains, scalings and nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.contracts.control_api import (
    NodeRequest,
    PauseRequest,
    RoleRequest,
    ScaleRequest,
    ServerStatus,
)
from banaserve.contracts.instances import NodeChange, RoleChange, Scaling
from banaserve.contracts.restart_api import RestartRequest
from banaserve.frontdoor.admin.answers import answer, last_of, route, wait_s_of
from banaserve.frontdoor.admin.operations import operation_routes
from banaserve.frontdoor.admin.status import status_of
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.orchestrator.planner.loop.loop import Controller
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.operations.executor import MoveExecutor
from banaserve.serving.operations.node_changes import NodeChanges
from banaserve.serving.operations.roles import Drains, Roles
from banaserve.serving.operations.rolling_restart import RollingRestarts
from banaserve.serving.operations.scale_plan import InstanceCounts
from banaserve.serving.operations.scaler import Scaler


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
        return status_of(
            self.executor.view(),
            coordinator,
            self.roles,
            self.scaler,
            self.restarts,
            self.nodes if with_nodes else None,
            self.controller.status(),
            self.routing,
            time.time(),
        )

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
        route("/status", _status, control, coordinator),
        route("/decisions", _decisions, control),
        route("/orchestrator", _controller, control),
        route("/orchestrator", _pause, control, method="POST"),
        route("/drains/{id}", _drain_begin, control, method="POST"),
        route("/drains/{id}", _drain_show, control),
        route("/drains/{id}", _drain_release, control, method="DELETE"),
        route("/nodes", _nodes, control),
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


async def _status(control: Control, coordinator: Coordinator, _: Request) -> Response:
    return answer(control.status(coordinator))


async def _nodes(control: Control, _: Request) -> Response:
    return answer(control.nodes.nodes())


async def _decisions(control: Control, request: Request) -> Response:
    """Return decisions, the oldest first; ``?last=20``: only the last 20."""
    return answer(control.controller.log.last(last_of(request)))


async def _controller(control: Control, _: Request) -> Response:
    return answer(control.controller.status())


async def _pause(control: Control, request: Request) -> Response:
    ask = msgspec.json.decode(await request.body(), type=PauseRequest)
    control.controller.set_paused(ask.paused)
    return answer(control.controller.status())


async def _drain_begin(control: Control, request: Request) -> Response:
    return answer(control.drains.begin(request.path_params["id"]), HTTPStatus.ACCEPTED)


async def _drain_show(control: Control, request: Request) -> Response:
    """Return the state of a drain; ``?wait_s=5``: wait up to 5 s until nothing is left."""
    return answer(await control.drains.state(request.path_params["id"], wait_s_of(request)))


async def _drain_release(control: Control, request: Request) -> Response:
    return answer(control.drains.release(request.path_params["id"]))
