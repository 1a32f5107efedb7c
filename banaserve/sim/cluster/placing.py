"""Execution of the steps of migration plans in virtual time, with their effects on engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from banaserve.base.types import (
    InstanceId,
    Module,
    ModulePlacement,
    MoveModule,
    ReturnModule,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.costs import modules
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.control.turn import words
from banaserve.sim.instances.instance import SimInstance
from banaserve.sim.timeline import Timeline

_PREFILL_STEP_TOKENS = 1024
"""Prompt tokens of a step for which hops are charged while an engine prefills."""


class Placing:
    """Placements of one cell, and the steps under way.

    Attributes:
        under_way: Steps that have begun and are not committed.
        waiting: Steps that begin, in this order, when those under way are committed.
        num_aborted: Number of steps that were aborted because an instance died.
        done: Steps that were committed, each after the time of its commit, in seconds.
        on_begin: Called with each move that begins.
    """

    def __init__(
        self,
        timeline: Timeline,
        instances: Mapping[InstanceId, SimInstance],
        profile: Profile,
        overlap_fraction: float | None,
        attention_fraction: float | None,
    ) -> None:
        self._timeline = timeline
        self._instances = instances
        self._profile = profile
        self._overlap = overlap_fraction
        self._attention = attention_fraction
        self.under_way: list[Step] = []
        self.waiting: deque[Step] = deque()
        self.num_aborted = 0
        self.done: list[tuple[float, Step]] = []
        self.on_begin: list[Callable[[Step], None]] = []

    def put(self, placements: Sequence[ModulePlacement]) -> None:
        """Apply ``placements`` from the start."""
        for placement in placements:
            host, guest = self._instances[placement.host], self._instances[placement.guest]
            host.placements = (*host.placements, placement)
            guest.guest_bytes += placement.guest_bytes
        for name in {one for placement in placements for one in (placement.host, placement.guest)}:
            self._instances[name].fit()
        self.bend()

    def begin_in_order(self, steps: Sequence[Step]) -> None:
        """Start ``steps``, each when the one before it is committed."""
        self.waiting.extend(steps)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self.waiting and not self.under_way:
            self.begin(self.waiting.popleft())

    def begin(self, step: Step) -> None:
        """Start ``step``: roles and sizes of steps change at once.

        Modules are copied while serving continues.
        """
        if isinstance(step.action, SwitchRole | SetStepTokens):
            instance = self._instances[step.action.instance]
            if isinstance(step.action, SwitchRole):
                instance.role = step.action.role
                instance.set_step_tokens(step.action.step_tokens)
            else:
                instance.set_step_tokens(step.action.tokens)
            self._changed(instance)
            self._count(step)
            return
        self.under_way.append(step)
        self._timeline.after(step.cost_s, self._commit, step)
        for told in self.on_begin:
            told(step)

    def _commit(self, step: Step) -> None:
        """Commit ``step`` between two steps of the host, which stops for one synchronisation."""
        if step not in self.under_way:
            return
        self.under_way.remove(step)
        action = step.action
        assert isinstance(action, MoveModule | ReturnModule)
        host, guest = self._instances[action.host], self._instances[action.guest]
        if isinstance(action, MoveModule):
            held = dict(step.influence)[action.guest].guest_bytes
            now_s = self._timeline.now_s
            placement = ModulePlacement(
                action.module, host.id, guest.id, host.epoch + 1, now_s, guest_bytes=held
            )
            host.placements = (*host.placements, placement)
            guest.guest_bytes += held
        else:
            self._take_home(host, action.module)
        host.engine.stall(self._profile.link.sync_s)
        for instance in (host, guest):
            instance.fit()
            self._changed(instance)
        self._count(step)
        self.bend()
        self._begin_waiting()

    def lose(self, dead: SimInstance) -> list[Step]:
        """Abort the steps of a dead instance; hosts take their modules home from it, without KV.

        Returns:
            The steps that were aborted.
        """
        aborted = [step for step in self.under_way if dead.id in step.instances]
        # Waiting steps rely on the steps before them.
        if aborted or any(dead.id in step.instances for step in self.waiting):
            self.waiting.clear()
        self.num_aborted += len(aborted)
        self.under_way[:] = [step for step in self.under_way if dead.id not in step.instances]
        for placement in dead.placements:
            guest = self._instances[placement.guest]
            guest.guest_bytes -= placement.guest_bytes
            guest.fit()
        dead.placements = ()
        for host in self._instances.values():
            lost = [p.module for p in host.placements if p.guest == dead.id]
            for module in lost:
                self._take_home(host, module)
            if lost:
                host.fit()
                host.engine.lose_kv()
                self._changed(host)
        assert dead.guest_bytes == 0
        dead.fit()
        self.bend()
        return aborted

    def bend(self) -> None:
        """Set every engine's costs by its modules that are away and by the guests beside it."""
        instances = self._instances.values()
        if not any(instance.placements or instance.guest_bytes for instance in instances):
            for instance in instances:
                costs = instance.engine.costs
                costs.guest_share = costs.relief = costs.hop_s = 0.0
            return
        shares = dict.fromkeys(self._instances, 0.0)
        for host in instances:
            costs = host.engine.costs
            relief = hop_s = 0.0
            work = host.engine.work
            for placement in host.placements:
                share = self._share(placement.module, work)
                relieved = self._relief(placement.module, share, work)
                guest = self._instances[placement.guest]
                times_there = host.facts.speed / guest.facts.speed
                # The work that the host waits for takes as long as the guest's device needs.
                relief += relieved - (share - relieved) * (times_there - 1)
                hop_s += self._hop_s(host, placement)
                shares[placement.guest] += share * host.busy_fraction * times_there
            costs.relief = relief
            costs.hop_s = hop_s
        for name, share in shares.items():
            self._instances[name].engine.costs.guest_share = share

    def told(self) -> list[tuple[float, str]]:
        """Return the time and the description of each committed step."""
        return [(at_s, words(step.action)) for at_s, step in self.done]

    def spans(self) -> list[tuple[float, float, str]]:
        """Return the start, the duration and the description of each committed step."""
        return [
            (at_s, 0.0, words(step.action))
            if isinstance(step.action, SwitchRole | SetStepTokens)
            else (at_s - step.cost_s, step.cost_s, words(step.action))
            for at_s, step in self.done
        ]

    def _share(self, module: Module, work: StepWork) -> float:
        attention = self._attention
        if attention is None:
            attention = modules.attention_fraction(self._profile, work)
        return slabs.compute_share(self._profile.facts, module, attention)

    def _relief(self, module: Module, share: float, work: StepWork) -> float:
        if self._overlap is None:
            return modules.relief(self._profile, module, work)
        return self._overlap * share

    def _hop_s(self, host: SimInstance, placement: ModulePlacement) -> float:
        tokens = len(host.engine.decoding)
        if host.engine.prefilling:
            tokens += _PREFILL_STEP_TOKENS
        distance = host.far.get(placement.guest)
        return modules.hop_s(self._profile, placement.module, tokens, distance)

    def _take_home(self, host: SimInstance, module: Module) -> None:
        for placement in host.placements:
            if placement.module == module:
                self._instances[placement.guest].guest_bytes -= placement.guest_bytes
        host.placements = tuple(p for p in host.placements if p.module != module)

    def _changed(self, instance: SimInstance) -> None:
        instance.epoch += 1
        instance.changed_s = self._timeline.now_s
        instance.is_dirty = True

    def _count(self, step: Step) -> None:
        self.done.append((self._timeline.now_s, step))
