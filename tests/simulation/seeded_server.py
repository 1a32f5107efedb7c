"""A server without processes in virtual time: real cluster and client, all from one seed.

Clients ask, read slowly, hang up or abort; engines die, stall or do not start; an operator drains,
scales, switches roles, restarts, and pauses engines or lets them sleep. Layers and heads move away,
on and home in mid-stream, and their guests die; the store's daemon dies or hangs. Then it is quiet,
and everything has to be in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams

from banaserve.base.config.serve_config import Budget
from banaserve.base.errors import BanaServeError, InstanceDeadError, MigrationError, UserError
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.migration_api import MigrationRequest, MoveHeads, MoveLayers, Return
from banaserve.contracts.move_phase import ALLOWED, MovePhase
from banaserve.contracts.restart_api import RestartRequest
from banaserve.engine.compat.requests import GracefulHTTPError
from banaserve.kvstore.daemon import supervised
from banaserve.migration import checks
from banaserve.migration.guest import server as guest_server
from banaserve.migration.host import block_mover, host, move
from banaserve.migration.host.move import Move
from banaserve.migration.kv import store_copier
from banaserve.migration.modules import layer_proxy
from banaserve.migration.rpc import guest_client, messages
from banaserve.migration.units import guest_unit, layers
from banaserve.orchestrator.control.routing import registry
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.serving.client import DisaggregatedClient
from banaserve.serving.instances import instance as instances
from banaserve.serving.instances import probe
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.inflight import Inflight
from banaserve.serving.instances.instance import Instance, State
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.launch.engine_settings import Budgets, EngineSettings
from banaserve.serving.moves import guest_monitor, guest_pool, process_stats
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.operations.roles import Drains, Roles
from banaserve.serving.operations.rolling_restart import RollingRestarts
from banaserve.serving.operations.scale_plan import InstanceCounts
from banaserve.serving.operations.scaler import Scaler
from banaserve.serving.requests.intake import Adapters, Gate
from banaserve.serving.requests.prefix_lookup import PrefixLookup
from banaserve.serving.requests.router import Router, WeightsReplacedError
from banaserve.serving.requests.suspects import MAX_DEATHS, EnginesDiedError
from banaserve.serving.tracing.request_log import RequestLog
from seeded_answers import MAX_MODEL_LEN, Answer, ClientRequest, fits
from seeded_daemon import VirtualDaemon
from seeded_engine import WORDS, Core, SharedStore, StoreLink, hash_blocks
from seeded_guests import GuestProcess, Network, VirtualProcessHandle, VirtualPulse
from seeded_host import HostSide
from seeded_machine import LoopClock, Machine, Process, Troubles
from seeded_modules import BLOCK, FACTS, NUM_HEADS, NUM_LAYERS, build_unit
from seeded_parts import Factory, InputProcessor
from seeded_threads import Select, Threading, Time, current
from tiering_doubles import ScriptedTier, Store

TROUBLE_S = 8.0
"""How long requests come and things go wrong."""
QUIET_S = 300.0
"""More than any pause before a restart: by then all that can come back has."""
AMPLE_S = 200.0
"""More than a request needs that loses as many instances as it may."""
GUESTS_FRACTION = 0.25
"""Of seeds: those whose modules move take several times as long."""
_PAUSED = 2
"""Of four seeds, the one with pauses."""
WEIGHTS = ("w0", "w1", "w2")
_NOWHERE = Path("/nowhere")
_TIMED = (
    host,
    move,
    guest_client,
    block_mover,
    store_copier,
    layers,
    supervised,
)
TIMEOUTS = ClusterTimeouts(start_s=30.0, stall_s=4.0, spin_s=12.0, retry_s=15.0, unserved_s=30.0)
NO_INSTANCE_S = 20.0
_FLEETS = [
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.COLOCATED, Role.COLOCATED),
    (Role.COLOCATED, Role.PREFILL, Role.DECODE),
]
_KINDS = [
    *([RequestOutputKind.DELTA] * 3),
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
]


async def until(holds: Callable[[], bool]) -> None:
    """Return once ``holds``."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def _config(weights: str) -> Any:
    """An engine's, as far as it is asked for."""
    return SimpleNamespace(weights=weights, parallel_config=SimpleNamespace(tensor_parallel_size=1))


