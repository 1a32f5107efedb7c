"""A request's way through engines that die, over vLLM's own front-end state."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats

from banaserve.base.clock import WallClock
from banaserve.base.types import InstanceId, RequestView, Route
from banaserve.engine.compat import engine as compat
from banaserve.engine.connector.handover import Handover
from banaserve.engine.continuation import output_of, with_output
from banaserve.serving.instances.instance import DRAINED
from banaserve.serving.launch.launcher import InstancePlace
from banaserve.serving.requests.decode_batching import DecodeBatching
from banaserve.serving.requests.disagg_request import run_request
from banaserve.serving.requests.intake import Blockers
from banaserve.serving.requests.prefix_lookup import HoldEnd, PrefixLookups
from banaserve.serving.requests.request_context import Prediction, RequestContext
from banaserve.serving.requests.router import Residency, RoutedLegs, WeightsReplacedError
from banaserve.serving.requests.sequences import run_sequences, sequences_of
from banaserve.serving.requests.suspects import EnginesDiedError
from banaserve.serving.tracing.request_log import HttpCall, RequestNotes
from banaserve.serving.tracing.spans import FRONT_DOOR, spans_of
from waiting import until

GATHER_S = 600.0
WORDS = [f"{chr(97 + i)}{chr(97 + i)} " for i in range(20)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


class Engine:
    """The client of an engine that answers with the tokens that follow the last one."""

    def __init__(self, name: str) -> None:
        self.id = InstanceId(name)
        self.incarnation = 1
        self.weights = "w"
        self.llm: Any = self
        self.output_processor = OutputProcessor(tokenizer(), log_stats=True)
        self.engine_core = self
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.log_requests, self.logger_manager = False, None
        self.is_alone = self.is_orphaned = False
        self.board = SimpleNamespace(room_wait_s=0.0)
        self.inflight_requests = 1
        self.legs: list[compat.EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.given_back = asyncio.Event()
        self.given_back.set()
        self.place = InstancePlace()
        self.coming: set[object] = set()
        self.adapters: set[int] = set()
        self.has_left_decode = False

    def store_beside(self, other: Engine) -> str:
        return other.place.store if other.place != self.place else ""

    async def wait_given_back(self) -> None:
        await self.given_back.wait()

    async def add_request_async(self, request: compat.EngineCoreRequest) -> None:
        if self.resources.engine_dead:
            raise compat.EngineDeadError
        self.legs.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def abort(self, request_id: str, internal: bool = False) -> None:
        await compat.AsyncLLM.abort(self, request_id, internal)

    def holding(
        self,
        _: int,
        __: int,
        move: Callable[[str], None] | None = None,
        starts_over: bool = False,
        moved_s: float | None = None,
    ) -> Any:
        self.move = None if move is None else functools.partial(move, DRAINED)
        return _Flight()

    def compute(self, num_tokens: int, num_cached: int = 0) -> None:
        """The next tokens of its last leg, one step each; ``num_cached`` of its prompt it had."""
        leg = self.legs[-1]
        prompt, params = leg.prompt_token_ids, leg.sampling_params
        assert prompt is not None
        assert params is not None
        assert params.max_tokens is not None
        for _ in range(num_tokens):
            tokens = [*prompt, *output_of(params)]
            tokens.append((tokens[-1] + 1) % len(WORDS))
            params.extra_args = with_output(params.extra_args, tokens[len(prompt) :])
            is_last = len(output_of(params)) == params.max_tokens
            finish = compat.FinishReason.LENGTH if is_last else None
            output = compat.EngineCoreOutput(leg.request_id, tokens[-1:], finish_reason=finish)
            output.prefill_stats = compat.PrefillStats(num_cached_tokens=num_cached)
            self.output_processor.process_outputs([output], 0.0, IterationStats(), self.weights)


class _Flight:
    def __enter__(self) -> _Flight:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prefilled(self) -> None:
        pass


class Engines:
    """Sends each request to the next engine; two legs where ``prefill`` is given."""

    def __init__(self, *engines: Engine, prefill: Engine | None = None) -> None:
        self.retry_turns, self.residency = asyncio.Lock(), Residency()
        self.lookups = PrefixLookups(cast("Any", self))
        self.decode_batching = DecodeBatching(GATHER_S)
        self.cluster = self
        self._left = list(engines)
        self._prefill = prefill
        known = [*engines, prefill] if prefill else engines
        self.instances = {engine.id: engine for engine in known}

    async def route(self, asked: RequestView, *_: object) -> RoutedLegs:
        prefill, decode = self._prefill, cast("Any", self._left.pop(0))
        route = Route(prefill.id if prefill else None, decode.id, "")
        return RoutedLegs(asked, route, cast("Any", prefill), decode)


def job(params: SamplingParams, name: str = "r", **more: Any) -> RequestContext:
    request = compat.EngineCoreRequest(
        request_id=f"{name}-1",
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name,
    )
    deadline = asyncio.get_running_loop().time() + 60.0
    notes = RequestNotes(WallClock(), name, 1, HttpCall(0.0, 0.0))
    blockers = Blockers(first_token=more.pop("first_token_blocker", None))
    return RequestContext(request, None, blockers, deadline, notes, **more)


def streamed(**options: Any) -> SamplingParams:
    kind = RequestOutputKind.DELTA
    return SamplingParams(temperature=0.0, max_tokens=10, output_kind=kind, **options)


class Reader:
    """A client that reads one output at a time, each in a task of its own."""

    def __init__(self, job: RequestContext, engines: Engines) -> None:
        self._stream = run_request(job, engines)  # type: ignore[arg-type]
        self._next = asyncio.create_task(self._read())
        self.text, self.finished = "", False

    async def _read(self) -> RequestOutput | None:
        return await anext(self._stream, None)

    async def reaches(self, engine: Engine) -> None:
        """Read until the request's leg is at ``engine``."""
        while not engine.legs:
            if self._next.done():
                await self.read()
            await asyncio.sleep(0)

    async def read(self) -> None:
        output = await asyncio.wait_for(self._next, 60)
        assert output is not None
        self.text += output.outputs[0].text
        self.num_cached_tokens = output.num_cached_tokens
        self.stats: Any = output.metrics
        self.weight_versions = output.outputs[0].weight_versions
        self.finished = output.finished
        self.finish_reason = output.outputs[0].finish_reason
        self._next = asyncio.create_task(self._read())


