"""Status of a running server, composed from values at hand: no engine is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from banaserve.base.types import ClusterView, InstanceView
from banaserve.contracts.control_api import ControllerStatus, InstanceStatus, MoveLine, ServerStatus
from banaserve.contracts.instances import NodeChange, NodeStatus, Scaling
from banaserve.contracts.migration_api import Migration
from banaserve.contracts.restart_api import RollingRestart
from banaserve.orchestrator.control.measure import judge, load_of
from banaserve.orchestrator.control.migration.scoring import module_words
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.orchestrator.planner.loop.decision_format import pressure_words
from banaserve.serving.executor import seconds_of
from banaserve.serving.migration.coordinator import Coordinator
from banaserve.serving.roles.role_switch import Roles

_OPEN = ("waiting", "running", "draining", "starting", "going back", "joining", "leaving")
_ENDED_SHOWN = 5
_WORDS_SHOWN = 48


def status_of(
    view: ClusterView,
    coordinator: Coordinator,
    roles: Roles,
    scalings: Iterable[Scaling],
    controller: ControllerStatus,
    routing: NamedPolicy,
    at_s: float,
    restarts: Sequence[RollingRestart] = (),
    node_changes: Iterable[NodeChange] = (),
    nodes: Sequence[NodeStatus] = (),
) -> ServerStatus:
    """Return instances, their moves, nodes and the controller; ``at_s`` is seconds since 1970."""
    left_out = judge(view).left_out
    replaced = {
        one.instance
        for restart in restarts
        if restart.is_open
        for one in restart.engines
        if one.state in ("draining", "starting")
    }
    instances = [
        _instance(one, view, coordinator, roles, str(left_out.get(name, "")), name in replaced)
        for name, one in view.instances.items()
    ]
    moves = [_migration_line(migration) for migration in coordinator.recent()]
    moves += [
        MoveLine(
            change.id,
            f"{change.instance} from {change.old} to {change.role}, {change.num_left} left",
            change.state,
            change.seconds,
            change.reason,
        )
        for change in roles.recent()
    ]
    moves += [_scaling_line(scaling) for scaling in scalings]
    moves += [_restart_line(restart) for restart in restarts]
    moves += [_node_line(change) for change in node_changes]
    ended = [move for move in moves if not _is_open(move)]
    kept = [move for move in moves if _is_open(move)] + ended[-_ENDED_SHOWN:]
    return ServerStatus(
        at_s,
        instances,
        kept,
        controller,
        routing.name,
        routing.package,
        list(nodes),
        pressure_words(view.back_pressure),
    )


def _is_open(move: MoveLine) -> bool:
    return move.state in _OPEN


def _migration_line(migration: Migration) -> MoveLine:
    what = "; ".join(f"{_short(move.modules)} {move.phase}" for move in migration.moves)
    where = f"{migration.host} to {migration.to}" if migration.to else f"home to {migration.host}"
    seconds = seconds_of(migration)
    return MoveLine(migration.id, f"{where}: {what}", migration.state, seconds, migration.error)


def _scaling_line(scaling: Scaling) -> MoveLine:
    why = f" ({scaling.why})" if scaling.why else ""
    now = f": {scaling.now}" if scaling.now else ""
    what = f"to {scaling.wanted}{why}{now}"
    return MoveLine(scaling.id, what, scaling.state, scaling.seconds, scaling.reason)


def _node_line(change: NodeChange) -> MoveLine:
    why = f" ({change.why})" if change.why else ""
    now = f": {change.now}" if change.now else ""
    what = f"{change.action} node {change.node}{why}{now}"
    return MoveLine(change.id, what, change.state, change.seconds, change.reason)


def _restart_line(restart: RollingRestart) -> MoveLine:
    what = f"rolling restart: {restart}"
    return MoveLine(restart.id, what, restart.state, restart.seconds, restart.reason)


def _short(words: str) -> str:
    """Return ``words`` shortened: the heads of many layers would fill the screen."""
    return words if len(words) <= _WORDS_SHOWN else words[: _WORDS_SHOWN - 3] + "..."


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
        node=host_state.instance.node,
    )


def _state(one: InstanceView, coordinator: Coordinator, roles: Roles) -> str:
    if any(change.is_open and change.instance == one.id for change in roles.recent()):
        return "draining"
    instance = coordinator.hosts[one.id].instance
    if instance.service.is_drained:
        return "drained"
    if instance.is_ready:
        return "ready"
    return "down" if instance.has_machine else "away"