class Server:
    """One seed's server and all that happens to it."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.draws = random.Random(seed)
        self._gather_s = 0.5 if seed % 3 == 1 else 0.0
        self.troubles = Troubles(self.draws)
        self.clock = LoopClock()
        self.has_guests = self.draws.random() < GUESTS_FRACTION
        self._make_store(stack)
        self.machine = Machine(self.troubles, self._core, self.draws.choice([0.01, 0.5, 2.0]))
        self.timeout_s = self.draws.choice([8.0, AMPLE_S, AMPLE_S, AMPLE_S])
        self._pauses = random.Random(f"pauses of {seed}") if seed % 4 == _PAUSED else None
        self._num_aborting, self._gated_s = 0, 0.0
        self.answers: list[Answer] = []
        self.num_restarts_of_weights = self.num_failed_clients = 0
        self._numbers = itertools.count(1)
        self._documents = [[self.draws.randrange(20) for _ in range(16)] for _ in range(3)]
        self._make_cluster()
        self._make_client()

    def _make_store(self, stack: ExitStack) -> None:
        num_slots, on_disk = self.draws.choice([6, 12, 24]), dict[bytes, bytes]()

        def make() -> tuple[Store, ScriptedTier]:
            tier = ScriptedTier("disk", depth=4)
            tier.blocks = on_disk
            return Store(stack, tier, num_slots=num_slots), tier

        self.store = SharedStore(make, self.troubles)
        self.daemon = VirtualDaemon(self.store, self.troubles)

    def _core(self, name: str, argv: tuple[str, ...]) -> Core:
        weights = argv[0] if argv else WEIGHTS[0]
        side = HostSide(WEIGHTS.index(weights)) if self.has_guests else None
        return Core(name, weights, self.store, self.troubles, side)

    def _guest(self, address: messages.GuestAddress, argv: tuple[str, ...]) -> GuestProcess:
        weights = WEIGHTS.index(argv[0]) if argv else 0
        return GuestProcess(self.machine, self.network, address, weights)

    def _make_cluster(self) -> None:
        budgets = Budgets.__new__(Budgets)
        budgets._own, budgets._given = Budget(64, 8), {}
        config = _config(WEIGHTS[0])
        settings = EngineSettings(config, budgets)
        factory: Any = Factory(self.machine, self.clock)
        self.network = Network(self.troubles)
        self.machine.make_guest, self.machine.on_dying = self._guest, self.network.lose
        fleet = self.draws.choice(_FLEETS)
        letters = {Role.PREFILL: "p", Role.DECODE: "d", Role.COLOCATED: "c"}
        made = [
            factory.make(InstanceId(f"{letters[role]}{fleet[:i].count(role)}"), role, settings)
            for i, role in enumerate(fleet)
        ]
        name = self.draws.choice(registry.BUILT_IN)
        legs = LegOptions(skip_prefill_below_tokens=self.draws.choice([0, 0, 4]))
        policy = NamedPolicy(registry.make(name, legs=legs), name)
        self.cluster = Cluster(made, self.clock, TIMEOUTS)
        self.router = Router(self.cluster, policy, self.clock, NO_INSTANCE_S, self._gather_s)
        for weights in WEIGHTS:
            self.router.lookups.by_weights[weights] = self._lookup(weights)
        self.roles = Roles(self.cluster.instances, self.clock)
        self.drains = Drains(self.cluster.instances, self.roles)
        self._factory = factory

    def _make_operators(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.scaler = Scaler(
            self.cluster,
            coordinator,
            self.roles,
            self.drains,
            self._factory,
            self.clock,
            TIMEOUTS.start_s,
            is_restarting=lambda: self.restarts.is_under_way,
        )
        self.restarts = RollingRestarts(
            self.cluster,
            coordinator,
            next(iter(self.cluster.instances.values())).settings,  # started: its weights are known
            self._other_settings,
            self._check_engine,
            lambda _: None,
            self.timeout_s,
            self.clock,
            is_scaling=lambda: self.scaler.is_under_way,
        )

    def _lookup(self, weights: str) -> PrefixLookup:
        made: Any = PrefixLookup.__new__(PrefixLookup)
        made._block_size, made._hasher = BLOCK, hash_blocks
        made._client = StoreLink(self.store, "front-door", weights)
        return made

    @staticmethod
    def _other_settings(now: EngineSettings, model: str, _: Sequence[str]) -> EngineSettings:
        if not model:
            return now
        config = _config(model)
        return replace(now, config=config, weights=model, argv=(model,), number=now.number + 1)

    async def _check_engine(self, instance: Instance) -> None:
        llm: Any = instance.llm
        assert not llm.core.pause, "a paused engine proves nothing"
        await asyncio.sleep(self.troubles.some_s(0.1))
        if self.troubles.happen(0.05):
            raise InstanceDeadError("it computes no numbers")

    def _make_client(self) -> None:
        made: Any = DisaggregatedClient.__new__(DisaggregatedClient)
        made.input_processor = InputProcessor()
        limits = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
        made.vllm_config = SimpleNamespace(scheduler_config=limits)
        made.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN, logits_processors=None)
        made._router, made._cluster = self.router, self.cluster
        made._adapters, made._clock = Adapters(), self.clock
        made._supported_tasks, made._sequences, made._gate = ("generate",), {}, Gate()
        made._lasting, made._calling = self._factory.lasting, asyncio.Lock()
        made._request_timeout_s = self.timeout_s
        made._lookup_above_tokens = self.draws.choice([0, 6])
        made.requests = RequestLog(self.clock)
        self.client = made

    # ---- the run

    async def go(self) -> None:
        """Trouble, then quiet, then the end; what does not hold raises AssertionError."""
        async with asyncio.timeout(TROUBLE_S + self.timeout_s + 4 * QUIET_S):
            nothing: Any = None
            launcher: Any = self.machine
            await self._start()
            async with guest_monitor.live_migration(
                self.cluster, launcher, nothing, RunDir(_NOWHERE, _NOWHERE), 1.0, "shm"
            ) as coordinator:
                self._make_operators(coordinator)
                self.client._end_moves = coordinator.end_moves
                await self._be_troubled()
                await self._comes_back()
                await self._answers_again()
                self._check_guests()
                await self._come_home()
                await self._answers_again()
                await asyncio.sleep(1.0)  # the last step gives back what it read
                self._check_nothing_is_left()
                await self._stop_operators()
            await self._stop()

    async def _be_troubled(self) -> None:
        acts = [self._disturb(), self._disturb_store(), self._operate()]
        if self.has_guests:
            acts += [self._disturb_guests(), self._migrate()]
        async with asyncio.TaskGroup() as group:
            for _ in range(self.draws.randrange(8, 20)):
                group.create_task(self._ask_later())
            if self._pauses is not None:
                acts.append(self._pause_often(self._pauses, group))
            tasks = [group.create_task(one) for one in acts]
            await asyncio.sleep(TROUBLE_S)
            self.troubles.are_over = True
            for task in tasks:
                task.cancel()

    async def _start(self) -> None:
        self.troubles.are_over = True
        await self.daemon.start()
        await self.cluster.start(lambda _: None)
        self.troubles.are_over = False

    async def _comes_back(self) -> None:
        """What is under way ends, and every instance serves."""
        async with asyncio.timeout(QUIET_S):
            await until(lambda: not self._is_changing)
            await asyncio.sleep(2.0 * TIMEOUTS.spin_s)  # one that stands still is found
            for name, one in self.cluster.instances.items():
                if one.service.is_drained:
                    self.drains.release(name)
            await until(lambda: all(one.takes_requests for one in self.cluster.instances.values()))
            await until(lambda: not (self.store.is_hung or self.store.is_away))
        assert self.cluster.is_ready

    @property
    def _is_changing(self) -> bool:
        controls = (self.scaler.is_under_way, self.restarts.is_under_way, self.roles.is_changing)
        return any(controls) or any(one.is_open for one in self.coordinator.recent())

    async def _answers_again(self) -> None:
        asked = [self._request() for _ in range(4)]
        for one in asked:
            one.leaves_after = one.leaves_after_s = one.aborts_after_s = None
            one.pause_s, one.params.max_tokens = 0.0, 8
        answers = await asyncio.gather(*(self._ask(one) for one in asked))
        for answer in answers:
            assert answer.is_whole, f"{answer.request.name}: {answer.error!r} while all is well"

    async def _come_home(self) -> None:
        """All that is away, and its guests end."""
        for host_state in self.coordinator.hosts.values():
            with contextlib.suppress(MigrationError):  # it cannot migrate
                await host_state.refresh()
            for unit in host_state.units(self.coordinator.guests):
                migration = await self.coordinator.begin(unit.modules.return_request(host_state.id))
                await self.coordinator.wait(migration.id)
                assert migration.state == "done", f"{unit} stays away: {migration.error}"
        await asyncio.sleep(guest_monitor.IDLE_S + 10.0)
        assert not self.machine.guests, "guests are left that nobody needs"
        assert not list(self.coordinator.guests)

    async def _stop_operators(self) -> None:
        await self.roles.stop()
        await self.scaler.stop()
        await self.restarts.stop()

    async def _stop(self) -> None:
        await self.cluster.stop()
        await self.daemon.stop()
        await asyncio.sleep(3.0)  # processes end
        await until(lambda: not self.store.is_copying)
        for process in self.machine.processes.values():
            if not process.dying.is_set():
                raise AssertionError(f"process {process.pid} of {process.engine.name} is left")
        assert self.machine.failures == []
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    # ---- clients

    def _request(self) -> ClientRequest:
        draws = self.draws
        length = draws.randrange(1, 16)
        own = [draws.randrange(20) for _ in range(draws.randrange(3))]
        prompt = draws.choice(self._documents)[:length] + own
        n = draws.choice([1, 1, 1, 1, 2, 3])
        is_drawn = n > 1 or draws.random() < 0.5
        params = SamplingParams(
            n=n,
            temperature=1.0 if is_drawn else 0.0,
            seed=draws.randrange(1000) if is_drawn else None,
            max_tokens=draws.choice([1, 2, 8, 40]),
            output_kind=draws.choice(_KINDS),
            stop=draws.choice([None, None, WORDS[3].strip(), "a bb"]),
            extra_args=draws.choice([None, None, None, {"a": 1}]),
            stream_interval=draws.choice([None, None, 3]),
        )
        request = ClientRequest(f"r{next(self._numbers)}", prompt, params)
        request.pause_s = draws.choice([0.0, 0.0, 0.05, 0.5])
        behaviour = draws.random()
        if behaviour < 0.1:
            request.leaves_after = draws.randrange(4)
        elif behaviour < 0.2:
            request.aborts_after_s = draws.uniform(0.0, 2.0)
        elif behaviour < 0.3:
            request.leaves_after_s = draws.uniform(0.0, 2.0)
        return request

    async def _ask_later(self) -> None:
        await asyncio.sleep(self.draws.uniform(0.0, TROUBLE_S))
        await self._ask(self._request())

    async def _ask(self, request: ClientRequest) -> Answer:
        loop = asyncio.get_running_loop()
        answer = Answer(request, loop.time(), self.num_losses)
        self.answers.append(answer)
        reading = asyncio.create_task(self._read(answer))
        if request.aborts_after_s is not None:
            await asyncio.wait({reading}, timeout=request.aborts_after_s)
            if not reading.done():
                answer.is_aborted = True
                await self.client.abort(request.name)
        if request.leaves_after_s is not None:
            await asyncio.wait({reading}, timeout=request.leaves_after_s)
            answer.has_left |= reading.cancel()
        await asyncio.wait({reading})
        if not reading.cancelled():
            reading.result()
        answer.ended_s = loop.time()
        answer.is_aborted |= self._num_aborting > 0
        self._check(answer)
        return answer

    async def _read(self, answer: Answer) -> None:
        request = answer.request
        prompt = {"type": "token", "prompt_token_ids": request.prompt}
        stream = self.client.generate(prompt, request.params.clone(), request.name, prompt_text="")
        loop, num_read = asyncio.get_running_loop(), 0
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    answer.take(output)
                    num_read += 1
                    if num_read == request.leaves_after:
                        answer.has_left = True
                        return
                    began_s = loop.time()
                    await asyncio.sleep(self.draws.uniform(0.0, request.pause_s))
                    answer.paused_s += loop.time() - began_s
        except GracefulHTTPError as error:
            answer.error = error

    # ---- what must hold for each answer

    @property
    def num_losses(self) -> int:
        """Instances that a request has lost, or would have."""
        return self.machine.num_deaths + self.num_failed_clients

    def _check(self, answer: Answer) -> None:
        took_s = answer.ended_s - answer.began_s
        most_s = self.timeout_s + answer.paused_s + self._gated_s
        assert took_s <= most_s + 1.0, f"{answer} has waited too long"
        ends = answer.num_ends + (answer.error is not None) + answer.has_left
        assert ends == 1 or (answer.has_left and ends == 2), f"{answer} has ended {ends} times"
        fitting = [one for one in WEIGHTS if fits(answer, one)]
        assert fitting, f"{answer} has other tokens than one engine would have"
        if answer.error is not None:
            self._check_cause(answer, answer.error, took_s)

    def _check_cause(self, answer: Answer, error: Exception, took_s: float) -> None:
        """An error has a reason that its client can be told."""
        if isinstance(error, EnginesDiedError):
            num_losses = self.num_losses - answer.losses_before
            assert num_losses >= MAX_DEATHS, f"{answer} is given up after {num_losses} deaths"
        elif isinstance(error, WeightsReplacedError):
            assert self.num_restarts_of_weights, f"{answer}: nothing was replaced"
        elif "time budget" in str(error):
            assert took_s >= self.timeout_s - 1e-6, f"{answer}: it has time left"
            assert self.timeout_s < AMPLE_S, f"{answer}: it has waited for nothing"
        else:
            assert "instance" in str(error), f"{answer}: {error!r}"
            serves = any(one.takes_requests for one in self.cluster.instances.values())
            assert not serves or self.num_restarts_of_weights, f"{answer}: an instance serves"
            assert took_s >= NO_INSTANCE_S or self.cluster.has_failed, f"{answer}"

    # ---- what goes wrong

    async def _disturb(self) -> None:
        acts: dict[Callable[[Process], None], float] = {
            self._kill: 0.3,
            self._stall: 0.1,
            self._stop_for_a_while: 0.1,
            self._fail_client: 0.05,
            self._break: 0.02,
        }
        while True:
            await asyncio.sleep(0.5)
            for act, probability in acts.items():
                if self.machine.living and self.troubles.happen(probability):
                    act(self.draws.choice(self.machine.living))

    async def _disturb_guests(self) -> None:
        acts = {self._kill: 0.2, self._stall: 0.05, self._stop_for_a_while: 0.1}
        while True:
            await asyncio.sleep(self.draws.uniform(0.0, 0.4))
            for act, probability in acts.items():
                if self.machine.guests and self.troubles.happen(probability):
                    act(self.draws.choice(self.machine.guests))

    async def _disturb_store(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self.troubles.happen(0.1):
                self.daemon.kill()
            elif self.troubles.happen(0.05):
                self.store.hang()
                if self.draws.random() < 0.5:
                    until_s = self.draws.uniform(0.1, 6.0)
                    asyncio.get_running_loop().call_later(until_s, self.store.go_on)

    def _kill(self, process: Process) -> None:
        self.machine.kill(process.pid)

    def _stall(self, process: Process) -> None:
        process.stop()

    def _stop_for_a_while(self, process: Process) -> None:
        process.stop()
        asyncio.get_running_loop().call_later(self.draws.uniform(0.1, 3.0), process.go_on)

    def _fail_client(self, process: Process) -> None:
        if process.engine.front is not None:
            process.engine.front.fail()
            self.num_failed_clients += 1

    def _break(self, process: Process) -> None:
        """It cannot be started again for so long that it is given up."""
        until_s = asyncio.get_running_loop().time() + 40.0
        self.machine.broken_until_s[process.engine.name] = until_s
        self.machine.kill(process.pid)

    # ---- the operator

    async def _operate(self) -> None:
        acts: list[Callable[[], Awaitable[None] | None]] = [
            self._drain,
            self._drain,
            self._release,
            self._release,
            self._switch,
            self._scale,
            self._restart,
            self._give_up,
        ]
        rate = self.draws.choice([0.0, 0.5, 1.0])
        while True:
            await asyncio.sleep(self.draws.uniform(0.2, 1.0))
            if self.draws.random() >= rate:
                continue
            with contextlib.suppress(UserError):
                done = self.draws.choice(acts)()
                if done is not None:
                    await done

    async def _pause_often(self, draws: random.Random, group: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(draws.uniform(0.1, 4.0))
            group.create_task(self._pause(draws))

    async def _pause(self, draws: random.Random) -> None:
        """All engines stop for a while, also those that start meanwhile."""
        loop, mode = asyncio.get_running_loop(), draws.choice(["abort", "keep", "wait"])
        began_s = loop.time()
        with self._aborting(mode == "abort"), contextlib.suppress(ValueError):
            if draws.random() < 0.7:
                await self.client.pause_generation(mode=mode, clear_cache=draws.random() < 0.5)
            else:
                await self.client.sleep(draws.randrange(2), mode)
        if mode == "wait":
            self._gated_s += loop.time() - began_s
        await asyncio.sleep(draws.uniform(0.0, 3.0))
        wake = draws.choice([self.client.resume_generation, self.client.wake_up])
        await wake()

    @contextlib.contextmanager
    def _aborting(self, are_aborted: bool) -> Iterator[None]:
        """Requests that are under way during the block may be aborted by an operator."""
        self._num_aborting += are_aborted
        try:
            yield
        finally:
            self._num_aborting -= are_aborted
            for answer in self.answers:
                answer.is_aborted |= are_aborted and not answer.ended_s

    async def _migrate(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self.draws.uniform(0.05, 0.7))
                group.create_task(self._move_something())

    async def _move_something(self) -> None:
        with contextlib.suppress(BanaServeError):
            migration = await self.coordinator.begin(self._some_move())
            if self.draws.random() < 0.2:
                await asyncio.sleep(self.draws.uniform(0.0, 1.0))
                self.coordinator.abort(migration.id)

    def _some_move(self) -> MigrationRequest:
        draws = self.draws
        target = self._any()
        source = draws.choice([self._any(), next(iter(self.cluster.instances))])
        kind = draws.random()
        if kind < 0.4:
            start = draws.randrange(NUM_LAYERS)
            end = draws.randrange(start + 1, NUM_LAYERS + 1)
            return MoveLayers(source, target, (start, end), precopy=draws.random() < 0.8)
        if kind < 0.7:
            chosen = draws.sample(range(NUM_LAYERS), draws.choice([1, 1, 2]))
            heads = [(0,), (1,), tuple(range(NUM_HEADS))]
            return MoveHeads(source, target, {layer: draws.choice(heads) for layer in chosen})
        return Return(source)

    def _any(self) -> str:
        return self.draws.choice(list(self.cluster.instances))

    def _drain(self) -> None:
        self.drains.begin(self._any())

    def _release(self) -> None:
        self.drains.release(self._any())

    def _switch(self) -> None:
        role = self.draws.choice(["prefill", "decode", "both"])
        self.roles.begin(self._any(), role, 10.0, self.draws.choice([0.5, 10.0]))

    def _scale(self) -> None:
        self.scaler.begin(
            InstanceCounts(
                self.draws.choice([None, 1, 2]),
                self.draws.choice([None, 1, 2]),
                self.draws.choice([0, 1, 2]),
            ),
            self.draws.choice([0.5, 20.0]),
        )

    async def _restart(self) -> None:
        model = self.draws.choice(["", *WEIGHTS])
        await self.restarts.begin(RestartRequest(model, timeout_s=self.draws.choice([0.5, 5.0])))
        self.num_restarts_of_weights += bool(model)

    def _give_up(self) -> None:
        for one in self.scaler.recent()[-1:]:
            if one.is_open:
                self.scaler.abort(one.id)
        for restart in self.restarts.recent()[-1:]:
            if restart.is_open:
                self.restarts.abort(restart.id)

    # ---- what must hold when all is quiet

    def _check_nothing_is_left(self) -> None:
        for one in self.cluster.instances.values():
            assert one.state is State.READY
            assert one.inflight == Inflight(), f"{one.id} counts {one.inflight}"
            assert not one._legs
            llm: Any = one.llm
            assert not llm.core.pause, f"{one.id} is paused"
            assert not llm.output_processor.request_states, f"{one.id} has front-end states"
            assert not llm.output_processor.external_req_ids
            assert not llm.core.requests, f"{one.id} computes for nobody"
            self._check_memory(one.id, llm.core.side)
        weights = {one.weights for one in self.cluster.instances.values()}
        stays = any("does not go back" in one.reason for one in self.restarts.recent())
        assert len(weights) == 1 or stays, f"engines have weights {weights}"
        assert not self.router.retry_turns.locked()
        assert not self.client._sequences
        assert not self.client.requests._open
        # A prefill leg that waits for room holds its prompt again with each try. If its engine dies
        # before the leg's abort comes, the hold stays until its time is up.
        index = self.store.service.index
        assert index.stats().num_holds <= self.machine.num_deaths, "requests have left holds"
        for hold in [*index._holds]:
            index.end_hold(hold)
        stats = self.store.service.stats()
        held = (stats.num_leases, stats.leased_slots, stats.writing_slots, stats.promoting_slots)
        held += (stats.num_holds,)
        assert held == (0,) * 5, f"the store has leases, slots or holds that nobody uses: {held}"
        assert stats.quarantined_slots == 0

    def _check_guests(self) -> None:
        """Each holds the units that its host has put there, at the host's epoch, and no others."""
        placed: dict[str, dict[str, int]] = {}
        for one in self.cluster.instances.values():
            llm: Any = one.llm
            for unit in llm.core.side.host.placement if llm.core.side is not None else ():
                residence = unit.residence
                epochs = placed.setdefault(residence.link.guest_id, {})
                epochs[unit.unit_id] = residence.working_epoch
        for process in self.machine.guests:
            server = process.engine.server
            held = {} if server is None else server._units
            found = {name: unit.epoch for name, unit in held.items()}
            assert found == placed.pop(process.engine.name, {}), f"{process.engine.name}: {found}"
        assert not placed, f"units are where no guest is: {placed}"

    def _check_memory(self, name: str, side: HostSide | None) -> None:
        if side is None:
            return
        side.check()
        assert not list(side.host.placement), f"{name} has modules away"
        assert not [one for one in side.host.moves if not one.is_over], f"moves of {name} go on"
        assert not side.pool.used, f"blocks of {name} are used by nobody"
        assert side.pool.num_blocks == side.host.kv.num_blocks, f"the pool of {name} is not whole"
        assert not side.host.links, f"{name} has links to guests"