def test_an_engine_core_that_can_answer_nobody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a result cannot be encoded")

    codes: list[int] = []
    monkeypatch.setattr(compat.os, "_exit", codes.append)
    monkeypatch.setattr(compat.EngineCoreProc, "process_output_sockets", fail)
    compat.install_output_guard()
    core: Any = None
    compat.EngineCoreProc.process_output_sockets(core, [], None, 0)
    assert codes == [1]


async def test_calls_of_an_engine_that_dies_fail_as_its_requests_do() -> None:
    engine, loop = Engine("d0"), asyncio.get_running_loop()
    answered, awaited = loop.create_future(), loop.create_future()
    answered.set_result("paused")
    engine.utility_results = {1: answered, 2: awaited}
    compat.mark_dead(engine)
    assert await answered == "paused"
    with pytest.raises(compat.EngineDeadError):
        await awaited


@pytest.mark.parametrize("options", [{}, {"stop": ["never seen"]}, {"stream_interval": 3}])
async def test_a_stream_that_goes_on_elsewhere_lacks_nothing(options: dict[str, Any]) -> None:
    first, second = Engine("d0"), Engine("d1")
    reader = Reader(job(streamed(**options)), Engines(first, second))
    await reader.reaches(first)
    first.compute(1)
    await reader.read()
    first.compute(4)
    compat.mark_dead(first)
    first.compute(1)  # what comes late is nobody's
    await reader.reaches(second)
    second.compute(5)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])
    assert second.legs[0].prompt_token_ids == [0]
    assert list(output_of(second.legs[0].sampling_params)) == list(range(1, 11))


async def test_a_death_in_mid_stream_is_seen_in_the_parts_of_its_time() -> None:
    prefill, first, second = Engine("p0"), Engine("d0"), Engine("d1")
    work = job(streamed())
    reader = Reader(work, Engines(first, second, prefill=prefill))
    await reader.reaches(prefill)
    prefill.compute(1)
    await reader.reaches(first)
    first.compute(4)
    await reader.read()
    compat.mark_dead(first)
    await reader.reaches(second)
    second.compute(5)
    while not reader.finished:
        await reader.read()
    notes = work.notes
    notes.end("length")
    spans = spans_of(notes.summary(), notes.events())
    found = [(one.name, one.process, bool(one.error)) for one in spans]
    assert found == [
        ("prefill", "p0", False),
        ("hand-over", "d0", False),
        ("decode", "d0", True),
        ("prefill", "d1", False),
        ("decode", "d1", False),
        ("respond", FRONT_DOOR, False),
    ]
    assert spans[2].error.endswith("tried again")
    assert spans[3].attributes["resumed_tokens"] == 5


