"""An engine without a model, in virtual time: its tokens follow from prompt, position and seed.

Its scheduler asks the store as a real engine's does, through the connector's scheduler side.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.kv_cache import Request
from banaserve.engine.vllm.continuation import output_of
from banaserve.engine.vllm.kv_connector.metadata import StepPlan, StepResult
from banaserve.engine.vllm.kv_connector.scheduler import StoreConnectorScheduler
from banaserve.kvstore import wire
from banaserve.kvstore.cost_gate import CostGate
from banaserve.kvstore.interface import Exchanged, Lease, Lookup, Slot
from banaserve.kvstore.tiers.interface import TierOutcome
from fingerprints import FINGERPRINT
from seeded_machine import LoopClock, Troubles
from tiering_doubles import ScriptedTier, Store

BLOCK = 4
WORDS = [f"{chr(97 + i)}{chr(97 + i)} " for i in range(20)]
BLOCKS: Any = SimpleNamespace(get_block_ids=lambda: [list(range(100))])
"""Of any request: where its KV lies in an engine plays no part here."""
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
    """The store's service over one tier that ends its copies a while later, in any way."""

    def __init__(self, store: Store, tier: ScriptedTier, troubles: Troubles) -> None:
        self.service, self.view, self.generation = store.service, store.view, store.generation
        self.store = store
        self._tier = tier
        self._troubles = troubles
        self._copy_s = troubles.draws.choice([0.1, 1.0])
        self._sessions = itertools.count(2)
        self._timer: asyncio.TimerHandle | None = None

    def link(self, name: str, weights: str) -> StoreLink:
        """A new client's connection."""
        session = next(self._sessions)
        fingerprint = msgspec.structs.replace(FINGERPRINT, model=weights)
        hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, name, fingerprint)
        assert isinstance(self.service.greet(session, hello), wire.Welcome)
        return StoreLink(self, session)

    @property
    def is_copying(self) -> bool:
        """Whether copies of the tier are under way."""
        return self._timer is not None

    def turn(self) -> None:
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
    """One client's connection to the store; see ``StoreClient``."""

    def __init__(self, shared: SharedStore, session: int) -> None:
        self._shared = shared
        self._session = session
        self._writing: dict[int, Slot] = {}
        self._keys: dict[int, bytes] = {}

    def exchange(
        self,
        *,
        acquire: Sequence[bytes] = (),
        reserve: Sequence[tuple[bytes, bytes | None]] = (),
        tenant: bytes = b"",
        compute_block_s: float = 0.0,
    ) -> Exchanged:
        asked = wire.ExchangeSlots(2, list(acquire), list(reserve), tenant, compute_block_s)
        granted = self._answer(asked)
        assert isinstance(granted, wire.SlotsGranted)
        slots, lease = [self._slot(pair) for pair in granted.slots], None
        if granted.lease_id is not None:
            lease = Lease(granted.lease_id, self._shared.generation, len(slots))
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
        )

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        looked = self._answer(wire.LookupKeys(4, list(keys)))
        assert isinstance(looked, wire.Looked)
        return [Lookup(state) for state in looked.states]

    def arrivals(self, slots: Sequence[Slot]) -> list[Lookup]:
        return self._shared.view.states(slots)

    def release(self, lease: Lease) -> None:
        self._answer(wire.ReleaseLeases(lease.generation, lease.id))

    def abandon(self, slots: Sequence[Slot]) -> None:
        self._answer(wire.Abandon(self._shared.generation, self._written(slots), None))

    def commit(self, slots: Sequence[Slot]) -> None:
        committed = self._answer(wire.Commit(3, self._shared.generation, self._written(slots), 0))
        assert committed == wire.Committed(3, True)

    def memory(self, slot: Slot) -> Any:
        return self._shared.store.memory((slot.index, slot.serial))

    def read(self, slot: Slot) -> None:
        """Check that its block is there and is what its key says."""
        assert self.arrivals([slot]) == [Lookup.HIT], "a block is fetched that is not there"
        assert np.all(self.memory(slot) == self._keys[slot.serial][0]), "a wrong block is fetched"

    def write(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.memory(slot)[:] = self._keys[slot.serial][0]
        self.commit(slots)

    def lose(self) -> None:
        """The process dies: nothing is asked any more, and what is held is not given back."""
        self._shared.service.leave(self._session)

    def end(self) -> None:
        """Nothing is left of the process; up to now it may have written."""
        for slot in self._writing.values():
            self.memory(slot)[:] = 0xEE
        self._shared.service.drop(self._session)
        self._shared.turn()

    def close(self) -> None:
        self.lose()
        self.end()

    def _written(self, slots: Sequence[Slot]) -> list[int]:
        return [self._writing.pop(slot.serial).serial for slot in slots]

    def _slot(self, pair: tuple[int, int]) -> Slot:
        return Slot(pair[0], self._shared.generation, pair[1])

    def _answer(self, asked: wire.Request) -> wire.Reply | None:
        answer = self._shared.service.answer(self._session, asked)
        self._shared.turn()
        return answer


class Core:
    """Steps over the requests that it has been sent.

    Attributes:
        front: What its outputs go to; None before that is there.
    """

    def __init__(self, name: str, weights: str, shared: SharedStore, troubles: Troubles) -> None:
        self.name, self.weights = name, weights
        self.front: Front | None = None
        self.requests: dict[str, Request] = {}
        self._link = shared.link(name, weights)
        client: Any = self._link
        tails: Any = Tails()
        self._side = StoreConnectorScheduler(client, tails, BLOCK, CostGate(), LoopClock())
        self._troubles = troubles
        self._inbox: list[compat.EngineCoreRequest | str] = []
        self._running: set[str] = set()
        self._questions: list[asyncio.Future[None]] = []
        self._has_work = asyncio.Event()
        self._step_s = troubles.draws.choice([0.02, 0.05, 0.1])

    # ---- what it is told

    def send(self, message: compat.EngineCoreRequest | str) -> None:
        """A request, or the id of one that is to end."""
        self._inbox.append(message)
        self._has_work.set()

    def ask(self) -> asyncio.Future[None]:
        """A question that it answers between two steps."""
        question = asyncio.get_running_loop().create_future()
        self._questions.append(question)
        self._has_work.set()
        return question

    def die(self) -> None:
        self._link.lose()

    def end(self) -> None:
        self._link.end()

    # ---- what it does

    async def run(self, may_go_on: asyncio.Event) -> None:
        while True:
            await self._has_work.wait()
            await may_go_on.wait()
            self._read()
            scheduled, plan = self._plan()
            await asyncio.sleep(self._took_s(scheduled))
            await may_go_on.wait()
            self._copy(plan)
            self._side.step_done(StepResult(plan.step, self._step_s, 0.001 * len(plan.loads)))
            self._put_out(scheduled)
            if not self.requests and not self._inbox:
                self._has_work.clear()

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
        for question in questions:
            if not question.done():
                question.set_result(None)

    def _forget(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self._running.discard(request_id)
            self._side.finished(request_id)

    def _plan(self) -> tuple[list[tuple[Request, int]], StepPlan]:
        """Requests of the next step with the tokens that each has had, and its copies."""
        running = [self.requests[name] for name in self.requests if name in self._running]
        cached = [(one, one.num_tokens - 1) for one in running]
        new = []
        for name, request in self.requests.items():
            if name in self._running or (found := self._side.match(request, 0)) is None:
                continue
            if self._troubles.happen(0.05):
                continue  # no block is free
            self._side.allocated(request, BLOCKS, found)
            new.append((request, found))
        self._running |= {one.request_id for one, _ in new}
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
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: BLOCKS.get_block_ids()
            ),
        )
        plan = self._side.plan(output)
        return scheduled, plan

    def _copy(self, plan: StepPlan) -> None:
        for copy in (*plan.loads, *plan.early_loads):
            self._link.read(copy.slot)
        saves = [copy.slot for copy in plan.saves]
        if saves and self._troubles.happen(0.02):
            self._link.abandon(saves)
        elif saves:
            self._link.write(saves)

    def _put_out(self, scheduled: Sequence[tuple[Request, int]]) -> None:
        outputs = []
        for request, num_cached in scheduled:
            if request.request_id not in self.requests:
                continue
            params, prompt = request.sampling_params, request.prompt_token_ids
            assert params is not None
            assert prompt is not None
            position = request.num_output_tokens
            token = token_at(self.weights, prompt, position, params.seed or 0)
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
        self.log_requests, self.logger_manager = False, None
        cache = SimpleNamespace(num_gpu_blocks=64, block_size=BLOCK)
        self.vllm_config = SimpleNamespace(cache_config=cache)
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

    async def _add_request(self, request: Any, *more: Any) -> None:
        self.output_processor.add_request(request, *more)
        await self.add_request_async(request)

    async def is_paused(self) -> bool:
        if self.resources.engine_dead:
            raise compat.EngineDeadError
        await self.core.ask()
        return False

    async def is_sleeping(self) -> bool:
        return await self.is_paused()

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.request_states)

    def shutdown(self, timeout: float) -> None: ...

    def _ensure_output_queue_task(self) -> None: ...

    def _run_output_handler(self) -> None: ...
