"""Instance: an engine core in its own process, and the client connected to it.

``startup_handshake`` waits for the engine core to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import enum
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from banaserve.base.clock import Clock
from banaserve.base.errors import InstanceDeadError, MigrationError
from banaserve.base.platform import linux, processes
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.tasks import end_tasks
from banaserve.base.types import NO_WAYS, Distance, InstanceId, InstanceView, ModulePlacement, Role
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig, kv_token_bytes
from banaserve.engine.compat.engine_errors import last_error_in
from banaserve.engine.compat.front.clients import connect
from banaserve.orchestrator.control.cluster_view import with_guests
from banaserve.orchestrator.control.rebalancing import Stream
from banaserve.serving.instances.inflight import Inflight, InflightLeg
from banaserve.serving.instances.lasting_calls import Calls, LastingCalls
from banaserve.serving.instances.service_state import ServiceState
from banaserve.serving.launch.engine_settings import EngineSettings, weights_of
from banaserve.serving.launch.launcher import InstancePlace, Launcher
from banaserve.serving.launch.messages import StartEngine
from banaserve.serving.monitoring import metrics
from banaserve.serving.monitoring.engine_series import EngineSeries
from banaserve.serving.monitoring.gpu_monitor import GpuMeter
from banaserve.serving.monitoring.reports import ReportBoard

logger = logging.getLogger(__name__)
DRAINED, REBALANCED = "drained", "rebalanced"
"""Reasons for which a leg continues at another instance."""
_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_SPEED_SMOOTHING = 0.2

T = TypeVar("T")
Check = Callable[["Instance"], Awaitable[None]]


async def startup_handshake(socket: zmq.asyncio.Socket, addresses: dict[str, str]) -> None:
    """Run vLLM's start-up handshake: HELLO, the addresses as the engine sees them, READY."""
    metadata = compat.EngineHandshakeMetadata(
        addresses=compat.EngineZmqAddresses(
            inputs=[addresses["input"]], outputs=[addresses["output"]]
        ),
        parallel_config={},
    )
    while True:
        identity, body = await socket.recv_multipart()
        status = msgspec.msgpack.decode(body)["status"]
        if status == "HELLO":
            await socket.send_multipart((identity, msgspec.msgpack.encode(metadata)))
        elif status == "READY":
            return


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    FAILED = "failed"