@pytest.mark.parametrize("options", [{}, {"stop": ["never seen"]}, {"stream_interval": 3}])
async def test_the_first_token_is_sent_where_decode_has_died_before_its_leg_came(
    options: dict[str, Any],
) -> None:
    prefill, first, second = Engine("p0"), Engine("d0"), Engine("d1")
    engines = Engines(first, second, prefill=prefill)
    reader = Reader(job(streamed(**options)), engines)
    await reader.reaches(prefill)
    first.resources.engine_dead = True
    prefill.compute(1)
    await reader.reaches(second)
    second.compute(9)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])
    assert first.legs == []
    assert second.legs[0].prompt_token_ids == [0]
    assert list(output_of(second.legs[0].sampling_params)) == list(range(1, 11))


@pytest.mark.parametrize("has_output", [True, False])
async def test_who_has_output_does_not_wait_until_nothing_is_left_of_a_dead_engine(
    has_output: bool,
) -> None:
    first, second = Engine("d0"), Engine("d1")
    reader = Reader(job(streamed()), Engines(first, second))
    await reader.reaches(first)
    first.given_back.clear()
    if has_output:
        first.compute(3)
    compat.mark_dead(first)
    if not has_output:
        for _ in range(20):
            await asyncio.sleep(0)
        assert second.legs == []
        first.given_back.set()
    await reader.reaches(second)
    second.compute(7 if has_output else 10)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])


async def test_a_request_that_no_engine_survives_ends_before_it_has_had_them_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = [Engine(f"d{i}") for i in range(4)]
    whole = SamplingParams(temperature=0.0, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY)
    reader = Reader(job(whole), Engines(*engines))
    for engine in engines[:3]:
        await reader.reaches(engine)
        engine.compute(5 if engine is engines[0] else 0)
        compat.mark_dead(engine)
    with pytest.raises(EnginesDiedError, match="3 instances died"):
        await reader.read()
    assert engines[3].legs == []
    assert "request r is given up" in caplog.text


async def test_no_request_is_the_cause_of_a_death_that_came_with_the_engine_parents() -> None:
    engines = [Engine(f"d{i}") for i in range(7)]
    whole = SamplingParams(temperature=0.0, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY)
    reader = Reader(job(whole), Engines(*engines))
    for number, engine in enumerate(engines[:6]):
        await reader.reaches(engine)
        engine.is_orphaned = number not in (1, 4)
        compat.mark_dead(engine)
    await reader.reaches(engines[6])
    engines[6].compute(10)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])


