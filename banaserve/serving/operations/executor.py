"""Executor of migration plans on real engines: moves by the coordinator, roles by ``Roles``.

Policies and the coordinator use different types; the free functions translate between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from banaserve.base.clock import Clock
from banaserve.base.errors import BanaServeError, InstanceDeadError, MigrationError, NoAnswerError
from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    Module,
    MoveModule,
    ObservedRequest,
    ReturnModule,
    Role,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.contracts.instances import Ending, StepOutcome
from banaserve.contracts.migration_api import Migration, MigrationRequest
from banaserve.engine.compat.config import VllmConfig, element_bytes
from banaserve.migration.units.base import overlap
from banaserve.migration.units.registry import unit_of
from banaserve.orchestrator.control.cluster_view import Known, cluster_view
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.devices import device_of, relative_speed
from banaserve.orchestrator.control.model.learnt_time import eased, link_of, transfer_time
from banaserve.orchestrator.control.model.moving import Link
from banaserve.pacing.config import settings_of as pacing_of
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.instance import Instance
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.sizes import ModelFacts
from banaserve.serving.operations.roles import Roles

logger = logging.getLogger(__name__)
_HISTORY_S = 300.0
"""Maximum age of a request that a policy is shown, in seconds."""
_FIRST_LINK = Link(bytes_per_s=200e6, sync_s=1.0, hop_s=2e-4)
"""Estimate before the first move: a guest has to be forked, weights come from a disk's cache, and
a message wakes a process."""


def instance_facts(
    config: VllmConfig, model: ModelFacts, kv_growth: float, can_move: bool
) -> InstanceFacts | None:
    """Return the facts of an engine that runs ``config``; None if its sizes are unknown.

    The engine's KV blocks have memory of their own: a module that moves away frees the bytes of
    its KV for more blocks; weights and guests take other memory (see ``migration/kv/host_kv.py``).

    Args:
        config: Configuration of a started engine, which states its number of KV blocks.
        kv_growth: Maximum number of KV blocks, as a multiple of the number at the start.
        can_move: True if layers and heads can leave the engine or come to it.
    """
    num_blocks = config.cache_config.num_gpu_blocks
    block_tokens = config.cache_config.block_size
    if not num_blocks or not block_tokens or model.num_kv_heads < 1:
        return None
    settings = config.model_config
    number_bytes = element_bytes(settings)
    num_heads = settings.get_num_attention_heads(config.parallel_config)
    num_ranks = config.parallel_config.tensor_parallel_size
    vectors = 2 * settings.get_num_kv_heads(config.parallel_config) * num_ranks
    token_bytes = vectors * settings.get_head_size() * number_bytes
    kv_bytes = num_blocks * block_tokens * token_bytes * model.num_layers
    return InstanceFacts(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        layer_weight_bytes=model.layer_weight_bytes,
        layer_token_bytes=token_bytes,
        block_tokens=block_tokens,
        memory_bytes=kv_bytes + model.num_layers * model.layer_weight_bytes,
        hidden_bytes=settings.get_hidden_size() * number_bytes,
        queries_a_head=max(1, num_heads // model.num_kv_heads),
        kv_bytes=kv_bytes,
        max_kv_blocks=max(num_blocks, int(num_blocks * kv_growth)),
        can_move_layers=can_move,
        can_move_heads=can_move and num_ranks == 1,
    )


def with_device(
    facts: InstanceFacts | None, config: VllmConfig, name: InstanceId
) -> InstanceFacts | None:
    """Return ``facts`` with the instance's modelled device if it differs from the usual one."""
    settings = pacing_of(config)
    if facts is None or settings is None or (own := settings.devices.get(name)) is None:
        return facts
    usual = profiles.load(settings.profile)
    return replace(facts, profile=own, speed=relative_speed(device_of(own, usual), usual))


def ask_of(action: MoveModule | ReturnModule) -> MigrationRequest:
    """Return the request to the coordinator for an action of a plan."""
    unit = unit_of(action.module)
    if isinstance(action, ReturnModule):
        return unit.return_request(action.host)
    return unit.move_request(action.host, action.guest)


def foreign_step(migration: Migration, coordinator: Coordinator) -> Step:
    """Return an open migration that was not begun by the policy, as a step without influence.

    The step keeps its instances out of other moves; its effect is seen once it is done.
    """
    host = guest = InstanceId(migration.host)
    host_state = coordinator.hosts[host]
    moving = host_state.moving.get(migration.id, ())
    module = next((module for unit in moving for module in unit.as_modules()), Module(0, 0))
    if migration.to is not None:
        return Step(MoveModule(host, InstanceId(migration.to), module, 0), (), 0.0, 0.0, 0.0)
    for unit in host_state.units(coordinator.guests):
        if any(overlap(one, unit.modules) for one in moving):
            guest = InstanceId(unit.at)
    return Step(ReturnModule(host, guest, module, 0), (), 0.0, 0.0, 0.0)