class Instance:
    """Engine core with its client, and counts of the legs that the router has sent to it.

    Attributes:
        role: Legs that the router sends to the instance; the engine does not know its role.
        state: State of the engine's process; changed only by the methods of this class.
        service: State towards new requests, whatever the engine's state is.
        is_orphaned: True if its last engine died with the engine's parent or machine, so that no
            request is to blame.
        settings: Settings that its engine was started with, or will be started with.
        board: Board with the engine's reports and step times; each start of an engine has its own.
        inflight: Counts of the legs that were sent to the instance and have not ended.
        coming: Requests that will decode here, while their prompts are computed elsewhere.
        step_tokens: Maximum number of tokens of a step; 0 for the default of the role.
        adapters: Ids of the LoRA adapters that its engine has loaded.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        role: Role,
        settings: EngineSettings,
        launcher: Launcher,
        series: EngineSeries,
        run: RunDir,
        clock: Clock,
        lasting: LastingCalls,
    ) -> None:
        self.id = instance_id
        self.role = self._made_for = role
        self.state = State.STARTING
        self.incarnation = 0
        self.pid = 0
        self.llm: compat.AsyncLLM | None = None
        self.service = ServiceState(instance_id)
        self.is_orphaned = False
        self.settings = settings
        self._legs: dict[int, InflightLeg] = {}
        self._given_back = asyncio.Event()
        self._given_back.set()
        self.log_path = run.logs / f"{instance_id}.log"
        self._launcher = launcher
        self._series = series
        self._socket_dir = run.sockets
        self._clock = clock
        self._lasting = lasting
        self._taken: Calls = {}
        self.adapters: set[int] = set()
        self._gpu = GpuMeter.open(launcher.devices_of(instance_id), clock)
        self.board = self._new_board()
        self.inflight = Inflight()
        # Looking up labels costs as much as forwarding a token.
        self._inflight_gauge = metrics.IN_FLIGHT.labels(self.id)
        self._prefill_tokens_per_s = _DEFAULT_PREFILL_TOKENS_PER_S
        self.step_tokens = 0
        self._kv_tokens = 0
        self._kv_token_bytes = 0
        self.coming: set[object] = set()
        self._guests = (0, 0.0)
        self._placements: tuple[ModulePlacement, ...] = ()
        self._epoch = 0
        self._changed_s: float | None = None

    # ---- life

    async def start(self, timeout_s: float, check: Check | None = None) -> None:
        """Start the engine core and connect to it.

        Args:
            check: Function that raises if the engine must not serve, called before the engine is
                paused as the others are: a paused engine could not prove anything.

        Raises:
            InstanceDeadError: The engine core ended, the instance was given up meanwhile, the
                model's files changed, or the engine core was not ready within ``timeout_s``
                seconds.
        """
        self.state = State.STARTING
        self.incarnation += 1
        addresses = self._addresses()
        there = {n: self._launcher.address_there(self.id, one) for n, one in addresses.items()}
        context = zmq.asyncio.Context()
        handshake = context.socket(zmq.SocketType.ROUTER)
        handshake.setsockopt(zmq.SocketOption.LINGER, 0)
        try:
            handshake.bind(addresses["handshake"])
            argv = self.vllm_argv
            order = StartEngine(self.id, addresses["handshake"], str(self.log_path), argv)
            config = self.engine_config
            async with self._launcher.turn_to_start(self.id):
                # Files may have been replaced since an engine with the same settings was started.
                weights = await processes.in_daemon_thread(lambda: weights_of(config))
                self.pid = await self._launcher.start(order)
                shaken = asyncio.create_task(startup_handshake(handshake, there))
                await self._unless_ended(shaken, timeout_s)
        finally:
            handshake.close()
            context.term()
        # vLLM would wait ten minutes for an engine that has ended.
        connecting = processes.in_daemon_thread(lambda: self._connect(addresses))
        self.llm = await self._unless_ended(connecting)
        found = await processes.in_daemon_thread(lambda: weights_of(config))
        self._check_is_wanted()
        if found != weights:
            raise InstanceDeadError(f"the files of {self.id}'s model changed while it loaded them")
        self.settings = dataclasses.replace(self.settings, weights=weights)
        compat.start_output_handler(self.llm)
        cache = self.llm.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._kv_token_bytes = kv_token_bytes(self.llm.vllm_config)
        self.board.block_tokens = cache.block_size
        await self.take_budget(self.role, self.step_tokens)
        self._taken, self.adapters = {}, set()
        if check is not None:
            await self._unless_ended(asyncio.ensure_future(check(self)))
        await self.catch_up(timeout_s)
        self._check_is_wanted()
        self.board.answered(idle=True)
        self.state = State.READY
        metrics.UP.labels(self.id, self.role.value).set(1)

    async def catch_up(self, timeout_s: float) -> None:
        """Return when the engine is as paused or asleep as those that serve; then it may serve.

        Raises:
            InstanceDeadError: The engine core ended, or has not answered within ``timeout_s``.
        """
        while self.is_behind:
            given = asyncio.create_task(self._lasting.give(self.llm, self._taken))
            self._taken = await self._unless_ended(given, timeout_s)

    @property
    def is_behind(self) -> bool:
        """True if the engine has not got the lasting calls in force; see ``catch_up``."""
        return self._taken != self._lasting.calls

    def check_not_paused(self) -> None:
        """Raise MigrationError if the engines sleep or are paused."""
        if self._lasting.calls:
            raise MigrationError(
                "the engines sleep or are paused: wake them up first (/wake_up, /resume)"
            )

    def _check_is_wanted(self) -> None:
        """Raise InstanceDeadError if the instance was removed or given up while starting."""
        if self.llm is None:
            raise InstanceDeadError(f"instance {self.id} was ended while starting")

    def _addresses(self) -> dict[str, str]:
        """Return the socket addresses for the next engine; remove sockets of earlier engines."""
        for left in self._socket_dir.glob(f"{self.id}.*.[hio]"):
            left.unlink(missing_ok=True)
        stem = f"ipc://{self._socket_dir}/{self.id}.{self.incarnation}"
        return {name: f"{stem}.{name[0]}" for name in ("handshake", "input", "output")}

    async def _unless_ended(self, work: asyncio.Future[T], timeout_s: float | None = None) -> T:
        """Return the result of ``work``; cancel it if the engine ends or time is over first."""
        ended = asyncio.create_task(self.wait_ended())
        waited: set[asyncio.Future[Any]] = {work, ended}
        try:
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                with contextlib.suppress(compat.EngineDeadError):  # told before its end is
                    return work.result()
            has_ended = work.done() or ended.done()
            what = "ended while starting" if has_ended else f"not ready in {timeout_s:.0f} s"
            raise InstanceDeadError(f"instance {self.id} {what}: {self.last_words()}")
        finally:
            await end_tasks(*waited)

    def _connect(self, addresses: dict[str, str]) -> compat.AsyncLLM:
        """Make the engine's client; runs in a thread, since loading a tokenizer takes long."""
        logger_class = self._series.logger_class(self.id, self.board.record)
        client = connect(
            copy.deepcopy(self.engine_config), logger_class, addresses["input"], addresses["output"]
        )
        if self.incarnation > 1:  # collects the previous client; start-up objects are frozen
            gc.collect()
            linux.give_back_heaps()
        return client

    @property
    def num_ranks(self) -> int:
        """Number of tensor-parallel workers of the engine."""
        return self.engine_config.parallel_config.tensor_parallel_size

    async def wait_dying(self) -> None:
        """Return when the engine core's process has begun to end, before its memory is free."""
        if self.pid:
            await processes.wait_dying(self.pid)

    async def wait_ended(self) -> None:
        """Return when the engine core's process has ended."""
        if self.pid:
            await processes.wait_ended(self.pid)
            self.pid = 0  # the system may reuse the process id

    @contextlib.contextmanager
    def giving_back(self) -> Iterator[None]:
        """Mark a dead process's memory and connections as not yet released, during the block."""
        self._given_back.clear()
        try:
            yield
        finally:
            self._given_back.set()

    async def wait_given_back(self) -> None:
        """Return when a dead process's resources are released, and the store knows of its end."""
        await self._given_back.wait()

    def mark_dead(self, state: State = State.DEAD) -> None:
        """Fail every request of the instance now, and send it no more."""
        self.state = state
        self.is_orphaned = self._launcher.has_lost_parent(self.id)
        self.set_placements((), 0)
        metrics.UP.labels(self.id, self.role.value).set(0)
        llm, self.llm = self.llm, None
        self.board = self._new_board()
        if llm is not None:
            compat.mark_dead(llm)
            llm.shutdown(timeout=0)
        self._series.engine_ended(self.id)

    def retire(self, settings: EngineSettings) -> None:
        """Stop serving, so that an engine with ``settings`` can be started in place of this one.

        The remaining legs move elsewhere or end here; the engine's process still runs.
        """
        self.state, self.settings = State.STARTING, settings
        for leg in list(self._legs.values()):
            leg.move(DRAINED)

    def kill(self) -> None:
        """End the engine core's process, if there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return the last line of the engine's log with an error, to show it to the user."""
        return last_error_in(self.log_path)

    # ---- what the router knows

    async def probe(self, timeout_s: float) -> None:
        """Ask an engine that has been silent for a while whether it still answers."""
        llm = self.llm
        if llm is None:
            return
        with contextlib.suppress(TimeoutError, compat.EngineDeadError):
            async with asyncio.timeout(timeout_s):
                await llm.is_paused()
                self.board.answered(idle=llm.get_num_unfinished_requests() == 0)

    @contextlib.contextmanager
    def holding(
        self,
        prefill_tokens: int,
        tokens: int = 0,
        move: Callable[[str], None] | None = None,
        *,
        starts_over: bool = False,
        moved_s: float | None = None,
    ) -> Iterator[InflightLeg]:
        """Count a leg as in flight here for the duration of the block; see ``InflightLeg``."""
        tokens = max(tokens, prefill_tokens)
        leg = InflightLeg(self._add_inflight, prefill_tokens, tokens, move, starts_over, moved_s)
        self._legs[id(leg)] = leg
        try:
            yield leg
        finally:
            del self._legs[id(leg)]
            leg.end()

    def move_streams(self) -> int:
        """Move every stream that can continue elsewhere; return their number."""
        legs = [leg for leg in self._legs.values() if leg.continues]
        for leg in legs:
            leg.move(DRAINED)
        return len(legs)

    def streams(self) -> list[Stream]:
        """Return the legs that can continue elsewhere with KV from the store, oldest first."""
        return [
            Stream(key, leg.tokens, not leg.has_output, leg.moved_s)
            for key, leg in self._legs.items()
            if leg.continues and not leg.is_prompt
        ]

    @property
    def num_movable(self) -> int:
        """Number of the instance's streams that can continue elsewhere."""
        return sum(leg.continues for leg in self._legs.values())

    @property
    def num_streams(self) -> int:
        """Number of the instance's legs whose prompts have been computed, here or elsewhere."""
        return self.inflight_requests - sum(leg.is_prompt for leg in self._legs.values())

    def move_stream(self, key: Hashable) -> None:
        """Move one of ``streams`` elsewhere, unless it has ended meanwhile."""
        if (leg := self._legs.get(key)) is not None:  # type: ignore[call-overload]
            leg.move(REBALANCED)

    def view(self, far: Mapping[InstanceId, Distance | None] = NO_WAYS) -> InstanceView:
        """Return the instance as policies see it, with distances to instances elsewhere."""
        return InstanceView(
            id=self.id,
            role=self.role,
            ready=self.takes_requests,
            report=with_guests(self.board.last, *self._guests),
            inflight_requests=self.inflight_requests,
            inflight_prefill_tokens=self.inflight.prefill_tokens,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            placements=self._placements,
            epoch=self._epoch,
            changed_s=self._changed_s,
            step_tokens=self.settings.budgets.of_steps(self.role, self.step_tokens).num_tokens,
            inflight_tokens=self.inflight.tokens,
            inflight_prefill_requests=self.inflight.prefill_requests,
            inflight_prefill_pairs=self.inflight.prefill_pairs,
            kv_tokens=self._kv_tokens,
            far=far,
            kv_token_bytes=self._kv_token_bytes,
            coming_requests=len(self.coming),
        )

    def _new_board(self) -> ReportBoard:
        full_step = self.settings.budgets.of_role(self.role).num_tokens
        return ReportBoard(self.id, self._clock, full_step, self._gpu)

    def set_guests(self, num_bytes: int, busy_fraction: float) -> None:
        """Set the memory and the fraction of time that guests beside this instance take."""
        self._guests = (num_bytes, busy_fraction)

    def set_placements(self, placements: tuple[ModulePlacement, ...], epoch: int) -> None:
        """Set the modules of this instance that run elsewhere, and their epoch."""
        if placements != self._placements:
            self.has_changed()
            calls = sum(p.module.num_layers if p.module.heads else 1 for p in placements)
            self.board.meter.remote_calls = calls
        self._placements, self._epoch = placements, epoch

    async def take_budget(self, role: Role, step_tokens: int = 0) -> None:
        """Set the engine's budget to that of ``role``, from its next step on; see ``Budgets.give``.

        Raises:
            NoAnswerError: The engine does not answer; it may have the new budget or the old one.
            InstanceDeadError: The engine has ended.
        """
        if self.llm is not None:
            is_changed = bool(step_tokens or self.step_tokens)
            try:
                budget = await self.settings.budgets.give(
                    self.llm, role, step_tokens, always=is_changed
                )
            except compat.EngineDeadError:
                raise InstanceDeadError(f"instance {self.id} has ended") from None
            self.board.meter.set_full_step(budget.num_tokens)
        if step_tokens != self.step_tokens:
            self.step_tokens = step_tokens
            self.has_changed()

    def set_role(self, role: Role) -> None:
        """Change the role, and so the legs that the router sends from now on."""
        metrics.UP.remove(self.id, self.role.value)
        self.role = role
        self.has_changed()
        metrics.UP.labels(self.id, role.value).set(self.is_ready)

    def has_changed(self) -> None:
        """Record that its role, placements, guests or step size changed."""
        self._changed_s = self._clock.now()

    @property
    def is_ready(self) -> bool:
        """True if requests may be sent; False once the engine failed, even if it still runs."""
        return self.state is State.READY and self.llm is not None and not self.llm.errored

    @property
    def place(self) -> InstancePlace:
        """Machine that the engine runs on."""
        return self._launcher.place_of(self.id)

    def distance_to(self, other: Instance) -> Distance | None:
        """Return the distance to another instance's machine; None if it was not measured."""
        return self._launcher.distance(self.id, other.id)

    def store_beside(self, other: Instance) -> str:
        """Return ``HOST:PORT`` of another instance's store; empty if this one uses it, too.

        Also empty if this instance uses the front door's store.
        """
        here, there = self.place.store, other.place.store
        return there if here and here != there else ""

    @property
    def weights(self) -> str:
        """Identity of the weights that the engine computes with, or will after its start."""
        return self.settings.weights

    @property
    def vllm_argv(self) -> tuple[str, ...]:
        """vLLM's options of the engine; empty for those that the launcher was made with."""
        return self.settings.engine_for(self._made_for).argv

    @property
    def engine_config(self) -> VllmConfig:
        """vLLM's configuration that the engine was made with, or will be."""
        return self.settings.engine_for(self._made_for).config

    def is_of(self, settings: EngineSettings) -> bool:
        """Return whether an engine with these settings would equal the present one."""
        argv = settings.engine_for(self._made_for).argv
        return (argv, settings.weights) == (self.vllm_argv, self.weights)

    @property
    def takes_requests(self) -> bool:
        """True if the instance receives new requests."""
        return self.is_ready and self.service.takes_requests

    @property
    def has_left_decode(self) -> bool:
        """True if the instance has stopped serving decode legs."""
        return not self.service.takes_requests or self.role is Role.PREFILL

    @property
    def has_lost_client(self) -> bool:
        """True if the client that reads the engine's outputs failed while the engine still runs."""
        return self.state is State.READY and self.llm is not None and self.llm.errored

    def _add_inflight(self, leg: Inflight, sign: int) -> None:
        self.inflight = self.inflight.with_leg(leg, sign)
        self._inflight_gauge.set(self.inflight.requests)

    def learn_prefill_speed(self, tokens: int, seconds: float) -> None:
        """Use a prefill that ran alone as a sample of this instance's speed."""
        if tokens >= 64 and seconds > 0:
            sample = tokens / seconds
            self._prefill_tokens_per_s += _SPEED_SMOOTHING * (sample - self._prefill_tokens_per_s)

    @property
    def inflight_requests(self) -> int:
        """Number of legs that were sent to the instance and have not ended."""
        return self.inflight.requests

    @property
    def is_alone(self) -> bool:
        return self.inflight_requests == 1