async def test_of_a_death_each_of_many_requests_has_its_share_of_the_blame(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = [Engine(f"d{i}") for i in range(5)]
    reader = Reader(job(streamed()), Engines(*engines))
    for engine in engines[:4]:
        engine.inflight_requests = 8
        await reader.reaches(engine)
        compat.mark_dead(engine)
    with pytest.raises(EnginesDiedError, match="4 instances died"):
        await reader.read()
    assert engines[4].legs == []
    assert "request r is given up" in caplog.text


async def test_of_requests_that_die_together_the_cause_alone_is_given_up() -> None:
    """From the second death on one at a time runs; who comes further makes room for the next."""
    engines = [Engine(f"d{i}") for i in range(4)]
    # Each request is sent on as often as it dies: three times to the first two, then one by one.
    cluster = Engines(*engines[:1] * 3, *engines[1:2] * 3, *engines[2:3] * 2, engines[3])

    async def answered(name: str) -> str:
        context = job(streamed(), name=name)
        texts = [o.outputs[0].text async for o in run_request(context, cluster)]  # type: ignore[arg-type]
        return "".join(texts)

    answers = [asyncio.create_task(answered(name)) for name in ("good", "bad", "late")]
    for engine in engines[:2]:
        engine.inflight_requests = 3
        await until(lambda engine=engine: len(engine.legs) == 3)
        compat.mark_dead(engine)
    third, last = engines[2:]
    await until(lambda: bool(third.legs))
    await turns()
    assert [leg.external_req_id for leg in third.legs] == ["good"]
    third.compute(10)
    assert await answers[0] == "".join(WORDS[1:11])
    await until(lambda: len(third.legs) == 2)
    await turns()
    assert [leg.external_req_id for leg in third.legs] == ["good", "bad"]
    compat.mark_dead(third)
    with pytest.raises(EnginesDiedError, match="3 instances died"):
        await answers[1]
    await until(lambda: bool(last.legs))
    last.compute(10)
    assert await answers[2] == "".join(WORDS[1:11])


async def test_a_suspect_that_is_not_streamed_makes_room_with_its_first_token() -> None:
    first, second, last = (Engine(f"d{i}") for i in range(3))
    cluster = Engines(first, first, second, second, last, last)

    async def answered(name: str) -> str:
        whole = SamplingParams(
            temperature=0.0, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY
        )
        (output,) = [o async for o in run_request(job(whole, name=name), cluster)]  # type: ignore[arg-type]
        return output.outputs[0].text

    answers = [asyncio.create_task(answered(name)) for name in ("one", "other")]
    for engine in (first, second):
        await until(lambda engine=engine: len(engine.legs) == 2)
        compat.mark_dead(engine)
    await until(lambda: last.legs)
    await turns()
    (leg,) = last.legs
    last.compute(1)
    await turns()
    assert [one.external_req_id for one in last.legs] == ["one", "other"]
    last.compute(10)
    last.legs.append(leg)
    last.compute(9)
    assert await asyncio.gather(*answers) == ["".join(WORDS[1:11])] * 2


async def test_a_request_whose_time_is_over_before_its_turn_comes_is_told_so() -> None:
    engines = [Engine(f"d{i}") for i in range(3)]
    cluster = Engines(*engines)
    async with cluster.retry_turns:
        context = job(streamed())
        reader = Reader(context, cluster)
        for engine in engines[:2]:
            await reader.reaches(engine)
            if engine is engines[1]:
                context.deadline = asyncio.get_running_loop().time() + 0.01
            compat.mark_dead(engine)
        with pytest.raises(GracefulHTTPError, match="ran out of its time"):
            await reader.read()
    assert engines[2].legs == []


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_stream_that_comes_further_outlives_any_number_of_engines() -> None:
    engines = [Engine(f"d{i}") for i in range(6)]
    reader = Reader(job(streamed()), Engines(*engines))
    for engine in engines[:5]:
        await reader.reaches(engine)
        engine.compute(1)
        compat.mark_dead(engine)
    await reader.reaches(engines[5])
    engines[5].compute(5)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])


async def test_a_stream_leaves_an_instance_that_is_drained_with_all_that_it_has() -> None:
    """More often than instances may die under it: nobody dies."""
    engines = [Engine(f"d{i}") for i in range(9)]
    reader = Reader(job(streamed()), Engines(*engines))
    for engine in engines[:8]:
        await reader.reaches(engine)
        if engine is engines[2]:
            engine.compute(3)
        assert engine.move is not None
        engine.move()
        await reader.reaches(engines[engines.index(engine) + 1])
        assert engine.aborted == [engine.legs[0].request_id]
        assert not engine.output_processor.request_states
        engine.compute(1)  # what comes late is nobody's
    engines[8].compute(7)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])


async def test_an_adapter_is_not_in_use_where_its_stream_has_left() -> None:
    first, second = Engine("d0"), Engine("d1")
    first.adapters = second.adapters = {1}
    given = job(streamed())
    given.request.lora_request = LoRARequest("sql", 1, "/adapter")
    reader = Reader(given, Engines(first, second))
    await reader.reaches(first)
    in_use = first.output_processor.lora_states
    in_use.request_running(first.legs[0].request_id, "sql")
    assert first.move is not None
    first.move()
    await reader.reaches(second)
    assert not in_use.requests
    second.compute(10)
    while not reader.finished:
        await reader.read()


