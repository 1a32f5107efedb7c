"""The admin API's part about instances: status, decisions, pause, roles, drains and scalings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.api.admin_answers import (
    PREFIX,
    Endpoint,
    answer,
    last_of,
    not_found,
    refusing,
    wait_s_of,
)
from banaserve.api.status import status_of
from banaserve.controller.loop import Controller
from banaserve.controller.schemas import PauseRequest, RoleRequest, ScaleRequest
from banaserve.engine.vllm.drain import Drains
from banaserve.engine.vllm.migration.controller.coordinator import Coordinator
from banaserve.engine.vllm.migration_executor import MoveExecutor
from banaserve.engine.vllm.restart.api import RestartRequest
from banaserve.engine.vllm.restart.rolling import RollingRestarts
from banaserve.engine.vllm.role_switch import Roles
from banaserve.engine.vllm.scaling.plan import InstanceCounts
from banaserve.engine.vllm.scaling.scaler import Scaler
from banaserve.orchestrator.routing.named import NamedPolicy


@dataclass(frozen=True, slots=True)
class Control:
    """Who decides and who carries it out, and who routes."""

    controller: Controller
    executor: MoveExecutor
    roles: Roles
    drains: Drains
    scaler: Scaler
    routing: NamedPolicy
    restarts: RollingRestarts


def control_routes(control: Control, coordinator: Coordinator) -> list[Route]:
    return [
        Route(f"{PREFIX}/status", _status(control, coordinator)),
        Route(f"{PREFIX}/decisions", _decisions(control)),
        Route(f"{PREFIX}/orchestrator", _controller(control), methods=["GET"]),
        Route(f"{PREFIX}/orchestrator", _pause(control), methods=["POST"]),
        Route(f"{PREFIX}/roles", _role_list(control), methods=["GET"]),
        Route(f"{PREFIX}/roles", _role_begin(control), methods=["POST"]),
        Route(f"{PREFIX}/roles/{{id}}", _role_show(control), methods=["GET"]),
        Route(f"{PREFIX}/roles/{{id}}", _role_abort(control), methods=["DELETE"]),
        Route(f"{PREFIX}/drains/{{id}}", _drain_begin(control), methods=["POST"]),
        Route(f"{PREFIX}/drains/{{id}}", _drain_show(control), methods=["GET"]),
        Route(f"{PREFIX}/drains/{{id}}", _drain_release(control), methods=["DELETE"]),
        Route(f"{PREFIX}/scalings", _scaling_list(control), methods=["GET"]),
        Route(f"{PREFIX}/scalings", _scaling_begin(control), methods=["POST"]),
        Route(f"{PREFIX}/scalings/{{id}}", _scaling_show(control), methods=["GET"]),
        Route(f"{PREFIX}/scalings/{{id}}", _scaling_abort(control), methods=["DELETE"]),
        Route(f"{PREFIX}/restarts", _restart_list(control), methods=["GET"]),
        Route(f"{PREFIX}/restarts", _restart_begin(control), methods=["POST"]),
        Route(f"{PREFIX}/restarts/{{id}}", _restart_show(control), methods=["GET"]),
        Route(f"{PREFIX}/restarts/{{id}}", _restart_abort(control), methods=["DELETE"]),
    ]


def _status(control: Control, coordinator: Coordinator) -> Endpoint:
    @refusing
    async def status(_: Request) -> Response:
        found = status_of(
            control.executor.view(),
            coordinator,
            control.roles,
            control.scaler.recent(),
            control.controller.status(),
            control.routing,
            time.time(),
            control.restarts.recent(),
        )
        return answer(found)

    return status


def _decisions(control: Control) -> Endpoint:
    """``?last=20``: so many of the last ones, the oldest first; all that are kept without it."""

    @refusing
    async def decisions(request: Request) -> Response:
        return answer(control.controller.log.last(last_of(request)))

    return decisions


def _controller(control: Control) -> Endpoint:
    @refusing
    async def controller(_: Request) -> Response:
        return answer(control.controller.status())

    return controller


def _pause(control: Control) -> Endpoint:
    @refusing
    async def pause(request: Request) -> Response:
        ask = msgspec.json.decode(await request.body(), type=PauseRequest)
        control.controller.set_paused(ask.paused)
        return answer(control.controller.status())

    return pause


def _role_list(control: Control) -> Endpoint:
    @refusing
    async def roles(_: Request) -> Response:
        return answer(control.roles.recent())

    return roles


def _role_begin(control: Control) -> Endpoint:
    @refusing
    async def begin(request: Request) -> Response:
        ask = msgspec.json.decode(await request.body(), type=RoleRequest)
        change = control.roles.begin(
            ask.instance, ask.role, ask.timeout_s, step_tokens=ask.max_num_batched_tokens
        )
        return answer(change, HTTPStatus.ACCEPTED)

    return begin


def _role_show(control: Control) -> Endpoint:
    """``?wait_s=5`` answers when it has ended, after five seconds at the latest."""

    @refusing
    async def show(request: Request) -> Response:
        change = control.roles.get(request.path_params["id"])
        if change is None:
            return not_found("role switch", request)
        wait_s = wait_s_of(request)
        if wait_s and change.is_open:
            await control.roles.wait(change.id, wait_s)
        return answer(change)

    return show


def _role_abort(control: Control) -> Endpoint:
    @refusing
    async def abort(request: Request) -> Response:
        change = control.roles.get(request.path_params["id"])
        if change is None:
            return not_found("role switch", request)
        return answer(control.roles.abort(change.id), HTTPStatus.ACCEPTED)

    return abort


def _drain_begin(control: Control) -> Endpoint:
    @refusing
    async def begin(request: Request) -> Response:
        return answer(control.drains.begin(request.path_params["id"]), HTTPStatus.ACCEPTED)

    return begin


def _drain_show(control: Control) -> Endpoint:
    """``?wait_s=5`` answers when nothing is left, after five seconds at the latest."""

    @refusing
    async def show(request: Request) -> Response:
        return answer(await control.drains.state(request.path_params["id"], wait_s_of(request)))

    return show


def _drain_release(control: Control) -> Endpoint:
    @refusing
    async def release(request: Request) -> Response:
        return answer(control.drains.release(request.path_params["id"]))

    return release


def _scaling_list(control: Control) -> Endpoint:
    @refusing
    async def scalings(_: Request) -> Response:
        return answer(control.scaler.recent())

    return scalings


def _scaling_begin(control: Control) -> Endpoint:
    @refusing
    async def begin(request: Request) -> Response:
        ask = msgspec.json.decode(await request.body(), type=ScaleRequest)
        wanted = InstanceCounts(ask.prefill, ask.decode, ask.colocated, ask.instances)
        return answer(control.scaler.begin(wanted, ask.timeout_s), HTTPStatus.ACCEPTED)

    return begin


def _scaling_show(control: Control) -> Endpoint:
    """``?wait_s=5`` answers when it has ended, after five seconds at the latest."""

    @refusing
    async def show(request: Request) -> Response:
        scaling = control.scaler.get(request.path_params["id"])
        if scaling is None:
            return not_found("scaling", request)
        return answer(await control.scaler.wait(scaling.id, wait_s_of(request)))

    return show


def _scaling_abort(control: Control) -> Endpoint:
    @refusing
    async def abort(request: Request) -> Response:
        scaling = control.scaler.get(request.path_params["id"])
        if scaling is None:
            return not_found("scaling", request)
        return answer(control.scaler.abort(scaling.id), HTTPStatus.ACCEPTED)

    return abort


def _restart_list(control: Control) -> Endpoint:
    @refusing
    async def restarts(_: Request) -> Response:
        return answer(control.restarts.recent())

    return restarts


def _restart_begin(control: Control) -> Endpoint:
    @refusing
    async def begin(request: Request) -> Response:
        ask = msgspec.json.decode(await request.body(), type=RestartRequest)
        return answer(await control.restarts.begin(ask), HTTPStatus.ACCEPTED)

    return begin


def _restart_show(control: Control) -> Endpoint:
    """``?wait_s=5`` answers when it has ended, after five seconds at the latest."""

    @refusing
    async def show(request: Request) -> Response:
        restart = control.restarts.get(request.path_params["id"])
        if restart is None:
            return not_found("restart", request)
        wait_s = wait_s_of(request)
        if wait_s and restart.is_open:
            await control.restarts.wait(restart.id, wait_s)
        return answer(restart)

    return show


def _restart_abort(control: Control) -> Endpoint:
    @refusing
    async def abort(request: Request) -> Response:
        restart = control.restarts.get(request.path_params["id"])
        if restart is None:
            return not_found("restart", request)
        return answer(control.restarts.abort(restart.id), HTTPStatus.ACCEPTED)

    return abort