class Complaints(logging.Handler):
    """Errors that were logged with a traceback: nobody expects them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
        elif "Traceback" in record.getMessage():
            self.found.append(record.getMessage())


class WatchedMove(Move):
    """A move of which each phase has to follow from the one before."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, "_phase", None)
        if name == "_phase" and before not in (None, value):
            assert value in ALLOWED[before], f"{before} becomes {value}"
            assert value is not MovePhase.PREPARING
        super().__setattr__(name, value)


@contextlib.contextmanager
def _in_virtual_machine(server: Server) -> Iterator[None]:
    """Let instances, hosts and guests see the server's machine in place of this one."""
    machine = server.machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instances, "processes", machine)
        patch.setattr(instances, "os", machine.os)
        patch.setattr(instances, "zmq", machine.zmq)
        patch.setattr(instances, "weights_of", lambda config: config.weights)
        patch.setattr(probe, "is_on_cpu", lambda: server.draws.random() < 0.5)
        for module in (host, move, guest_client):
            patch.setattr(module, "threading", Threading)
        for module in _TIMED:
            patch.setattr(module, "time", Time)
        patch.setattr(host, "Move", WatchedMove)
        patch.setattr(guest_client, "select", Select)
        patch.setattr(guest_client, "Pulse", VirtualPulse)
        handle = SimpleNamespace(open=lambda pid: VirtualProcessHandle(machine, pid))
        patch.setattr(guest_client, "ProcessHandle", handle)
        patch.setattr(messages, "connect", server.network.connect)
        patch.setattr(messages, "create", server.network.transport)
        patch.setattr(guest_pool, "processes", machine)
        patch.setattr(guest_pool, "os", machine.os)
        patch.setattr(process_stats, "is_stopped", machine.is_stopped)
        patch.setattr(guest_monitor, "model_facts", lambda _: FACTS)
        patch.setattr(checks, "check_heads", lambda *_: None)
        metadata = SimpleNamespace(attn_metadata={})
        patch.setattr(layer_proxy, "get_forward_context", lambda: metadata)
        patch.setattr(guest_server, "os", SimpleNamespace(getpid=lambda: current().owner.pid))
        patch.setattr(guest_server, "_own_config", lambda config: config)
        patch.setattr(guest_server, "adopt_kv_layout", lambda *_: None)
        patch.setattr(guest_server, "build_unit", build_unit)
        patch.setattr(guest_server, "run_low_priority", lambda work: work())
        patch.setattr(guest_unit, "device_of", lambda _: torch.device("cpu"))
        patch.setattr(guest_unit, "attends_with", lambda _: None)
        server.daemon.patches(lambda name, value: patch.setattr(supervised, name, value))
        yield


async def run_seed(seed: int) -> Server:
    """All that happens with this seed.

    Raises:
        AssertionError: Something does not hold.
    """
    complaints, log = Complaints(), logging.getLogger("banaserve")
    log.addHandler(complaints)
    lost: list[dict[str, Any]] = []
    loop: Any = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: lost.append(context))
    try:
        with ExitStack() as stack:
            server = Server(stack, seed)
            with _in_virtual_machine(server):
                await server.go()
    finally:
        log.removeHandler(complaints)
    timers = [one for one in loop._scheduled if not one.cancelled()]
    assert not timers, f"timers are left: {timers}"
    assert not complaints.found, complaints.found
    assert not lost, lost
    return server