@pytest.mark.parametrize("num_before", [0, 3])
async def test_a_stream_that_comes_back_takes_nothing_of_the_leg_that_it_has_left(
    num_before: int,
) -> None:
    """The engine is in the middle of a step when it hears that the stream has left."""
    engine = Engine("d0")
    reader = Reader(job(streamed()), Engines(engine, engine, engine))
    await reader.reaches(engine)
    engine.compute(num_before)
    for _ in range(2):
        assert engine.move is not None
        engine.move()
        left = len(engine.legs)
        while len(engine.legs) == left:
            if reader._next.done():
                await reader.read()
            await asyncio.sleep(0)
        late = compat.EngineCoreOutput(engine.legs[left - 1].request_id, [19])
        engine.output_processor.process_outputs([late], 0.0, IterationStats())
    engine.compute(10 - num_before)
    while not reader.finished:
        await reader.read()
    assert reader.text == "".join(WORDS[1:11])
    assert not engine.output_processor.request_states


async def test_an_instance_that_is_not_there_is_passed_by() -> None:
    gone, there = Engine("d0"), Engine("d1")
    gone.llm = None
    reader = Reader(job(streamed()), Engines(gone, there))
    await reader.reaches(there)
    assert gone.legs == []


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_cached_tokens_are_those_of_the_prefill_leg(temperature: float) -> None:
    prefill, decode = Engine("p0"), Engine("d0")
    params = streamed() if temperature == 0 else SamplingParams(temperature=0.5, max_tokens=10)
    why = None if temperature == 0 else "sampling"
    reader = Reader(job(params, first_token_blocker=why), Engines(decode, prefill=prefill))
    await reader.reaches(prefill)
    prefill.compute(1, num_cached=7)
    await reader.reaches(decode)
    decode.compute(1, num_cached=9)
    await reader.read()
    assert reader.num_cached_tokens == 7


@pytest.mark.parametrize(("node", "began"), [("", (1.0, 2.0)), ("elsewhere", (0.0, 0.0))])
async def test_a_request_begins_where_its_prefill_leg_was_scheduled(
    node: str, began: tuple[float, float]
) -> None:
    prefill, decode = Engine("p0"), Engine("d0")
    prefill.place = InstancePlace(node)  # with a clock of its own
    reader = Reader(job(streamed()), Engines(decode, prefill=prefill))
    await reader.reaches(prefill)
    (leg,) = prefill.output_processor.request_states.values()
    assert leg.stats is not None
    leg.stats.queued_ts, leg.stats.scheduled_ts = 1.0, 2.0
    prefill.compute(1)
    await reader.read()
    assert (reader.stats.queued_ts, reader.stats.scheduled_ts) == began


@pytest.mark.parametrize("num_tokens", [1, 10])
async def test_the_label_of_the_weights_is_of_the_first_token_too(num_tokens: int) -> None:
    prefill, decode = Engine("p0"), Engine("d0")
    params = streamed()
    params.max_tokens = num_tokens
    reader = Reader(job(params), Engines(decode, prefill=prefill))
    await reader.reaches(prefill)
    prefill.compute(1)
    await reader.read()
    if num_tokens > 1:
        await reader.reaches(decode)
        decode.compute(num_tokens - 1)
        await reader.read()
    assert reader.weight_versions == [WeightVersionSpan("w", 0, num_tokens)]


@pytest.mark.parametrize(("looked_up", "noted"), [(0, 7), (5, 5)])
async def test_an_engine_says_what_it_found_of_a_prompt_that_was_not_looked_up(
    looked_up: int, noted: int
) -> None:
    engine, given = Engine("c0"), job(streamed())
    given.notes.cached_tokens = looked_up
    reader = Reader(given, Engines(engine))
    await reader.reaches(engine)
    engine.compute(1, num_cached=7)
    await reader.read()
    assert given.notes.cached_tokens == noted


