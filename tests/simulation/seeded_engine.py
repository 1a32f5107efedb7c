"""An engine without a model, in virtual time: its tokens follow from prompt, position and seed.

Its scheduler asks the store as a real engine's does, through the connector's scheduler side.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

import model_shapes
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.kv_cache import Request
from banaserve.engine.connector.metadata import StepPlan, StepResult
from banaserve.engine.connector.scheduler_side.scheduler import StoreConnectorScheduler
from banaserve.engine.continuation import output_of
from banaserve.kvstore import wire
from banaserve.kvstore.client.cost_gate import CostGate
from banaserve.kvstore.leases import Exchanged, Lease, Lookup, Slot
from banaserve.kvstore.tiers.interface import TierOutcome
from fingerprints import FINGERPRINT
from seeded_host import BlockPool, HostSide
from seeded_machine import LoopClock, Process, Troubles
from seeded_modules import BLOCK
from seeded_threads import run_on_thread
from tiering_doubles import ScriptedTier, Store

WORDS = [f"{chr(97 + i)}{chr(97 + i)} " for i in range(20)]
MAX_MODEL_LEN = 64
_STORE_ANSWERS_S = 1.0
_OUTCOMES = [TierOutcome.DONE] * 6 + [TierOutcome.FAILED, TierOutcome.MISSING, TierOutcome.CORRUPT]


def token_at(weights: str, prompt: Sequence[int], position: int, seed: int) -> int:
    """The token that every engine with these weights computes there."""
    return zlib.crc32(f"{weights} {list(prompt)} {position} {seed}".encode()) % len(WORDS)


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZER = _tokenizer()


def _key(parent: bytes | None, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b((parent or b"") + bytes(tokens), digest_size=32).digest()


def hash_blocks(request: Request) -> list[bytes]:
    """Keys of the full blocks that have none yet, chained."""
    keys, tokens = list(request.block_hashes), request.all_token_ids
    for first in range(len(keys) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        keys.append(_key(keys[-1] if keys else None, tokens[first : first + BLOCK]))
    return keys[len(request.block_hashes) :]


class Tails:
    """Names partial last blocks."""

    def key(self, request: Request, num_tokens: int) -> bytes | None:
        first = num_tokens - num_tokens % BLOCK
        if first == num_tokens:
            return None
        parent = request.block_hashes[first // BLOCK - 1] if first else None
        return _key(parent, request.all_token_ids[first:num_tokens])


class SharedStore:
    """The store's service over one tier that ends its copies a while later, in any way.

    Args:
        make: Makes a daemon's store and its tier; what the tier held outlives the daemon.

    Attributes:
        is_away: Its daemon is dead or starts.
        is_hung: It stands still: what it is asked waits.
    """

    def __init__(self, make: Callable[[], tuple[Store, ScriptedTier]], troubles: Troubles) -> None:
        self._make = make
        self._troubles = troubles
        self._copy_s = troubles.draws.choice([0.1, 1.0])
        self._sessions = itertools.count(2)
        self._timer: asyncio.TimerHandle | None = None
        self._late: list[Callable[[], None]] = []
        self.is_away = self.is_hung = False
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        """A daemon is there, with nothing in its memory."""
        self.store, self._tier = self._make()
        self.service, self.view, self.generation = (
            self.store.service,
            self.store.view,
            self.store.generation,
        )
        self.is_away = self.is_hung = False
        self.num_starts += 1

    def die(self) -> None:
        """The daemon is dead."""
        self.is_away, self.is_hung = True, False
        self._late.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hang(self) -> None:
        """It stands still."""
        self.is_hung = not self.is_away

    def go_on(self) -> None:
        """It has stood still, and answers all that it was asked meanwhile."""
        if not self.is_hung:
            return
        self.is_hung = False
        late, self._late = self._late, []
        for act in late:
            act()
        self.turn()

    def greet(self, name: str, weights: str) -> int:
        """Connect a client; the number of its session."""
        session = next(self._sessions)
        fingerprint = msgspec.structs.replace(FINGERPRINT, model=weights)
        hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, name, fingerprint)
        assert isinstance(self.service.greet(session, hello), wire.Welcome)
        return session

    def when_it_goes_on(self, act: Callable[[], None]) -> None:
        """Do now, or in order once a hung daemon goes on, what it does by itself."""
        if self.is_hung:
            self._late.append(act)
        else:
            act()

    @property
    def is_copying(self) -> bool:
        """Whether copies of the tier are under way."""
        return self._timer is not None

    def turn(self) -> None:
        if self.is_away or self.is_hung:
            return
        loop = asyncio.get_running_loop()
        self.store.now_s = 100.0 + loop.time()
        self.store.turn()
        if self._timer is None and (self._tier.loads or self._tier.stores):
            self._timer = loop.call_later(self._troubles.some_s(self._copy_s), self._end_copies)

    def _end_copies(self) -> None:
        self._timer = None
        outcomes = _OUTCOMES if self._troubles.happen(0.5) else _OUTCOMES[:1]
        self._tier.end(self._troubles.draws.choice(outcomes))
        self.turn()


class StoreLink:
    """One client's connection to the store; see ``StoreClient``.

    Attributes:
        session: At the present daemon.
        waited_s: For answers that have not come, since it was asked last.
    """

    def __init__(self, shared: SharedStore, name: str, weights: str) -> None:
        self._shared = shared
        self._name, self._weights = name, weights
        self._generation = shared.generation
        self.session = shared.greet(name, weights)
        self._writing: dict[int, Slot] = {}
        self._keys: dict[int, bytes] = {}
        self._untold: list[wire.Request] = []
        self._is_lagging = self._has_died = False
        self.waited_s = 0.0

    @property
    def num_slots(self) -> int:
        return self._shared.service.stats().num_slots

    @property
    def slot_bytes(self) -> int:
        return self._shared.service.stats().slot_bytes

    def exchange(
        self,
        *,
        acquire: Sequence[bytes] = (),
        reserve: Sequence[tuple[bytes, bytes | None]] = (),
        tenant: bytes = b"",
        compute_block_s: float = 0.0,
        hold: int = 0,
        num_readers: int = 1,
        is_repeated: bool = False,
    ) -> Exchanged:
        terms = (tenant, compute_block_s, hold, num_readers, is_repeated)
        asked = wire.ExchangeSlots(2, list(acquire), list(reserve), *terms)
        granted = self._answer(asked)
        if granted is None:
            return Exchanged(None, (), (None,) * len(reserve))
        assert isinstance(granted, wire.SlotsGranted)
        slots, lease = [self._slot(pair) for pair in granted.slots], None
        if granted.lease_id is not None:
            lease = Lease(granted.lease_id, self._generation)
        reserved = [None if pair is None else self._slot(pair) for pair in granted.reserved]
        self._writing |= {slot.serial: slot for slot in reserved if slot is not None}
        asked_for = [*acquire[: len(slots)], *(key for key, _ in reserve)]
        for key, slot in zip(asked_for, [*slots, *reserved], strict=True):
            if slot is not None:
                self._keys[slot.serial] = key
        return Exchanged(
            lease,
            slots,
            reserved,
            granted.num_ready,
            granted.wait_s,
            granted.undecided,
            granted.num_declined,
            granted.num_refused,
            granted.num_held,
            granted.num_unfetched,
        )

    def keep(self, keys: Sequence[bytes], keep_s: float) -> None:
        self._tell(self._generation, wire.KeepBlocks(self._generation, list(keys), keep_s))

    def end_hold(self, hold: int, reader: int | None = None, also: str = "") -> None:
        self._tell(self._generation, wire.EndHold(self._generation, hold, reader, also))

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        looked = self._answer(wire.LookupKeys(4, list(keys)))
        if looked is None:
            return [Lookup.MISS] * len(keys)
        assert isinstance(looked, wire.LookupStates)
        return [Lookup(state) for state in looked.states]

    def arrivals(self, slots: Sequence[Slot]) -> list[Lookup]:
        if self._is_lost:
            return [Lookup.MISS] * len(slots)
        return self._shared.view.states(slots)

    def release(self, lease: Lease) -> None:
        self._tell(lease.generation, wire.ReleaseLeases(lease.generation, lease.id))

    def abandon(self, slots: Sequence[Slot]) -> None:
        generations = {slot.generation for slot in slots}
        for generation in generations:
            mine = self._written([one for one in slots if one.generation == generation])
            self._tell(generation, wire.Abandon(generation, mine, None))

    def commit(self, slots: Sequence[Slot]) -> bool:
        if len({slot.generation for slot in slots}) > 1:
            self.abandon(slots)
            return False
        generation, serials = slots[0].generation, self._written(slots)
        committed = self._answer(wire.Commit(3, generation, serials, 0))
        if committed is None:
            self._tell(generation, wire.Abandon(generation, serials, 0))
            return False
        is_present = generation == self._generation
        assert committed == wire.Committed(3, is_present)
        return is_present

    def memory(self, slot: Slot) -> Any:
        return self._shared.store.memory((slot.index, slot.serial))

    def read(self, slot: Slot) -> bool:
        """Check that its block is what its key says; False where its store has gone."""
        if self._is_lost or slot.generation != self._shared.generation:
            return False
        assert self.arrivals([slot]) == [Lookup.HIT], "a block is fetched that is not there"
        assert np.all(self.memory(slot) == self._keys[slot.serial][0]), "a wrong block is fetched"
        return True

    def write(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if not self._shared.is_away and slot.generation == self._shared.generation:
                self.memory(slot)[:] = self._keys[slot.serial][0]
        self.commit(slots)

    def lose(self) -> None:
        """The process dies: nothing is asked any more, and what is held is not given back."""
        self._has_died = True
        if self._is_present:
            service, session = self._shared.service, self.session
            self._shared.when_it_goes_on(lambda: service.leave(session) and None)

    def end(self) -> None:
        """Nothing is left of the process; up to now it may have written."""
        if not self._is_present:
            return
        for slot in self._writing.values():
            if slot.generation == self._generation:
                self.memory(slot)[:] = 0xEE
        service, session = self._shared.service, self.session
        self._shared.when_it_goes_on(lambda: service.drop(session))
        self._shared.turn()

    def close(self) -> None:
        self.lose()
        self.end()

    # ---- inside

    @property
    def _is_present(self) -> bool:
        """Whether the daemon that it was connected to is there."""
        return not self._shared.is_away and self._generation == self._shared.generation

    @property
    def _is_lost(self) -> bool:
        return not self._is_present

    def _written(self, slots: Sequence[Slot]) -> list[int]:
        for slot in slots:
            self._writing.pop(slot.serial, None)
        return [slot.serial for slot in slots]

    def _slot(self, pair: tuple[int, int]) -> Slot:
        return Slot(pair[0], self._generation, pair[1])

    def _connect(self) -> None:
        """To a daemon that has been started since."""
        self._generation = self._shared.generation
        self.session = self._shared.greet(self._name, self._weights)
        self._is_lagging = False
        self._writing.clear()
        self._keys.clear()
        self._untold.clear()

    def _answer(self, asked: wire.Request) -> wire.Reply | None:
        """None where the store is away, or does not answer in time."""
        shared = self._shared
        if shared.is_away:
            return None
        if not self._is_present and not shared.is_hung:
            self._connect()
        if shared.is_hung:
            if not self._is_lagging and self._is_present:
                self._is_lagging = True
                self.waited_s += _STORE_ANSWERS_S
                shared.when_it_goes_on(lambda: self._take_late(asked))
            return None
        self._tell_untold()
        answer = shared.service.answer(self.session, asked)
        shared.turn()
        return answer

    def _take_late(self, asked: wire.Request) -> None:
        """An answer that nobody waits for: what it grants goes back."""
        service, generation = self._shared.service, self._generation
        reply = service.answer(self.session, asked)
        self._is_lagging = False
        if not isinstance(reply, wire.SlotsGranted) or self._has_died:
            return
        if reply.lease_id is not None:
            service.answer(self.session, wire.ReleaseLeases(generation, reply.lease_id))
        if reply.hold:
            service.answer(self.session, wire.EndHold(generation, reply.hold))
        serials = [pair[1] for pair in reply.reserved if pair is not None]
        if serials:
            service.answer(self.session, wire.Abandon(generation, serials, None))

    def _tell(self, generation: int, said: wire.Request) -> None:
        if generation != self._generation or not self._is_present:
            return
        self._untold.append(said)
        if not self._shared.is_hung:
            self._tell_untold()
            self._shared.turn()

    def _tell_untold(self) -> None:
        untold, self._untold = self._untold, []
        for said in untold:
            self._shared.service.answer(self.session, said)


class Core:
    """Steps over the requests that it has been sent.

    Args:
        side: With modules that move; None where none can.

    Attributes:
        front: What its outputs go to; None before that is there.
        pause: ``new`` while it begins no request, ``all`` while it computes nothing; else empty.
    """

    def __init__(
        self,
        name: str,
        weights: str,
        shared: SharedStore,
        troubles: Troubles,
        side: HostSide | None,
    ) -> None:
        self.name, self.weights = name, weights
        self.front: Front | None = None
        self.requests: dict[str, Request] = {}
        self.side = side
        self.num_lost_steps = 0
        self._pool = BlockPool() if side is None else side.pool
        self._link = StoreLink(shared, name, weights)
        client: Any = self._link
        tails: Any = Tails()
        self._connector = StoreConnectorScheduler(
            client, tails, BLOCK, CostGate(num_layers=4), LoopClock(), MAX_MODEL_LEN
        )
        self._troubles = troubles
        self._inbox: list[compat.EngineCoreRequest | str] = []
        self._running: dict[str, int] = {}
        self.pause = ""
        self._questions: list[tuple[asyncio.Future[None], str]] = []
        self._calls: list[tuple[str, Sequence[Any], asyncio.Future[Any]]] = []
        self._has_work = asyncio.Event()
        self._step_s = troubles.draws.choice([0.02, 0.05, 0.1])

    # ---- what it is told

    def send(self, message: compat.EngineCoreRequest | str) -> None:
        """A request, or the id of one that is to end."""
        self._inbox.append(message)
        self._has_work.set()

    def ask(self, mode: str = "") -> asyncio.Future[None]:
        """A question that it answers between two steps; with ``mode`` it pauses or resumes then."""
        question = asyncio.get_running_loop().create_future()
        self._questions.append((question, mode))
        self._has_work.set()
        return question

    def call(self, method: str, args: Sequence[Any]) -> asyncio.Future[Any]:
        """A call of its worker or its core, between two steps."""
        reply = asyncio.get_running_loop().create_future()
        self._calls.append((method, args, reply))
        self._has_work.set()
        return reply

    def die(self) -> None:
        self._link.lose()

    def end(self) -> None:
        self._link.end()

    # ---- what it does

    async def run(self, process: Process) -> None:
        while True:
            await self._has_work.wait()
            await process.may_go_on.wait()
            self._read()
            await self._answer(process)
            scheduled, plan = self._plan()
            waited_s, self._link.waited_s = self._link.waited_s, 0.0
            await asyncio.sleep(self._took_s(scheduled) + waited_s)
            await process.may_go_on.wait()
            good, left_out = await self._compute(process, scheduled, plan)
            self._connector.step_done(StepResult(plan.step, self._step_s, 0.001 * len(plan.loads)))
            self._put_out([one for one in scheduled if one[0].request_id not in left_out], good)
            stands = not self.requests or self.pause == "all" or (self.pause and not self._running)
            if stands and not self._inbox and not self._calls and not self._questions:
                self._has_work.clear()

    async def _answer(self, process: Process) -> None:
        calls, self._calls = self._calls, []
        for method, args, reply in calls:
            if self.side is None:
                answer: Any = {"type": "Refused", "reason": "this engine cannot migrate"}
            else:
                side = self.side
                answer = await run_on_thread(
                    process, lambda s=side, m=method, a=args: s.answer(m, a)
                )
            if not reply.done():
                reply.set_result(answer)

    def _took_s(self, scheduled: Sequence[tuple[Request, int]]) -> float:
        """Prompts take longer; nothing but a look at those that wait takes no time."""
        num_tokens = sum(request.num_tokens - num for request, num in scheduled)
        return self._step_s * (1.0 + 0.3 * num_tokens) if scheduled else 0.005

    def _read(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            if isinstance(message, str):
                self._forget(message)
                continue
            assert message.request_id not in self.requests, "a leg comes twice"
            request = Request.from_engine_core_request(message, hash_blocks)
            if brought := output_of(message.sampling_params):
                compat._put_back(SimpleNamespace(), request, brought)
            self.requests[request.request_id] = request
        questions, self._questions = self._questions, []
        for question, mode in questions:
            self._take_mode(mode)
            if not question.done():
                question.set_result(None)

    def _take_mode(self, mode: str) -> None:
        if mode == "abort" and self.front is not None:
            names = list(self.requests)
            for name in names:
                self._forget(name)
            reason = compat.FinishReason.ABORT
            ended = [compat.EngineCoreOutput(name, [], finish_reason=reason) for name in names]
            self.front.put(ended, 0, 0)
        if mode:
            self.pause = {"resume": "", "keep": "all"}.get(mode, "new")

    def _forget(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self._running.pop(request_id, None)
            self._pool.take(request_id)
            self._connector.finished(request_id)

    def _blocks(self, request_id: str) -> Any:
        return [self._pool.by_request[request_id]]

    def _plan(self) -> tuple[list[tuple[Request, int]], StepPlan]:
        """Requests of the next step with the tokens that each has had, and its copies."""
        running = {} if self.pause == "all" else self._running
        cached = [(self.requests[name], num) for name, num in running.items()]
        new = []
        for name, request in ({} if self.pause else self.requests).items():
            if name in self._running or (found := self._connector.match(request, 0)) is None:
                continue
            if not self._may_begin(request):
                continue
            blocks: Any = SimpleNamespace(get_block_ids=lambda n=name: self._blocks(n))
            self._connector.allocated(request, blocks, found)
            new.append((request, found))
        scheduled = [*new, *cached]
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one.request_id, num_computed_tokens=num) for one, num in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one, _ in cached],
                num_computed_tokens=[num for _, num in cached],
            ),
            num_scheduled_tokens={one.request_id: one.num_tokens - num for one, num in scheduled},
            kv_connector_block_state=SimpleNamespace(get_block_ids=self._blocks),
        )
        plan = self._connector.plan(output)
        self._running |= {one.request_id: one.num_tokens for one, _ in new}
        return scheduled, plan

    def _may_begin(self, request: Request) -> bool:
        if self._troubles.happen(0.05):
            return False
        most = min(request.num_tokens + request.max_tokens, MAX_MODEL_LEN)
        return self._pool.give(request.request_id, most)

    async def _compute(
        self, process: Process, scheduled: Sequence[tuple[Request, int]], plan: StepPlan
    ) -> tuple[set[str], set[str]]:
        """Requests whose tokens are right, and those that put out none in this step."""
        copies = [*plan.loads, *plan.early_loads]
        missed = {copy.block_id for copy in copies if not self._link.read(copy.slot)}
        left_out = self._begin_again(missed)
        names = {request.request_id for request, _ in scheduled}
        kept = {name for name in names - left_out if name in self.requests}
        good, saves = kept, self._savable(plan, kept)
        if self.side is not None:
            batch = [
                (request.request_id, list(request.all_token_ids), num)
                for request, num in scheduled
                if request.request_id in kept
            ]
            fetched = {copy.block_id for copy in copies} - missed
            loads, saved = self._tokens_of(fetched), self._tokens_of({b for b, _ in saves})
            side = self.side
            good, is_lost = await run_on_thread(process, lambda: side.run(batch, loads, saved))
            if is_lost or not side.may_save:
                self._link.abandon([copy.slot for copy in plan.saves])
                saves = []
            if is_lost:
                self.num_lost_steps += 1
                left_out = left_out | names
                for name in list(self._running):
                    self._pool.take(name)
                self._running.clear()
        self._save(plan, saves)
        return good, left_out

    def _begin_again(self, missed: set[int]) -> set[str]:
        """Requests that compute in their next step what could not be fetched in this one."""
        found = set()
        for name in self._running:
            table = self._pool.by_request[name]
            if bad := [at for at, block in enumerate(table) if block in missed]:
                self._running[name] = bad[0] * BLOCK
                found.add(name)
        return found

    def _savable(self, plan: StepPlan, names: set[str]) -> list[tuple[int, Slot]]:
        mine = {block for name in names for block in self._pool.by_request.get(name, ())}
        return [(copy.block_id, copy.slot) for copy in plan.saves if copy.block_id in mine]

    def _tokens_of(self, blocks: set[int]) -> dict[int, list[int]]:
        found = {}
        for name, table in self._pool.by_request.items():
            for at, block in enumerate(table):
                if block in blocks:
                    tokens = self.requests[name].all_token_ids
                    found[block] = list(tokens[at * BLOCK : (at + 1) * BLOCK])
        return found

    def _save(self, plan: StepPlan, saves: Sequence[tuple[int, Slot]]) -> None:
        slots = [slot for _, slot in saves]
        if slots and self._troubles.happen(0.02):
            self._link.abandon(slots)
        elif slots:
            self._link.write(slots)
        if others := [copy.slot for copy in plan.saves if copy.slot not in slots]:
            self._link.abandon(others)

    def _put_out(self, scheduled: Sequence[tuple[Request, int]], good: set[str]) -> None:
        outputs = []
        for request, num_cached in scheduled:
            if request.request_id not in self.requests:
                continue
            params, prompt = request.sampling_params, request.prompt_token_ids
            assert params is not None
            assert prompt is not None
            position = request.num_output_tokens
            token = token_at(self.weights, prompt, position, params.seed or 0)
            if request.request_id not in good:
                token = (token + 1) % len(WORDS)
            self._running[request.request_id] = request.num_tokens
            request.append_output_token_ids(token)
            is_last = request.num_output_tokens >= request.max_tokens
            finish = compat.FinishReason.LENGTH if is_last else None
            output = compat.EngineCoreOutput(request.request_id, [token], finish_reason=finish)
            output.prefill_stats = compat.PrefillStats(num_cached_tokens=num_cached)
            outputs.append(output)
            if is_last:
                self._forget(request.request_id)
        if self.front is not None:
            self.front.put(outputs, len(self._running), len(self.requests) - len(self._running))


class Front:
    """The client of an engine in the server's process; see vLLM's ``AsyncLLM``.

    Args:
        delay_s: What the engine puts out comes so much later, also where it has died since.
    """

    def __init__(self, core: Core, board: Any, delay_s: float) -> None:
        self.core = core
        self.output_processor = OutputProcessor(TOKENIZER, log_stats=True)
        self.engine_core = self
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.log_requests, self.logger_manager = False, None
        cache = SimpleNamespace(num_gpu_blocks=64, block_size=BLOCK)
        self.vllm_config = model_shapes.configured()
        self.vllm_config.cache_config = cache
        self._board, self._delay_s, self._reads = board, delay_s, True
        core.front = self

    @property
    def errored(self) -> bool:
        return self.resources.engine_dead

    def fail(self) -> None:
        """What reads the engine's outputs ends."""
        self.resources.engine_dead, self._reads = True, False
        self.output_processor.propagate_error(compat.EngineDeadError())

    def put(self, *step: Any) -> None:
        """What a step has put out is on its way."""
        asyncio.get_running_loop().call_later(self._delay_s, self._take, *step)

    def _take(
        self, outputs: list[compat.EngineCoreOutput], num_running: int, num_waiting: int
    ) -> None:
        if not self._reads:
            return
        done = self.output_processor.process_outputs(outputs, 0.0, IterationStats())
        for request_id in done.reqs_to_abort:
            self.core.send(request_id)
        stats = SchedulerStats(num_running_reqs=num_running, num_waiting_reqs=num_waiting)
        self._board.record(stats)

    async def add_request_async(self, request: compat.EngineCoreRequest) -> None:
        if self.resources.engine_dead:
            raise compat.EngineDeadError
        self.core.send(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if self.resources.engine_dead:
            return
        for request_id in request_ids:
            self.core.send(request_id)

    async def abort(self, request_id: Any, internal: bool = False) -> None:
        llm: Any = self
        await compat.AsyncLLM.abort(llm, request_id, internal)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        return [await self.call_utility_async(method, *args)]

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.resources.engine_dead:
            raise compat.EngineDeadError
        return await self.core.call(method, args)

    async def _asked(self, mode: str = "") -> None:
        if self.resources.engine_dead:
            raise compat.EngineDeadError
        answer = self.core.ask(mode)
        self.utility_results[id(answer)] = answer
        try:
            await answer
        finally:
            del self.utility_results[id(answer)]

    async def is_paused(self) -> bool:
        await self._asked()
        return bool(self.core.pause)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._asked(mode)

    async def resume_generation(self) -> None:
        await self._asked("resume")

    async def sleep(self, _: int, mode: str) -> None:
        await self._asked(mode)

    async def wake_up(self, _: object = None) -> bool:
        await self._asked("resume")
        return True

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.request_states)

    def shutdown(self, timeout: float) -> None: ...

    def _ensure_output_queue_task(self) -> None: ...

    def _run_output_handler(self) -> None: ...
