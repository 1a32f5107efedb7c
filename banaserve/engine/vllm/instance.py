"""Instance: an engine core in a process of its own and the client that talks to it.

``startup_handshake`` waits for the engine core to start; ``InflightGuard`` counts one leg while it
runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import enum
import gc
import itertools
import logging
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import zmq
import zmq.asyncio

from banaserve.clock import Clock
from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.clients import connect
from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.compat.engine_errors import last_error_in
from banaserve.engine.vllm.launch.engine_settings import EngineSettings, weights_of
from banaserve.engine.vllm.launch.launcher import Launcher
from banaserve.engine.vllm.monitoring import metrics
from banaserve.engine.vllm.monitoring.engine_series import EngineSeries
from banaserve.engine.vllm.monitoring.gpu_monitor import GpuMeter
from banaserve.engine.vllm.monitoring.reports import ReportBoard
from banaserve.engine.vllm.roles.role_switch import Budgets
from banaserve.engine.vllm.settings.kv_bytes import kv_token_bytes
from banaserve.errors import InstanceDeadError
from banaserve.orchestrator.cluster_view import with_guests
from banaserve.orchestrator.rebalancing import Stream
from banaserve.platform import linux, processes
from banaserve.types import (
    NO_WAYS,
    Distance,
    InstanceId,
    InstanceView,
    ModulePlacement,
    Role,
)

logger = logging.getLogger(__name__)
DRAINED, REBALANCED = "drained", "rebalanced"
"""Reasons for which a leg goes on at another instance."""
_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_SPEED_SMOOTHING = 0.2


class Inflight(NamedTuple):
    """Legs that an instance has been sent and that have not ended; fields as in ``InstanceView``.

    Attributes:
        tokens: That they had when they were sent.
    """

    requests: int = 0
    tokens: int = 0
    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0

    def with_leg(self, leg: Inflight, sign: int) -> Inflight:
        """Returns this with ``leg`` added or, by a ``sign`` of -1, taken away."""
        return Inflight(*(own + sign * its for own, its in zip(self, leg, strict=True)))


class Counting(Protocol):
    """The part of an ``Instance`` that a guard changes."""

    def add_inflight(self, leg: Inflight, sign: int) -> None: ...


class InflightGuard:
    """Counts one leg of a request in its instance while it runs.

    Args:
        prefill_tokens: Of its ``tokens``, those that are to be computed there.

    Attributes:
        has_output: Flag: the engine has computed a token of the leg.
    """

    def __init__(self, instance: Counting, prefill_tokens: int, tokens: int) -> None:
        self._instance = instance
        self.has_output = False
        self._leg = Inflight(1, tokens)
        pairs = prefill_tokens * (2 * tokens - prefill_tokens)
        self._prompt = Inflight(0, 0, 1, prefill_tokens, pairs) if prefill_tokens else None
        instance.add_inflight(self._leg, 1)
        if self._prompt is not None:
            instance.add_inflight(self._prompt, 1)

    def prefilled(self) -> None:
        """Note that the prompt has been computed. Idempotent: called with each output."""
        self.has_output = True
        if self._prompt is not None:
            self._instance.add_inflight(self._prompt, -1)
            self._prompt = None

    def end(self) -> None:
        self._instance.add_inflight(self._leg, -1)

    @property
    def is_prompt(self) -> bool:
        """Flag: most of the leg's tokens are still to be computed here."""
        return self._prompt is not None and 2 * self._prompt.prefill_tokens > self._leg.tokens

    @property
    def tokens(self) -> int:
        """Number of tokens that the leg had when it was sent."""
        return self._leg.tokens


class MovableLeg(NamedTuple):
    """A leg that can go on at another instance.

    Attributes:
        move: Lets it go on there, for a reason: see ``LegMovedError``.
        moved_s: Time of its last move by the rebalancer, on the event loop's clock; None for none.
    """

    guard: InflightGuard
    move: Callable[[str], None]
    moved_s: float | None