@pytest.mark.parametrize(
    ("here", "there", "pushed_to"),
    [("", "", ""), ("a:1", "b:1", "b:1"), ("a:1", "a:1", "")],
)
async def test_a_prefill_leg_and_its_decode_leg_name_each_others_store(
    here: str, there: str, pushed_to: str
) -> None:
    prefill, decode = Engine("p0"), Engine("d0")
    prefill.place, decode.place = InstancePlace(store=here), InstancePlace(store=there)
    engines, holds = Engines(decode, prefill=prefill), Holds()
    engines.lookups.by_weights["w"] = cast("Any", holds)
    reader = Reader(job(streamed()), engines)
    await reader.reaches(prefill)
    left = handover_of(prefill)
    assert left == Handover(leaves_tail=True, push_to=pushed_to, hold=left.hold)
    assert left.hold
    # The router knows meanwhile that it will decode there.
    assert (len(prefill.coming), len(decode.coming)) == (0, 1)
    prefill.compute(1)
    await reader.reaches(decode)
    assert (len(prefill.coming), len(decode.coming)) == (0, 0)
    told = handover_of(decode)
    assert (told.hold, told.pushed_from) == (left.hold, here if pushed_to else "")
    decode.compute(9)
    while not reader.finished:
        await reader.read()
    await until(lambda: {HoldEnd(left.hold, 0, one) for one in (here, there)} <= {*holds.ended})


@pytest.mark.parametrize("is_marked", [True, False])
async def test_an_abort_ends_a_request_on_its_prefill_leg(is_marked: bool) -> None:
    """By its id, which marks it, or by the engine, which aborts all as it is paused."""
    prefill, decode = Engine("p0"), Engine("d0")
    given = job(streamed())
    reader = Reader(given, Engines(decode, prefill=prefill))
    await reader.reaches(prefill)
    given.aborted = is_marked
    prefill.output_processor.abort_requests(["r-p"], internal=False)
    await reader.read()
    assert (reader.finished, reader.finish_reason, decode.legs) == (True, "abort", [])
    assert not decode.output_processor.request_states


async def test_an_abort_by_id_ends_a_request_whose_decode_instance_has_left() -> None:
    prefill, left, other = Engine("p0"), Engine("d0"), Engine("d1")
    waits, may_go_on = asyncio.Event(), asyncio.Event()

    class Slow(Engines):
        """Engines of which no decode engine takes a request for a while, once one has left."""

        async def route(self, asked: RequestView, *_: object) -> RoutedLegs:
            if left.has_left_decode:
                waits.set()
                await may_go_on.wait()
            return await super().route(asked)

    given = job(streamed())
    reader = Reader(given, Slow(left, other, prefill=prefill))
    await reader.reaches(prefill)
    left.has_left_decode = True
    prefill.compute(1)
    await waits.wait()
    given.aborted = True
    may_go_on.set()
    await reader.read()
    assert (reader.finished, reader.finish_reason, other.legs) == (True, "abort", [])


def several(kind: RequestOutputKind, num: int = 3) -> list[RequestContext]:
    params = SamplingParams(n=num, temperature=1.0, seed=5, max_tokens=4, output_kind=kind)
    return list(sequences_of(job(params)))


class Replaced(Engines):
    """Engines with other weights than a request has begun with, from a moment on."""

    is_replaced = False

    async def route(self, asked: RequestView, *said: object) -> RoutedLegs:
        *_, weights, _ = said
        if self.is_replaced and weights:
            raise WeightsReplacedError
        return await super().route(asked)


@pytest.mark.parametrize("num", [1, 2])
async def test_a_request_starts_over_with_other_weights_where_it_is_one_sequence(num: int) -> None:
    """Another sequence of the same answer may have ended with the weights that are gone."""
    prefill, *decode = (Engine(f"e{i}") for i in range(4))
    engines = Replaced(*decode[:num], decode[2], prefill=prefill)
    stream = run_sequences(several(RequestOutputKind.FINAL_ONLY, num), engines)  # type: ignore[arg-type]

    async def read() -> list[RequestOutput]:
        return [output async for output in stream]

    reading = asyncio.create_task(read())
    await until(lambda: len(prefill.legs) == 1)
    prefill.compute(1)
    await until(lambda: all(one.legs for one in decode[:num]))
    engines.is_replaced = True
    decode[num - 1].move()
    if num > 1:
        with pytest.raises(WeightsReplacedError):
            await asyncio.wait_for(reading, 60)
        return
    await until(lambda: len(prefill.legs) == 2)
    prefill.compute(1)
    await until(lambda: bool(decode[2].legs))
    decode[2].compute(3)
    (output,) = await asyncio.wait_for(reading, 60)
    assert output.outputs[0].text == "".join(WORDS[1:5])


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_of_several_sequences_each_goes_on_by_itself(kind: RequestOutputKind) -> None:
    """The first one's engine dies; the others' prompt comes from the first one's prefill leg."""
    prefill, first, second, third, other = (Engine(f"e{i}") for i in range(5))
    engines = Engines(first, second, third, other, prefill=prefill)
    stream = run_sequences(several(kind), engines)  # type: ignore[arg-type]
    outputs: list[RequestOutput] = []

    async def read() -> None:
        outputs.extend([output async for output in stream])

    async def leg(engine: Engine) -> None:
        while not engine.legs:  # noqa: ASYNC110 - it is a list of vLLM's client
            await asyncio.sleep(0)

    reading = asyncio.create_task(read())
    await leg(prefill)
    assert [one.legs for one in (first, second, third)] == [[], [], []]
    prefill.compute(1)
    for engine in (first, second, third):
        await leg(engine)
    assert len(prefill.legs) == 1
    first.compute(1)
    second.compute(4)
    compat.mark_dead(first)
    await leg(other)
    third.compute(4)
    other.compute(2)
    await asyncio.wait_for(reading, 60)
    texts = ["", "", ""]
    for output in outputs:
        for one in output.outputs:
            texts[one.index] += one.text
    assert texts == ["".join(WORDS[1:5])] * 3
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
    seeds = {one.legs[0].sampling_params.seed for one in (prefill, second, third)}
    assert seeds == {5, 6, 7}
    assert not any(engine.output_processor.request_states for engine in (second, third, other))


