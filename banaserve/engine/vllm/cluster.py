"""Cluster: starts, watches, restarts and stops the instances, and routes requests to them.

Beside it: ``PrefixLookup``, which asks the store for a prompt's cached tokens before routing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from banaserve.clock import Clock
from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat import kv_cache
from banaserve.engine.vllm.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.vllm.compat.requests import GracefulHTTPError
from banaserve.engine.vllm.generations import Member, candidates, is_lost
from banaserve.engine.vllm.instance import Instance, State
from banaserve.engine.vllm.launch.engine_settings import EngineSettings
from banaserve.engine.vllm.liveness.restart_policy import RestartPolicy
from banaserve.engine.vllm.monitoring import metrics
from banaserve.engine.vllm.residency import Residency
from banaserve.engine.vllm.tracing.events import NoInstance
from banaserve.engine.vllm.tracing.request_log import RequestNotes
from banaserve.engine.vllm.trials import Trials
from banaserve.errors import InstanceDeadError, NoInstanceError, PolicyError
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.wire import MAX_KEYS
from banaserve.orchestrator.model.output_length import OutputLengthWindow
from banaserve.orchestrator.routing.named import NamedPolicy
from banaserve.platform.processes import StallWatch
from banaserve.types import (
    NO_LIMITS,
    NOWHERE,
    ClusterView,
    InstanceId,
    RequestId,
    RequestLimits,
    RequestView,
    Role,
    Route,
)

logger = logging.getLogger(__name__)
_PROBE_INTERVAL_S = 0.5
_QUIET_S = 0.9
"""An engine that has said nothing for so long is asked: each question wakes it, which costs some
milliseconds of an idle machine, and routing reads no report older than two seconds."""
_PROBE_TIMEOUT_S = 5.0
_POLL_S = 0.02
_PAUSE_POLL_S = 0.1
_LEAVE_S = 2.0
"""Clients read slowly: streams that have been told to go on elsewhere do so with their next token,
and need not have done so when their engine ends."""

_BOTH = Role.COLOCATED.legs
Check = Callable[[Instance], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Replacement:
    """An engine that is to be started in place of another one.

    Attributes:
        before: What the other one was started with.
        check: Raises where the new one is not to serve.
        done: Set when it serves, or cannot.
    """

    settings: EngineSettings
    before: EngineSettings
    check: Check
    done: asyncio.Future[None]


class WeightsReplacedError(GracefulHTTPError):
    """The weights that an answer has begun with are gone."""

    def __init__(self) -> None:
        super().__init__(
            "a rolling restart has replaced the weights that this answer had begun with: ask again",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class Cluster:
    """Starts, watches and stops the instances; routes requests over those that serve.

    Attributes:
        failed: Every instance has been given up, and nothing serves.
        last_failure: Of a restart, in one line; empty where none has failed.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        policy: NamedPolicy,
        clock: Clock,
        patience: ClusterTimeouts,
    ) -> None:
        self.instances = {instance.id: instance for instance in instances}
        self.lookups: dict[str, PrefixLookup] = {}
        self.residency: Residency | None = None
        self.on_ended: list[Callable[[InstanceId], None]] = []
        self.policy = policy
        self.output_lengths = OutputLengthWindow()
        self.trials = Trials()
        self._has_shown_failure = False
        self.failed = asyncio.Event()
        self.last_failure = ""
        self._clock = clock
        self._served_s = clock.now()
        self._patience = patience
        self._watches: dict[InstanceId, list[asyncio.Task[None]]] = {}
        self._replacements: dict[InstanceId, Replacement] = {}

    # ---- life

    async def start(self, on_ready: Callable[[Instance], None]) -> None:
        """Start all instances side by side, then keep them alive.

        Raises:
            InstanceDeadError: One of them could not be started.
        """

        async def start_one(instance: Instance) -> None:
            await instance.start(self._patience.start_s)
            on_ready(instance)

        async with asyncio.TaskGroup() as group:
            for instance in self.instances.values():
                group.create_task(start_one(instance))
        for instance in self.instances.values():
            self._watch(instance)

    def adopt(self, instance: Instance) -> None:
        """Route to an instance that has started too, and keep it alive."""
        self.instances[instance.id] = instance
        self._watch(instance)

    async def remove(self, instance_id: InstanceId) -> None:
        """End an instance and forget it; what it still has fails, and goes on elsewhere."""
        instance = self.instances.pop(instance_id)
        keep_alive, keep_fresh = self._watches.pop(instance_id)
        keep_fresh.cancel()
        instance.mark_dead()
        instance.kill()
        await asyncio.gather(keep_alive, keep_fresh, return_exceptions=True)

    def _watch(self, instance: Instance) -> None:
        kept = (self._keep_alive(instance), self._keep_fresh(instance))
        self._watches[instance.id] = [asyncio.create_task(one) for one in kept]

    def _is_removed(self, instance: Instance) -> bool:
        return instance.id not in self.instances

    async def _keep_alive(self, instance: Instance) -> None:
        restarts = RestartPolicy()
        while True:
            began_s = self._clock.now()
            try:
                await instance.wait_dying()
                with instance.giving_back():
                    instance.mark_dead()  # its streams go on elsewhere meanwhile
                    await instance.wait_ended()
            except OSError:  # no descriptor left: an instance without a watch would stay dead
                logger.exception("waiting for the end of instance %s", instance.id)
                await asyncio.sleep(_PROBE_INTERVAL_S)
                continue
            if self._is_removed(instance):
                self._tell_of_end(instance)
                return
            replacement = self._replacements.pop(instance.id, None)
            if replacement is None:
                logger.warning("instance %s ended: %s", instance.id, instance.last_words())
            restarts.has_served(self._clock.now() - began_s)
            self._tell_of_end(instance)
            if replacement is not None:
                restarts = RestartPolicy()
                if await self._start_other(instance, replacement):
                    continue
            if not await self._until_restarted(instance, restarts):
                return

    def _tell_of_end(self, instance: Instance) -> None:
        for told in self.on_ended:
            try:
                told(instance.id)
            except Exception:
                logger.exception("what follows the end of instance %s", instance.id)

    async def _until_restarted(self, instance: Instance, restarts: RestartPolicy) -> bool:
        """Start an instance again, and one that has been given up every few minutes.

        Returns:
            False where it has been removed.
        """
        while not await self._restart(instance, restarts):
            if self._is_removed(instance):
                return False
            instance.mark_dead(State.FAILED)
            if self.has_failed:
                self.failed.set()
            await self._pause(instance)
            replacement = self._replacements.pop(instance.id, None)
            if replacement is not None and await self._start_other(instance, replacement):
                return True
            restarts = RestartPolicy(limit=1)
        return True

    async def _pause(self, instance: Instance) -> None:
        """Wait until an instance that was given up is to be tried again, or another takes it."""
        until_s = self._clock.now() + self._patience.retry_s
        while self._clock.now() < until_s and instance.id not in self._replacements:
            if self._is_removed(instance):
                return
            await self._clock.sleep(_PAUSE_POLL_S)

    async def _restart(self, instance: Instance, restarts: RestartPolicy) -> bool:
        while (delay_s := restarts.next_delay_s(self._clock.now())) is not None:
            await asyncio.sleep(delay_s)
            if self._is_removed(instance):
                return False
            metrics.RESTARTS.labels(instance.id).inc()
            try:
                await instance.start(self._patience.start_s)
            except InstanceDeadError as failure:
                self.last_failure = str(failure)
                logger.warning("%s", failure)
            except Exception as failure:
                self.last_failure = f"{type(failure).__name__}: {failure}"
                logger.exception("starting instance %s again", instance.id)
            else:
                if not self._is_removed(instance):
                    logger.info("instance %s serves again", instance.id)
                    return True
            instance.mark_dead()
            instance.kill()
            if self._is_removed(instance):
                return False
        logger.error("instance %s ends too often: given up", instance.id)
        return False

    # ---- replacing engines

    @property
    def newest_settings(self) -> EngineSettings:
        """What a new engine is to be started with."""
        return max((i.settings for i in self.instances.values()), key=lambda s: s.number)

    async def replace(self, instance: Instance, settings: EngineSettings, check: Check) -> None:
        """End an instance's engine on purpose and start one with ``settings`` in its place.

        No request is blamed for it, and it does not count as one of the restarts that a dead
        instance may have.

        Args:
            check: Raises ``InstanceDeadError`` where the new one, which serves, is not to.

        Raises:
            InstanceDeadError: It does not start or is not to serve: one with the settings before is
                being started.
        """
        await self.settled(instance)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replacement = Replacement(settings, instance.settings, check, done)
        self._replacements[instance.id] = replacement
        instance.retire(settings)
        until_s = self._clock.now() + _LEAVE_S
        while instance.inflight_requests and self._clock.now() < until_s:
            await self._clock.sleep(_POLL_S)
        if self._replacements.get(instance.id) is replacement:
            instance.kill()
        await done

    async def settled(self, instance: Instance) -> None:
        """Return when an instance serves, or is given up."""
        while instance.state not in (State.READY, State.FAILED):
            await self._clock.sleep(_POLL_S)

    async def _start_other(self, instance: Instance, replacement: Replacement) -> bool:
        try:
            await instance.start(self._patience.start_s)
            await replacement.check(instance)
        except Exception as failure:
            if not isinstance(failure, InstanceDeadError):
                logger.exception("starting instance %s with other settings", instance.id)
            instance.kill()
            await instance.wait_ended()
            instance.mark_dead()
            instance.settings = replacement.before
            if not replacement.done.done():
                replacement.done.set_exception(InstanceDeadError(str(failure)))
            return False
        logger.info("instance %s has been replaced", instance.id)
        if not replacement.done.done():
            replacement.done.set_result(None)
        return True

    async def _keep_fresh(self, instance: Instance) -> None:
        """An engine that computes reports by itself; an idle one is asked.

        One whose client has failed computes for no client, and a stalled one computes nothing: both
        are ended, and so started again.
        """
        watch = StallWatch(self._patience.stall_s, self._patience.spin_s, counts_work=is_on_cpu())
        quiet_s = min(_QUIET_S, self._patience.stall_s / 2)
        # Nobody asks an idle engine before this begins, however long the others take to start.
        since_s, is_silent = self._clock.now(), False
        while True:
            await asyncio.sleep(min(_PROBE_INTERVAL_S, self._patience.stall_s / 2))
            self._note_service()
            if instance.state is State.STARTING:
                if watch.has_stalled_starting(instance.pid, self._clock.now()):
                    logger.warning("instance %s is ended: it has stalled starting", instance.id)
                    instance.kill()
                continue
            if instance.state is not State.READY:
                continue
            report, now_s = instance.view().report, self._clock.now()
            heard_s = max(report.at_s, since_s) if report is not None else now_s
            was_silent, is_silent = is_silent, watch.has_stalled(instance.pid, heard_s, now_s)
            # Asked once more: if it was this process that stood still, the engine answers now.
            if instance.has_lost_client or (was_silent and is_silent):
                how = "its client has failed" if instance.has_lost_client else "it has stalled"
                logger.warning("instance %s is ended: %s", instance.id, how)
                instance.kill()
                continue
            if report is None or now_s - report.at_s > quiet_s:
                try:
                    await instance.probe(_PROBE_TIMEOUT_S)
                except Exception:
                    logger.exception("asking instance %s", instance.id)

    def refuse(self) -> None:
        """Fail the requests under way, so that their connections can close."""
        for instance in self.instances.values():
            instance.mark_dead(State.FAILED)

    async def stop(self) -> None:
        """End all instances; requests under way fail."""
        tasks = [task for watch in self._watches.values() for task in watch]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for instance in self.instances.values():
            instance.mark_dead()
            instance.kill()
        for lookup in self.lookups.values():
            lookup.close()

    # ---- routing

    def instance(self, instance_id: InstanceId) -> Instance:
        """The instance of that id.

        Raises:
            InstanceDeadError: It has been removed.
        """
        if (instance := self.instances.get(instance_id)) is None:
            raise InstanceDeadError(f"instance {instance_id} has been removed")
        return instance

    def has_left_decode(self, instance_id: InstanceId) -> bool:
        """Whether an instance serves decode no more since a decode leg was routed there."""
        if (instance := self.instances.get(instance_id)) is None:
            return True
        is_out = instance.is_draining or instance.is_held or instance.is_leaving
        return is_out or instance.role is Role.PREFILL

    def serving(self) -> list[Instance]:
        return [i for i in self.instances.values() if i.state is State.READY]

    async def taking(self) -> list[Instance]:
        """Those that are sent new requests; those that serve, where there are none.

        Waits where the only one is being replaced.
        """
        while self._is_replacing and not any(i.takes_requests for i in self.instances.values()):
            await self._clock.sleep(_POLL_S)
        serving = [i for i in self.serving() if i.llm is not None]
        return [i for i in serving if i.takes_requests] or serving

    def members(self) -> list[Member]:
        """All instances as members of their generations."""
        return [_member(instance) for instance in self.instances.values()]

    @property
    def is_ready(self) -> bool:
        """Every role has an instance that serves, but for one that is being replaced."""
        staying = [i for i in self.instances.values() if not i.is_leaving]
        serving = {i.role for i in staying if i.state is State.READY}
        return bool(serving) and serving == {i.role for i in staying}

    @property
    def has_failed(self) -> bool:
        """Every instance has been given up."""
        return all(i.state is State.FAILED for i in self.instances.values())

    @property
    def is_healthy(self) -> bool:
        """Instances have served both legs a while ago, or do so now."""
        self._note_service()
        is_recent = self._clock.now() - self._served_s < self._patience.unserved_s
        return is_recent and not self.has_failed

    def _note_service(self) -> None:
        serving = self.serving()
        if len(serving) == len(self.instances) or len(_legs_of(serving)) == len(_BOTH):
            self._served_s = self._clock.now()

    def view(self) -> ClusterView:
        return ClusterView(
            now_s=self._clock.now(),
            instances={i.id: i.view() for i in self.instances.values()},
            output_lengths=self.output_lengths.lengths,
        )

    async def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """What the store holds of the prompt; 0 without a store.

        Also 0 while all instances do both: a request has one leg then, whatever the store holds,
        and need not wait for its answer.
        """
        if not self.lookups or request.prompt_token_ids is None:
            return 0
        if all(one.role is Role.COLOCATED for one in self.instances.values()):
            return 0
        lookup = self._lookup()
        return await lookup.cached_tokens(request) if lookup is not None else 0

    def _lookup(self) -> PrefixLookup | None:
        """Of the weights that a new request goes to."""
        if len(self.lookups) == 1:
            return next(iter(self.lookups.values()))
        chosen = candidates(self.members())
        return next((self.lookups.get(self.instances[name].weights) for name in chosen), None)

    def follow_residency(self, residency: Residency) -> None:
        """Let routing know from here on what lies in the engines' own caches."""
        self.residency = residency
        self.on_ended.append(residency.forget)

    def resident_tokens(self, request: compat.EngineCoreRequest) -> Mapping[InstanceId, int]:
        """How many tokens of the prompt lie in which engine's cache; empty if routing asks not."""
        return self.residency.found(request) if self.residency is not None else NOWHERE

    def forget_residency(self) -> None:
        """The engines' own caches are emptied."""
        if self.residency is not None:
            self.residency.forget()

    def has_computed(
        self, instance_id: InstanceId, request: compat.EngineCoreRequest, output: Sequence[int] = ()
    ) -> None:
        """``instance_id`` has computed the prompt of ``request``, and so much ``output`` of it."""
        instance = self.instances.get(instance_id)  # None: it has been removed since
        if self.residency is not None and instance is not None:
            self.residency.computed(instance, request, output)

    async def route(
        self,
        request: compat.EngineCoreRequest,
        uncached_tokens: int,
        split_blocker: str | None,
        notes: RequestNotes,
        limits: RequestLimits = NO_LIMITS,
        first_token_waits: bool = False,
        resident_tokens: Mapping[InstanceId, int] = NOWHERE,
        weights: str = "",
    ) -> Route:
        """The policy's choice; waits a while for a restart where no instance serves.

        A request that cannot be split has one leg, whatever the policy says.

        Args:
            weights: That it has begun with; empty where it has not.

        Raises:
            GracefulHTTPError: 503 when still no instance serves; 500 where the policy fails.
            WeightsReplacedError: No instance has those weights any more.
        """
        num_tokens = len(request.prompt_token_ids or ())
        params = request.sampling_params
        view = RequestView(
            RequestId(request.request_id),
            num_tokens,
            num_tokens - uncached_tokens,
            (params.max_tokens if params is not None else 1) or 0,
            limits,
            split_blocker is None,
            first_token_waits,
            resident_tokens,
        )
        until_s = self._clock.now() + self._patience.no_instance_s
        waits = False
        while True:
            seen = self._view_of(weights)
            try:
                route = self.policy.route(view, seen)
                if split_blocker is not None and route.prefill is not None:
                    route = Route(None, route.decode, route.reason)
                notes.routed(self.policy.label, route, split_blocker, seen)
                return route
            except PolicyError as failure:
                self._log(failure)
                error = GracefulHTTPError(str(failure), HTTPStatus.INTERNAL_SERVER_ERROR)
                raise error from None
            except NoInstanceError as nobody:
                if not waits:
                    notes.note(NoInstance(str(nobody)))
                waits = True
                is_late = self._clock.now() >= until_s and not self._is_replacing
                if self.has_failed or is_late:
                    raise GracefulHTTPError(str(nobody), HTTPStatus.SERVICE_UNAVAILABLE) from None
                await asyncio.sleep(0.1)

    def _view_of(self, weights: str) -> ClusterView:
        """What a request sees that has begun with ``weights``: one generation."""
        view, found = self.view(), {one.weights for one in self.instances.values()}
        if not self._is_replacing and (len(found) < 2 if not weights else found == {weights}):
            return view
        members = self.members()
        if weights and is_lost(members, weights):
            raise WeightsReplacedError
        chosen = candidates(members, weights)
        seen = {name: replace(view.instances[name], ready=True) for name in sorted(chosen)}
        return replace(view, instances=seen)

    @property
    def _is_replacing(self) -> bool:
        return any(one.is_leaving for one in self.instances.values())

    def _log(self, failure: PolicyError) -> None:
        """A line for each request that the policy fails; the first says where in its code."""
        cause = None if self._has_shown_failure else failure.__cause__
        self._has_shown_failure = True
        logger.error("%s", failure, exc_info=cause)