async def startup_handshake(socket: zmq.asyncio.Socket, addresses: dict[str, str]) -> None:
    """vLLM's start-up handshake: HELLO, our addresses as the engine knows them, READY."""
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
    """Starts, watches and ends one engine core; counts what the router has sent it.

    Attributes:
        role: What the router sends it; the engine does not know it.
        is_draining: The router sends it nothing, what it has goes on.
        is_held: The same, until somebody lets it serve again.
        is_leaving: The same, since its engine is being replaced.
        is_orphaned: Its last engine died with its parent or machine, and not of a request.
        settings: That its engine was started with, or will be.
        inflight: What it has been sent and has not ended.
        step_tokens: Most tokens of its steps; 0 where they are those of its role.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        role: Role,
        config: VllmConfig,
        launcher: Launcher,
        series: EngineSeries,
        run_dir: Path,
        socket_dir: Path,
        clock: Clock,
        budgets: Budgets,
    ) -> None:
        self.id = instance_id
        self.role = self._made_for = role
        self.state = State.STARTING
        self.incarnation = 0
        self.pid = 0
        self.llm: compat.AsyncLLM | None = None
        self.is_draining = False
        self.is_held = False
        self.is_leaving = False
        self.is_orphaned = False
        self.settings = EngineSettings(config, budgets)
        self._movable: dict[int, MovableLeg] = {}
        self._given_back = asyncio.Event()
        self._given_back.set()
        self._movable_prompts: dict[int, MovableLeg] = {}
        self.log_path = run_dir / f"{instance_id}.log"
        self._launcher = launcher
        self._series = series
        self._socket_dir = socket_dir
        self._clock = clock
        self._gpu = GpuMeter.open(launcher.devices_of(instance_id), clock)
        self._board = self._new_board()
        self.inflight = Inflight()
        # A look-up of labels costs as much as passing on a token.
        self._inflight_gauge = metrics.IN_FLIGHT.labels(self.id)
        self._prefill_tokens_per_s = _DEFAULT_PREFILL_TOKENS_PER_S
        self.step_tokens = 0
        self._kv_tokens = 0
        self._kv_token_bytes = 0
        self._num_coming = 0
        self._guests = (0, 0.0)
        self._placements: tuple[ModulePlacement, ...] = ()
        self._epoch = 0
        self._changed_s: float | None = None

    # ---- life

    async def start(self, timeout_s: float) -> None:
        """Start the engine core and connect to it.

        Raises:
            InstanceDeadError: It ended, was given up meanwhile, or was not ready within
                ``timeout_s``.
        """
        self.state = State.STARTING
        self.incarnation += 1
        addresses = self._addresses()
        there = {
            name: self._launcher.address_there(self.id, address)
            for name, address in addresses.items()
        }
        context = zmq.asyncio.Context()
        handshake = context.socket(zmq.SocketType.ROUTER)
        handshake.setsockopt(zmq.SocketOption.LINGER, 0)
        try:
            handshake.bind(addresses["handshake"])
            self.pid = await self._launcher.start(
                self.id, addresses["handshake"], self.log_path, self.vllm_argv
            )
            await self._until_ready(handshake, there, timeout_s)
        finally:
            handshake.close()
            context.term()
        self.llm = await self._connected(addresses)
        # Files may have been replaced since an engine of the same settings was started.
        config = self.engine_config
        weights = await processes.in_daemon_thread(lambda: weights_of(config))
        self._check_is_wanted()
        self.settings = dataclasses.replace(self.settings, weights=weights)
        compat.start_output_handler(self.llm)
        cache = self.llm.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._kv_token_bytes = kv_token_bytes(self.llm.vllm_config)
        self._board.block_tokens = cache.block_size
        await self.take_budget(self.role, self.step_tokens)
        self._check_is_wanted()
        self._board.answered(idle=True)
        self.state = State.READY
        metrics.UP.labels(self.id, self.role.value).set(1)

    def _check_is_wanted(self) -> None:
        """Raises InstanceDeadError where it has been removed or given up while it started."""
        if self.llm is None:
            raise InstanceDeadError(f"instance {self.id} was ended while starting")

    def _addresses(self) -> dict[str, str]:
        """Sockets of the engine that is to come; those of the ones before it go."""
        for left in self._socket_dir.glob(f"{self.id}.*.[hio]"):
            left.unlink(missing_ok=True)
        stem = f"ipc://{self._socket_dir}/{self.id}.{self.incarnation}"
        return {name: f"{stem}.{name[0]}" for name in ("handshake", "input", "output")}

    async def _until_ready(
        self, handshake: zmq.asyncio.Socket, there: dict[str, str], timeout_s: float
    ) -> None:
        ended = asyncio.create_task(self.wait_ended())
        ready = asyncio.create_task(startup_handshake(handshake, there))
        try:
            await asyncio.wait(
                {ended, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ready.done():
                ready.result()
                return
            what = "ended while starting" if ended.done() else f"not ready in {timeout_s:.0f} s"
            raise InstanceDeadError(f"instance {self.id} {what}: {self.last_words()}")
        finally:
            for task in (ended, ready):
                task.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def _connected(self, addresses: dict[str, str]) -> compat.AsyncLLM:
        """Its client. One that ends meanwhile would be waited for in vain."""
        # vLLM waits ten minutes for an engine that has been ended meanwhile.
        connecting = processes.in_daemon_thread(lambda: self._connect(addresses))
        ended = asyncio.create_task(self.wait_ended())
        try:
            await asyncio.wait({connecting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise InstanceDeadError(f"instance {self.id} has ended: {self.last_words()}")
        finally:
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _connect(self, addresses: dict[str, str]) -> compat.AsyncLLM:
        """Runs in a thread: loading a tokenizer must not stall the streams of others."""
        logger_class = self._series.logger_class(self.id, self._board.record)
        client = connect(
            copy.deepcopy(self.engine_config), logger_class, addresses["input"], addresses["output"]
        )
        if self.incarnation > 1:  # there was a client before it; what the start made is frozen
            gc.collect()
            linux.give_back_heaps()
        return client

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel workers of its engine."""
        return self.engine_config.parallel_config.tensor_parallel_size

    async def wait_dying(self) -> None:
        """Return when the engine core's process has begun to end, before its memory is free."""
        if self.pid:
            await processes.wait_dying(self.pid)

    async def wait_ended(self) -> None:
        """Return when the engine core's process has ended."""
        if self.pid:
            await processes.wait_ended(self.pid)
            self.pid = 0  # the system may give it to another process

    @contextlib.contextmanager
    def giving_back(self) -> Iterator[None]:
        """While it lasts, a process that has died still has its memory and its connections."""
        self._given_back.clear()
        try:
            yield
        finally:
            self._given_back.set()

    async def wait_given_back(self) -> None:
        """Return when nothing is left of a process that has died: the store knows it, too."""
        await self._given_back.wait()

    def mark_dead(self, state: State = State.DEAD) -> None:
        """Fail every request it holds, now, and send it no more."""
        self.state = state
        self.is_orphaned = self._launcher.has_lost_parent(self.id)
        self.set_placements((), 0)
        metrics.UP.labels(self.id, self.role.value).set(0)
        llm, self.llm = self.llm, None
        self._board = self._new_board()
        if llm is not None:
            compat.mark_dead(llm)
            llm.shutdown(timeout=0)

    def retire(self, settings: EngineSettings) -> None:
        """Serve no more, so that an engine with ``settings`` can be started in place of this one.

        What it still has goes on elsewhere or ends; its process is still there.
        """
        self.state = State.STARTING
        self.settings = settings
        self.move_streams()
        for leg in list(self._movable_prompts.values()):
            leg.move(DRAINED)

    def kill(self) -> None:
        """End the engine core's process, if there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its log with an error, for the one line that the user gets."""
        return last_error_in(self.log_path)

    # ---- what the router knows

    async def probe(self, timeout_s: float) -> None:
        """Ask an engine that has said nothing for a while whether it still answers."""
        llm = self.llm
        if llm is None:
            return
        with contextlib.suppress(TimeoutError, compat.EngineDeadError):
            async with asyncio.timeout(timeout_s):
                await llm.is_paused()
                self._board.answered(idle=llm.get_num_unfinished_requests() == 0)

    @contextlib.contextmanager
    def holding(
        self,
        prefill_tokens: int,
        tokens: int = 0,
        move: Callable[[str], None] | None = None,
        *,
        is_prompt: bool = False,
        moved_s: float | None = None,
    ) -> Iterator[InflightGuard]:
        """Count a leg of ``tokens`` as in flight here, ``prefill_tokens`` still to be computed.

        Args:
            move: Lets it go on elsewhere; None where it cannot.
            is_prompt: It would begin anew there, so only the end of its engine moves it.
            moved_s: Time of its last move by the rebalancer; None for none.
        """
        guard = InflightGuard(self, prefill_tokens, max(tokens, prefill_tokens))
        if move is not None:
            legs = self._movable_prompts if is_prompt else self._movable
            legs[id(guard)] = MovableLeg(guard, move, moved_s)
        try:
            yield guard
        finally:
            self._movable.pop(id(guard), None)
            self._movable_prompts.pop(id(guard), None)
            guard.prefilled()
            guard.end()

    def move_streams(self) -> int:
        """Let every stream that can go on elsewhere do so; returns how many."""
        legs = list(self._movable.values())
        for leg in legs:
            leg.move(DRAINED)
        return len(legs)

    def streams(self) -> list[Stream]:
        """Return the legs that can go on elsewhere with what the store has, the oldest first."""
        return [
            Stream(key, leg.guard.tokens, not leg.guard.has_output, leg.moved_s)
            for key, leg in self._movable.items()
            if not leg.guard.is_prompt
        ]

    @property
    def num_streams(self) -> int:
        """Number of its legs whose prompts are computed, here or elsewhere."""
        legs = itertools.chain(self._movable.values(), self._movable_prompts.values())
        return self.inflight_requests - sum(leg.guard.is_prompt for leg in legs)

    def move_stream(self, key: Hashable) -> None:
        """Let one of ``streams`` go on elsewhere, if it has not ended meanwhile."""
        if (leg := self._movable.get(key)) is not None:  # type: ignore[call-overload]
            leg.move(REBALANCED)

    @property
    def num_movable(self) -> int:
        """Streams on it that can go on elsewhere."""
        return len(self._movable)

    def view(self, far: Mapping[InstanceId, Distance | None] = NO_WAYS) -> InstanceView:
        """Returns the instance as policies see it.

        Args:
            far: Ways to instances on other machines.
        """
        return InstanceView(
            id=self.id,
            role=self.role,
            ready=self.takes_requests,
            report=with_guests(self._board.last, *self._guests),
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
            coming_requests=self._num_coming,
        )

    def _new_board(self) -> ReportBoard:
        full_step = self.settings.budgets.of_role(self.role).num_tokens
        return ReportBoard(self.id, self._clock, full_step, self._gpu)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Counts a request that will decode here while its prompt is computed elsewhere."""
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    def set_guests(self, num_bytes: int, busy_fraction: float) -> None:
        """Memory and time that guests beside this instance take."""
        self._guests = (num_bytes, busy_fraction)

    def set_placements(self, placements: tuple[ModulePlacement, ...], epoch: int) -> None:
        """Which modules of this instance run elsewhere, and in which epoch."""
        if placements != self._placements:
            self.has_changed()
            calls = sum(p.module.num_layers if p.module.heads else 1 for p in placements)
            self._board.meter.remote_calls = calls
        self._placements, self._epoch = placements, epoch

    async def take_budget(self, role: Role, step_tokens: int = 0) -> None:
        """Let the engine work with the budget of ``role`` from its next step on.

        Args:
            step_tokens: Most tokens of a step; 0 is what the role has.

        Raises:
            NoAnswerError: It does not answer; it may work with that budget or the old one.
        """
        if self.llm is not None:
            is_changed = bool(step_tokens or self.step_tokens)
            budget = await self.settings.budgets.give(
                self.llm, role, step_tokens, always=is_changed
            )
            self._board.meter.set_full_step(budget.num_tokens)
        if step_tokens != self.step_tokens:
            self.step_tokens = step_tokens
            self.has_changed()

    def set_role(self, role: Role) -> None:
        """Let the router send it other legs from here on."""
        metrics.UP.remove(self.id, self.role.value)
        self.role = role
        self.has_changed()
        metrics.UP.labels(self.id, role.value).set(self.is_ready)

    @property
    def board(self) -> ReportBoard:
        """What it reports and what its steps take; another one after a restart."""
        return self._board

    def has_changed(self) -> None:
        """Its role, its placements or its guests are others than before."""
        self._changed_s = self._clock.now()

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent: an engine that has failed is not, though it still ends."""
        return self.state is State.READY and self.llm is not None and not self.llm.errored

    @property
    def is_local(self) -> bool:
        """Whether its engine's process is this machine's, and not one that stands for it."""
        return self._launcher.is_local(self.id)

    @property
    def node(self) -> str:
        """Name of the machine that its engine runs on; empty for this one."""
        return self._launcher.node_of(self.id)

    @property
    def has_machine(self) -> bool:
        """Whether the machine that its engine is to run on is there."""
        return self._launcher.is_there(self.id)

    def distance_to(self, other: Instance) -> Distance | None:
        """Way to the machine of another instance; None where it has not been measured."""
        return self._launcher.distance(self.id, other.id)

    @property
    def store(self) -> str:
        """``HOST:PORT`` of the store on its machine; empty where that is the front door's."""
        return self._launcher.store_of(self.id)

    def store_beside(self, other: Instance) -> str:
        """``HOST:PORT`` of another instance's store; empty where it is this one's too."""
        here, there = self.store, other.store
        return there if here and here != there else ""

    @property
    def weights(self) -> str:
        """Of the model that its engine computes with, or will when it has started."""
        return self.settings.weights

    @property
    def vllm_argv(self) -> tuple[str, ...]:
        """Options of its engine; empty where they are those that the launcher was made with."""
        return self.settings.argv_for(self._made_for)

    @property
    def engine_config(self) -> VllmConfig:
        """vLLM's, which its engine was made of or will be."""
        return self.settings.config_for(self._made_for)

    def is_of(self, settings: EngineSettings) -> bool:
        """Whether an engine with these settings would be one like its own."""
        is_same = settings.argv_for(self._made_for) == self.vllm_argv
        return is_same and settings.weights == self.weights

    @property
    def takes_requests(self) -> bool:
        """Whether it is sent new requests."""
        return self.is_ready and not (self.is_draining or self.is_held or self.is_leaving)

    @property
    def has_lost_client(self) -> bool:
        """What reads its outputs has failed, though it computes on."""
        return self.state is State.READY and self.llm is not None and self.llm.errored

    def add_inflight(self, leg: Inflight, sign: int) -> None:
        self.inflight = self.inflight.with_leg(leg, sign)
        self._inflight_gauge.set(self.inflight.requests)

    def learn_prefill_speed(self, tokens: int, seconds: float) -> None:
        """Take a prefill that ran alone as a sample of this instance's speed."""
        if tokens >= 64 and seconds > 0:
            sample = tokens / seconds
            self._prefill_tokens_per_s += _SPEED_SMOOTHING * (sample - self._prefill_tokens_per_s)

    @property
    def inflight_requests(self) -> int:
        """Legs that it has been sent and that have not ended."""
        return self.inflight.requests

    @property
    def is_alone(self) -> bool:
        return self.inflight_requests == 1