class Holds:
    """The front door's part in a store; keeps the ends of holds that it has been told of."""

    def __init__(self) -> None:
        self.ended: list[HoldEnd] = []

    def end_holds(self, holds: list[HoldEnd]) -> None:
        self.ended += holds


def handover_of(engine: Engine) -> Handover:
    params = engine.legs[0].sampling_params
    assert params is not None
    return Handover.of((params.extra_args or {})["kv_transfer_params"])


@pytest.mark.parametrize("num", [1, 3])
async def test_a_prompt_is_held_for_the_decode_leg_of_each_sequence(num: int) -> None:
    prefill, decode, holds = Engine("p0"), [Engine(f"d{n}") for n in range(num)], Holds()
    engines = Engines(*decode, prefill=prefill)
    engines.lookups.by_weights["w"] = cast("Any", holds)
    stream = run_sequences(several(RequestOutputKind.FINAL_ONLY, num), engines)  # type: ignore[arg-type]

    async def read() -> list[RequestOutput]:
        return [output async for output in stream]

    reading = asyncio.create_task(read())
    await until(lambda: prefill.legs)
    left = handover_of(prefill)
    assert left.hold
    assert left.num_readers == num
    prefill.compute(1)
    await until(lambda: all(engine.legs for engine in decode))
    told = [handover_of(engine) for engine in decode]
    assert [(one.hold, one.reader) for one in told] == [(left.hold, n) for n in range(num)]
    for number, engine in enumerate(decode):
        engine.compute(4 if number else 3)  # the first one has prefill's token
    await asyncio.wait_for(reading, 60)
    await until(lambda: {HoldEnd(left.hold, n) for n in range(num)} <= {*holds.ended})


async def test_sequences_that_are_given_up_hold_nothing() -> None:
    prefill, decode, holds = Engine("p0"), [Engine(f"d{n}") for n in range(3)], Holds()
    engines = Engines(*decode, prefill=prefill)
    engines.lookups.by_weights["w"] = cast("Any", holds)
    stream = run_sequences(several(RequestOutputKind.DELTA), engines)  # type: ignore[arg-type]
    reading = asyncio.create_task(anext(stream))
    await until(lambda: prefill.legs)
    hold = handover_of(prefill).hold
    prefill.compute(1)
    await reading
    await stream.aclose()
    await until(lambda: HoldEnd(hold) in holds.ended)


async def test_several_sequences_have_a_deadline_whoever_reads_them() -> None:
    engine, more = Engine("d0"), Engine("d1")
    sequences = several(RequestOutputKind.DELTA, 2)
    for one in sequences:
        one.deadline = asyncio.get_running_loop().time() + 0.2
    stream = run_sequences(sequences, Engines(engine, more))  # type: ignore[arg-type]
    with pytest.raises(GracefulHTTPError, match="--request-timeout"):
        await anext(stream)
    assert engine.aborted
    assert more.aborted