def _legs_of(instances: Sequence[Instance]) -> frozenset[Role]:
    return frozenset[Role]().union(*(one.role.legs for one in instances))


def _member(instance: Instance) -> Member:
    return Member(
        instance.id,
        instance.role,
        instance.weights,
        instance.settings.number,
        takes=instance.takes_requests,
        serves=instance.is_ready,
        lives=instance.state is not State.FAILED,
    )


@dataclass(frozen=True)
class ClusterTimeouts:
    """Timeouts of the cluster, in seconds.

    Attributes:
        start_s: For an engine that starts.
        no_instance_s: Of a request, for a restart where no instance serves its role.
        stall_s: For a sign of life of an engine that does nothing for certain.
        spin_s: For a sign of life of any engine.
        retry_s: From giving an instance up to trying it again.
        unserved_s: Without instances for both legs, after which the server is not healthy.
    """

    start_s: float = 600.0
    no_instance_s: float = 60.0
    stall_s: float = 60.0
    spin_s: float = 600.0
    retry_s: float = 180.0
    unserved_s: float = 120.0


class PrefixLookup:
    """Hashes prompts as the engines do and asks the store; off the event loop."""

    def __init__(self, config: VllmConfig, fingerprint: Fingerprint, socket_path: str) -> None:
        self._block_size = fingerprint.block_size_tokens
        self._hasher = kv_cache.block_hasher(config, self._block_size)
        self._client = StoreClient(
            socket_path, fingerprint, client_name="front-door", maps_pool=False
        )

    async def cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        """Tokens of the longest prefix in whole blocks that is stored or being stored."""
        return await asyncio.to_thread(self._cached_tokens, request)

    def _cached_tokens(self, request: compat.EngineCoreRequest) -> int:
        keys = kv_cache.Request.from_engine_core_request(request, self._hasher).block_hashes
        if not keys:
            return 0
        states = self._client.lookup(keys[:MAX_KEYS])
        num_known = next((i for i, state in enumerate(states) if state is Lookup.MISS), len(states))
        return num_known * self._block_size

    def close(self) -> None:
        self._client.close()
