"""Scaling of a running server: instances are added, then others are drained and removed.

New instances serve only once all of them have started; a failed start leaves the server unchanged.
The streams of a removed instance move to other instances first, so that no request is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from banaserve.base.clock import Clock
from banaserve.base.errors import MigrationError, UserError
from banaserve.base.types import InstanceId, InstanceView, Role
from banaserve.contracts.instances import Scaling
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.factory import InstanceFactory
from banaserve.serving.instances.instance import Instance
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.operation_base import OperationAbortedError, Operations
from banaserve.serving.operations.roles import Drains, Roles
from banaserve.serving.operations.scale_plan import (
    InstanceCounts,
    ScalePlan,
    plan_leaving,
    plan_scaling,
)

logger = logging.getLogger(__name__)
_POLL_S = 0.02


class Scaler(Operations[Scaling]):
    """Scalings of a cluster, which add and remove instances, one scaling at a time.

    Args:
        coordinator: Coordinator of migrations, which returns the modules beside a leaving instance
            to their hosts.
        is_restarting: Function that returns whether engines are being replaced; then no instance is
            added or removed.
        roles_follow_load: True if the roles follow the load and the user does not choose them.
        has_store: True if there is a store, needed to hand prompts from prefill to decode.
    """

    def __init__(
        self,
        cluster: Cluster,
        coordinator: Coordinator,
        roles: Roles,
        drains: Drains,
        factory: InstanceFactory,
        clock: Clock,
        start_s: float,
        *,
        is_restarting: Callable[[], bool] = lambda: False,
        roles_follow_load: bool = False,
        has_store: bool = True,
    ) -> None:
        super().__init__("scaling", "s", clock)
        self._cluster = cluster
        self._coordinator = coordinator
        self._roles = roles
        self._drains = drains
        self._factory = factory
        self._start_s = start_s
        self._is_restarting = is_restarting
        self._roles_follow_load = roles_follow_load
        self._has_store = has_store
        self._used_ids = set(cluster.instances)

    # ---- requests

    def begin(self, wanted: InstanceCounts, timeout_s: float, why: str = "") -> Scaling:
        """Begin to add and remove instances; a scaling with nothing to do is done at once.

        Args:
            timeout_s: Maximum time for a removed instance to end its requests, in seconds.
            why: Load that triggered the scaling; empty if a person requested it.

        Raises:
            UserError: The wanted numbers or the timeout are not valid for this server.
            MigrationError: The scaling cannot begin at present.
        """
        self._check_free(timeout_s)
        self._check(wanted)
        for instance in self._cluster.instances.values() if why else ():
            instance.check_not_paused()  # its load is not that of its requests

        def plan() -> ScalePlan:
            return plan_scaling(self._views(), wanted, self._used_ids)

        return self._begin(_words(wanted), timeout_s, why, plan)

    def begin_leaving(
        self, leaving: Collection[InstanceId], timeout_s: float, where: str, *, are_replaced: bool
    ) -> Scaling:
        """Begin to remove these instances, whatever their roles.

        Args:
            timeout_s: Maximum time for each instance to end its requests, in seconds.
            where: Place that the instances leave, such as a node, for people.
            are_replaced: True to add as many instances elsewhere first.

        Raises:
            UserError: The timeout is not valid.
            MigrationError: The scaling cannot begin at present.
        """
        self._check_free(timeout_s)

        def plan(added: Callable[[Role], Role] | None = None) -> ScalePlan:
            return plan_leaving(self._views(), leaving, self._used_ids, added)

        def role_of_new(old: Role) -> Role:
            return Role.COLOCATED if self._roles_follow_load else old

        first = plan(role_of_new if are_replaced else None)
        return self._begin(f"no instance on {where}", timeout_s, "", plan, first)

    def _begin(
        self,
        words: str,
        timeout_s: float,
        why: str,
        plan_now: Callable[[], ScalePlan],
        first: ScalePlan | None = None,
    ) -> Scaling:
        """Begin with the additions of ``first``; then remove instances as ``plan_now`` decides."""
        plan = first if first is not None else plan_now()
        self._factory.check_memory(len(plan.add))
        state = "starting" if plan.add else "draining"
        scaling = Scaling(self._new_id(), words, state, why=why)
        if plan.add or plan.remove:
            self._carry_out(scaling, self._scale(scaling, plan.add, plan_now, timeout_s))
        else:
            scaling.state = "done"
            self._keep(scaling)
        return scaling

    # ---- checks

    def _check_free(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise UserError(f"timeout_s={timeout_s:g}: give more than 0 seconds")
        if last := self.under_way:
            raise MigrationError(
                f"scaling {last.id} to {last.wanted} is under way: wait for its end, or abort it"
            )
        if self._is_restarting():
            raise MigrationError("a rolling restart is under way: wait for its end, or abort it")
        if self._roles.is_changing and not self._roles_follow_load:
            raise MigrationError("an instance is switching its role: wait for its end")

    def _check(self, wanted: InstanceCounts) -> None:
        if self._roles_follow_load and wanted.total is None:
            raise UserError("the roles follow the load on this server: give --instances N")
        if not self._roles_follow_load and wanted.total is not None:
            raise UserError(
                "the roles are fixed on this server: give --pd P:D, or --colocated N for instances "
                "that do both"
            )
        if not self._has_store and (wanted.prefill or wanted.decode):
            raise UserError(
                "this server has no KV cache store to hand over through: give --colocated N"
            )

    def _views(self) -> list[InstanceView]:
        return [one.view() for one in self._cluster.instances.values()]

    # ---- running

    def _end(self, state: Scaling, ending: str, reason: str) -> None:
        super()._end(state, ending, reason)
        state.leaving, state.now, state.num_left = "", "", 0
        logger.info("scaling %s: %s %s", state.id, ending, reason)

    async def _scale(
        self,
        scaling: Scaling,
        added: Sequence[tuple[InstanceId, Role]],
        plan_now: Callable[[], ScalePlan],
        timeout_s: float,
    ) -> None:
        """Add instances, then remove others one by one.

        Removals are planned anew each time, since instances may have changed.
        """
        if added:
            await self._add(scaling, added)
        scaling.state = "draining"
        while True:
            self._check_wanted(scaling)
            until_s = self._clock.now() + timeout_s
            while self._roles.is_changing:
                scaling.now = "waiting for the end of a role switch"
                if self._clock.now() >= until_s:
                    raise MigrationError("an instance is still switching its role")
                await self._pause(scaling)
            leaving = plan_now().remove
            if not leaving:
                return
            await self._remove(scaling, leaving[0], until_s)

    async def _pause(self, scaling: Scaling) -> None:
        await self._clock.sleep(_POLL_S)
        self._check_wanted(scaling)

    async def _add(self, scaling: Scaling, wanted: Sequence[tuple[InstanceId, Role]]) -> None:
        ids = [name for name, _ in wanted]
        scaling.added, scaling.now = list(ids), f"{', '.join(ids)}: starting"
        self._used_ids |= set(ids)
        made: list[Instance] = []
        try:
            settings = self._cluster.newest_settings
            for name, role in wanted:
                made.append(self._factory.make(name, role, settings))
            await self._start(scaling, made)
        except BaseException:
            for instance in made:
                instance.mark_dead()
                instance.kill()
            for name in ids:
                self._factory.discard(name)
            scaling.added = []
            raise
        for instance in made:
            self._cluster.adopt(instance)
            self._coordinator.adopt(instance)
            logger.info("instance %s (%s) is added", instance.id, instance.role.value)

    async def _start(self, scaling: Scaling, made: Sequence[Instance]) -> None:
        """Start all instances; if one fails or the scaling is aborted, end them all."""
        starting = {asyncio.create_task(one.start(self._start_s)) for one in made}
        left, failure = starting, None
        try:
            while left:
                ended, left = await asyncio.wait(left, timeout=_POLL_S)
                failure = failure or next((e for one in ended if (e := one.exception())), None)
                if self._is_aborting(scaling):
                    failure = failure or OperationAbortedError()
                if failure is not None:  # repeated: a process may have appeared only now
                    for instance in made:
                        instance.kill()
        finally:
            for one in left:
                one.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        if failure is not None:
            raise failure
        while behind := [one for one in made if one.is_behind]:  # called while others started
            await behind[0].catch_up(self._start_s)

    async def _remove(self, scaling: Scaling, name: InstanceId, until_s: float) -> None:
        instance = self._cluster.instance(name)
        self._drains.empty(instance, instance.service.leave)
        scaling.leaving = name
        try:
            while num_left := instance.inflight_requests:
                scaling.num_left, scaling.now = num_left, f"{name}: {num_left} requests left"
                if self._clock.now() >= until_s:
                    raise MigrationError(f"{num_left} requests are left on {name}: it stays")
                await self._pause(scaling)
            scaling.num_left = 0
            scaling.now = f"{name}: modules beside it come home"
            await self._coordinator.vacate(name)
        except BaseException:
            instance.service.stay()
            self._coordinator.stays(name)
            raise
        scaling.now = f"{name}: ending"
        await self._cluster.remove(name)
        await self._coordinator.forget(name)
        self._factory.discard(name)
        scaling.removed.append(name)
        scaling.leaving = ""
        logger.info("instance %s is removed", name)


def _words(wanted: InstanceCounts) -> str:
    if wanted.total is not None:
        return f"{wanted.total} instances"
    parts = []
    if wanted.prefill is not None or wanted.decode is not None:
        numbers = ("*" if n is None else str(n) for n in (wanted.prefill, wanted.decode))
        parts.append(":".join(numbers))
    if wanted.colocated is not None:
        parts.append(f"{wanted.colocated} that do both")
    return " and ".join(parts)