@pytest.mark.parametrize(
    ("kind", "prefill", "wanted"),
    [
        (RequestOutputKind.DELTA, None, {("ttft", "one_leg"): 2.0, ("tpot", "one_leg"): 0.5}),
        (RequestOutputKind.DELTA, "p0", {("ttft", "two_legs"): 2.0, ("tpot", "two_legs"): 0.5}),
        (RequestOutputKind.FINAL_ONLY, None, {}),
    ],
)
async def test_predictions_are_held_against_what_a_stream_shows(
    monkeypatch: pytest.MonkeyPatch,
    kind: RequestOutputKind,
    prefill: str | None,
    wanted: dict[tuple[str, str], float],
) -> None:
    """Predicted 2 s and 0.1 s; the first output comes after 1 s, four more tokens in 0.8 s."""
    now_s, seen = [100.0], {}
    loop = SimpleNamespace(time=lambda: now_s[0])
    monkeypatch.setattr(
        "banaserve.serving.requests.disagg_request.asyncio.get_running_loop", lambda: loop
    )
    monkeypatch.setattr(
        "banaserve.serving.requests.disagg_request.metrics.PREDICTED",
        SimpleNamespace(
            labels=lambda *names: SimpleNamespace(
                observe=lambda ratio: seen.update({names: pytest.approx(ratio)})
            )
        ),
    )
    given = job(SamplingParams(max_tokens=10, output_kind=kind))
    given.prediction = Prediction(Route(prefill, InstanceId("d0"), "", 2.0, 0.1), now_s[0])
    for at_s, num_tokens, is_last in ((101.0, 1, False), (101.8, 5, True)):
        now_s[0] = at_s
        monkeypatch.setattr(RequestContext, "num_output_tokens", num_tokens)
        text = SimpleNamespace(text="", token_ids=[0], finish_reason=None)
        given.send(SimpleNamespace(outputs=[text], finished=is_last, num_cached_tokens=0))
    assert seen == wanted


async def test_decode_legs_whose_prompts_are_computed_together_begin_together() -> None:
    prefill, decode = Engine("p0"), Engine("d0")
    engines = Engines(decode, decode, prefill=prefill)
    first = Reader(job(streamed(), "first"), engines)
    await first.reaches(prefill)
    (leg,) = prefill.legs
    second = Reader(job(streamed(), "second"), engines)
    await until(lambda: len(prefill.legs) == 2)
    prefill.legs.append(leg)
    prefill.compute(1)
    await first.read()  # the first token waits for nobody
    for _ in range(20):
        await asyncio.sleep(0)
    assert (first.text, decode.legs) == (WORDS[1], [])
    prefill.legs.append(prefill.legs[1])
    prefill.compute(1)
    await second.reaches(decode)
    await until(lambda: len(decode.legs) == 2)
    assert {leg.external_req_id for leg in decode.legs} == {"first", "second"}


@pytest.mark.parametrize("how", ["dies", "is drained"])
async def test_a_decode_leg_that_waits_for_others_is_told_when_its_instance_goes(how: str) -> None:
    prefill, first, second = Engine("p0"), Engine("d0"), Engine("d1")
    engines = Engines(first, second, prefill=prefill)
    with engines.decode_batching.coming(first):
        reader = Reader(job(streamed()), engines)
        await reader.reaches(prefill)
        prefill.compute(1)
        await reader.read()
        await asyncio.sleep(0)
        if how == "dies":
            compat.mark_dead(first)
        else:
            first.move()
        await reader.reaches(second)
        second.compute(9)
        while not reader.finished:
            await reader.read()
    assert reader.text == "".join(WORDS[1:11])
    assert first.legs == []


@pytest.mark.parametrize("by", ["its stream", "all requests"])
async def test_a_request_that_ends_while_its_decode_leg_waits_has_none(by: str) -> None:
    prefill, decode = Engine("p0"), Engine("d0")
    engines = Engines(decode, prefill=prefill)
    with engines.decode_batching.coming(decode):
        work = job(streamed())
        reader = Reader(work, engines)
        await reader.reaches(prefill)
        prefill.compute(1)
        await reader.read()
        await asyncio.sleep(0)
        if by == "its stream":
            decode.output_processor.abort_requests([work.request.request_id], internal=True)
        else:
            work.aborted = True
    await reader.read()
    assert (reader.finished, reader.finish_reason, decode.legs) == (True, "abort", [])