def bytes_of(migration: Migration) -> int:
    """Return the transferred bytes of KV and weights."""
    names = ("precopy_bytes", "commit_bytes", "weight_bytes")
    return int(sum(move.facts.get(name, 0) for move in migration.moves for name in names))


def seconds_of(migration: Migration) -> float:
    """Return the time of all phases, without the wait for another migration of the host."""
    return float(sum(sum(move.seconds.values()) for move in migration.moves))


def stall_s_of(migration: Migration) -> float:
    return float(sum(move.facts.get("stall_s", 0.0) for move in migration.moves))


@dataclass(eq=False)
class MoveExecutor:
    """Executor of one front door; see ``contracts.instances.Executor``.

    Attributes:
        kv_growth: See ``instance_facts``.
        requests: Function that returns the requests under way and those that arrived since a time
            of ``clock``; None if the policy uses no requests.
    """

    cluster: Cluster
    coordinator: Coordinator
    roles: Roles
    clock: Clock
    kv_growth: float
    requests: Callable[[float], Sequence[ObservedRequest]] | None = None

    def __post_init__(self) -> None:
        self._can_move: dict[InstanceId, tuple[int, bool]] = {}
        self._asking: dict[InstanceId, asyncio.Task[None]] = {}
        self._facts: dict[InstanceId, tuple[tuple[int, bool], InstanceFacts | None]] = {}
        self._active: dict[int, Step] = {}
        self._own_ids: set[str] = set()
        self._learnt: set[str] = set()
        self._transfer = transfer_time(_FIRST_LINK, doubt=2.0)
        self._learnt_s = self.clock.now()
        self._hop_s = _FIRST_LINK.hop_s

    # ---- present state

    async def discover(self) -> None:
        await asyncio.gather(*(self._ask(name) for name in self.coordinator.hosts))

    async def _ask(self, name: InstanceId) -> None:
        """Learn whether an engine can move modules; one that gives no answer is asked again."""
        host_state = self.coordinator.hosts[name]
        incarnation = host_state.instance.incarnation
        try:
            await host_state.refresh()
            self._can_move[name] = incarnation, True
        except (NoAnswerError, InstanceDeadError):
            pass
        except MigrationError:
            self._can_move[name] = incarnation, False

    def _ask_again(self) -> None:
        self._asking = {name: task for name, task in self._asking.items() if not task.done()}
        for name, host in self.coordinator.hosts.items():
            incarnation, can_move = self._can_move.get(name, (0, False))
            # An engine that replaces another one may have other options.
            is_same = incarnation == host.instance.incarnation
            is_known = is_same and (not can_move or host.status is not None)
            if not is_known and name not in self._asking and host.instance.is_ready:
                self._asking[name] = asyncio.create_task(self._ask(name))

    def view(self) -> ClusterView:
        self._learn()
        self._ask_again()
        instances = self.cluster.instances.values()
        known = {instance.id: self._known(instance) for instance in instances}
        now_s = self.clock.now()
        views = self.cluster.views().values()
        view = cluster_view(now_s, views, known, self._under_way())
        if self.requests is None:
            return view
        return replace(view, requests=self.requests(now_s - _HISTORY_S))

    def _known(self, instance: Instance) -> Known:
        llm, name = instance.llm, instance.id
        if llm is None:
            return Known(None)
        can_move = self._can_move.get(name) == (instance.incarnation, True)
        key, (known, facts) = (instance.incarnation, can_move), self._facts.get(name, (None, None))
        config, host_state = llm.vllm_config, self.coordinator.hosts[name]
        if known != key:
            found = instance_facts(config, self.coordinator.facts, self.kv_growth, can_move)
            facts = with_device(found, config, name)
            self._facts[name] = key, facts
        blocks = (config.cache_config.num_gpu_blocks or 0) + host_state.grown_blocks
        parts = host_state.max_microbatches
        overlap = instance.board.meter.overlap_fraction(parts) if parts > 1 else None
        return Known(facts, blocks, overlap)

    def _under_way(self) -> list[Step]:
        """Return the own steps as decided, and the migrations and role switches begun by hand."""
        steps = list(self._active.values())
        for migration in self.coordinator.recent():
            if migration.is_open and migration.id not in self._own_ids:
                steps.append(foreign_step(migration, self.coordinator))
        for change in self.roles.recent():
            if change.is_open and change.id not in self._own_ids:
                old, new = Role(change.old), Role(change.role)
                action = SwitchRole(InstanceId(change.instance), old, new)
                steps.append(Step(action, (), 0.0, 0.0, 0.0))
        return steps

    # ---- execution

    async def carry_out(self, step: Step) -> StepOutcome:
        began_s = self.clock.now()
        self._active[id(step)] = step
        try:
            if isinstance(step.action, SwitchRole):
                outcome = await self._switch(step.action, step)
            elif isinstance(step.action, SetStepTokens):
                instance = self.cluster.instance(step.action.instance)
                await instance.take_budget(instance.role, step.action.tokens)
                outcome = StepOutcome(Ending.DONE, "")
            else:
                outcome = await self._move(step.action, step.timeout_s)
        except BanaServeError as refused:
            outcome = StepOutcome(Ending.REFUSED, str(refused))
        finally:
            del self._active[id(step)]
        if outcome.ending is Ending.DONE or outcome.reverted:
            for name in step.instances:
                if (changed := self.cluster.instances.get(name)) is not None:
                    changed.has_changed()
        return replace(outcome, seconds=self.clock.now() - began_s)

    async def _switch(self, action: SwitchRole, step: Step) -> StepOutcome:
        # Draining may cost as much as the policy assumed when it decided on the switch.
        role, timeout_s, tokens = action.role.value, step.timeout_s, action.step_tokens
        change = self.roles.begin(action.instance, role, timeout_s, step.cost_s, tokens)
        self._own_ids.add(change.id)
        try:
            await self.roles.wait(change.id)
        except asyncio.CancelledError:
            with contextlib.suppress(MigrationError):
                self.roles.abort(change.id)
            raise
        return StepOutcome(Ending(change.state), change.reason)

    async def _move(self, action: MoveModule | ReturnModule, timeout_s: float) -> StepOutcome:
        coordinator = self.coordinator
        migration = await coordinator.begin(ask_of(action))
        self._own_ids.add(migration.id)
        try:
            await coordinator.wait(migration.id, timeout_s)
        except asyncio.CancelledError:
            with contextlib.suppress(MigrationError):
                coordinator.abort(migration.id)
            raise
        is_late = migration.is_open
        if is_late:
            with contextlib.suppress(MigrationError):
                coordinator.abort(migration.id)
            await coordinator.wait(migration.id)
        reverted = migration.state != "done" and await self._revert(action)
        return _outcome(migration, is_late, timeout_s, reverted)

    async def _revert(self, action: MoveModule | ReturnModule) -> bool:
        """Bring home the modules that a move had moved away before it failed."""
        if isinstance(action, ReturnModule):
            return False
        home = unit_of(action.module).return_request(action.host)
        try:
            migration = await self.coordinator.begin(home)
        except BanaServeError:
            return False  # none of the modules is away
        self._own_ids.add(migration.id)
        ended = await self.coordinator.wait(migration.id)
        if ended.state != "done":
            logger.warning("cannot take back what %s has left: %s", action.host, ended.error)
        return ended.state == "done"

    # ---- costs

    def link(self) -> Link:
        meters = [instance.board.meter for instance in self.cluster.instances.values()]
        learnt = [meter.call_s for meter in meters if meter.call_s is not None]
        if learnt:
            self._hop_s = median(learnt) / 2
        age_s = self.clock.now() - self._learnt_s
        return eased(link_of(self._transfer, self._hop_s), _FIRST_LINK, age_s)

    def _learn(self) -> None:
        """Take every completed migration as a measurement, including one begun by hand."""
        kept = set()
        for migration in self.coordinator.recent():
            kept.add(migration.id)
            if migration.state != "done" or migration.id in self._learnt:
                continue
            self._learnt.add(migration.id)
            seconds = seconds_of(migration)
            if seconds > 0:
                self._transfer = self._transfer.observed((1.0, bytes_of(migration)), seconds)
                self._learnt_s = self.clock.now()
                error = self._transfer.error_fraction
                metrics.STEP_ERROR.labels("migration", "").set(error)
        self._learnt &= kept
        self._own_ids = {i for i in self._own_ids if i in kept or self.roles.get(i) is not None}


def _outcome(migration: Migration, is_late: bool, timeout_s: float, reverted: bool) -> StepOutcome:
    ending, reason = Ending(migration.state), migration.error
    if is_late and ending is not Ending.DONE:
        ending = Ending.TIMED_OUT
        reason = reason or f"not done in {timeout_s:.0f} s"
    return StepOutcome(
        ending,
        reason,
        num_bytes=bytes_of(migration),
        stall_s=stall_s_of(migration),
        blocks_gained=migration.blocks_gained,
        reverted=reverted,
    )
