"""What the client of the engines makes of a request before it is sent anywhere."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

pytest.importorskip("vllm")

from fastapi import FastAPI
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.dev.rpc.api_router import attach_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator import health
from vllm.exceptions import GracefulHTTPError, MaxQueuedTokensError, QueueOverflowError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from banaserve.base.access.cache_salt import tenant
from banaserve.base.clock import WallClock
from banaserve.base.types import (
    InstanceId,
    InstanceView,
    RequestId,
    RequestLimits,
    RequestView,
    Role,
    Route,
)
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.front.server import ServerStub
from banaserve.engine.engine_args import parse_vllm_argv
from banaserve.frontdoor.app import vllm_app
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.serving.client import DisaggregatedClient
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.lasting_calls import LastingCalls
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.instances.service_state import ServiceState
from banaserve.serving.launch.launcher import InstancePlace
from banaserve.serving.requests.intake import Adapters, Blockers, Gate
from banaserve.serving.requests.request_context import RequestContext
from banaserve.serving.requests.router import Router
from banaserve.serving.tracing.request_log import HttpCall, RequestLog, RequestNotes
from waiting import turns

MAX_MODEL_LEN = 16


class InputProcessor:
    """Takes token ids as they are."""

    def process_inputs(
        self, request_id: str, prompt: Any, params: SamplingParams, **_: Any
    ) -> compat.EngineCoreRequest:
        return compat.EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=prompt.get("cache_salt"),
            data_parallel_rank=None,
        )

    def assign_request_id(self, request: compat.EngineCoreRequest) -> None:
        request.external_req_id = request.request_id


def client(serving: list[Any] | None = None, **model: Any) -> Any:
    made: Any = DisaggregatedClient.__new__(DisaggregatedClient)
    made.input_processor = InputProcessor()
    made.model_config = SimpleNamespace(
        max_model_len=MAX_MODEL_LEN, **{"logits_processors": None} | model
    )
    made._adapters = Adapters()
    made._clock = WallClock()

    async def taking() -> list[Any]:
        return list(made._cluster.serving())

    async def told(*_: str) -> None: ...

    made._cluster = SimpleNamespace(
        serving=lambda: serving or [],
        taking=taking,
        instances=dict(enumerate(serving or [])),
        has_failed=False,
    )
    limits = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    made.vllm_config = SimpleNamespace(scheduler_config=limits)
    made._lasting, made._calling, made._gate = LastingCalls(), asyncio.Lock(), Gate()
    made._sequences, made._end_moves = {}, told
    made._router = SimpleNamespace(
        residency=SimpleNamespace(forget=lambda: None), lookups=SimpleNamespace(told=told)
    )
    made._supported_tasks = ("generate",)
    made._has_store_peers = False
    made._request_timeout_s, made._lookup_above_tokens = 60.0, MAX_MODEL_LEN
    return made


def prompt(num_tokens: int, **more: str) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(range(num_tokens)), **more}


async def prepared(of: Any, num_tokens: int, **options: Any) -> RequestContext:
    params = SamplingParams(temperature=0.0, max_tokens=100, **options)
    given, options = prompt(num_tokens), {"prompt_text": ""}
    request, text, blockers = await of._processed(given, params, "r", options)
    notes = RequestNotes(WallClock(), "r", num_tokens, HttpCall(0.0, 0.0))
    return RequestContext(request, text, blockers, 0.0, notes)


async def test_the_output_ends_with_the_context() -> None:
    job = await prepared(client(), MAX_MODEL_LEN - 1)
    assert (job.params.max_tokens, job.blockers) == (1, Blockers())


async def test_an_abort_by_id_is_told_to_the_request_and_to_both_legs() -> None:
    told: list[list[str]] = []

    async def abort(ids: list[str]) -> None:
        told.append(ids)

    made = client([SimpleNamespace(llm=SimpleNamespace(abort=abort))])
    other, job = await prepared(made, 4), await prepared(made, 4)
    other.request.external_req_id = "s"
    made._sequences = {1: [other], 2: [job]}
    await made.abort(["r"])
    assert (other.aborted, job.aborted, told) == (False, True, [["r", "r-p"]])


@pytest.mark.parametrize(
    ("method", "arguments", "is_lost"),
    [
        ("reset_prefix_cache", {}, True),
        ("release_kv_cache_memory", {}, True),
        ("sleep", {"level": 1, "mode": "keep"}, True),
        ("pause_generation", {"mode": "abort"}, True),
        ("pause_generation", {"mode": "keep"}, False),
        ("pause_generation", {"mode": "abort", "clear_cache": False}, False),
    ],
)
async def test_the_router_forgets_what_the_engines_forget(
    method: str, arguments: dict[str, Any], is_lost: bool
) -> None:
    made, lost = client(), []
    made._router.residency.forget = lambda: lost.append(method)
    await getattr(made, method)(**arguments)
    assert bool(lost) == is_lost


@pytest.mark.parametrize(
    ("answers", "has_peers", "reset_connector", "success"),
    [
        ([True, True], False, True, True),
        ([True, False], False, True, False),
        ([], False, True, False),
        ([True], True, True, False),
        ([True], True, False, True),
    ],
)
async def test_a_reset_is_one_where_nothing_is_left(
    answers: list[bool], has_peers: bool, reset_connector: bool, success: bool
) -> None:
    async def said(answer: bool) -> bool:
        return answer

    llms = [SimpleNamespace(reset_prefix_cache=lambda *_, one=one: said(one)) for one in answers]
    made = client([SimpleNamespace(llm=llm) for llm in llms])
    made._has_store_peers = has_peers
    assert await made.reset_prefix_cache(reset_connector=reset_connector) == success


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_pause_tells_those_that_it_ends(mode: str) -> None:
    told: list[tuple[str, bool]] = []

    async def pause_generation(*, mode: str, clear_cache: bool) -> None:
        told.append((mode, clear_cache))

    made = client([SimpleNamespace(llm=SimpleNamespace(pause_generation=pause_generation))])
    context = await prepared(made, 4)
    made._sequences = {1: [context]}
    pausing = asyncio.create_task(made.pause_generation(mode=mode))
    if mode == "wait":  # until those under way have ended
        await turns(lambda: not made._gate._may_pass.is_set())
        assert told == []
        made._sequences.clear()
    elif mode == "abort":  # the store is cleared once they hold nothing there
        await turns(lambda: told)
        assert told == [("abort", False)]
        made._sequences.clear()
    await pausing
    assert context.aborted == (mode == "abort")
    assert told == [(mode, False), *([] if mode == "keep" else [(mode, True)])]
    assert await made.is_paused()


async def test_a_resumption_ends_a_pause_that_waits() -> None:
    made = client()
    made._sequences = {1: [await prepared(made, 4)]}
    pausing = asyncio.create_task(made.pause_generation(mode="wait"))
    await turns(lambda: not made._gate._may_pass.is_set())
    await made.resume_generation()
    with pytest.raises(ValueError, match="resumed"):
        await pausing
    await made._gate.passed()
    assert not await made.is_paused()


@pytest.mark.parametrize(
    ("llms", "words"),
    [(["serves", None], "d1 does not serve"), (["serves", "dies"], "ended meanwhile")],
)
async def test_a_call_that_not_all_engines_take_is_refused(llms: list[Any], words: str) -> None:
    called: list[str] = []

    def engine(how: str) -> Any:
        async def start_profile() -> None:
            called.append(how)
            if how == "dies":
                raise compat.EngineDeadError

        return SimpleNamespace(start_profile=start_profile)

    instances = [
        SimpleNamespace(id=f"d{number}", llm=how and engine(how)) for number, how in enumerate(llms)
    ]
    made = client([one for one in instances if one.llm])
    made._cluster.instances = dict(enumerate(instances))
    with pytest.raises(GracefulHTTPError, match=words):
        await made.start_profile()
    assert called == (llms if None not in llms else [])


async def test_an_engine_that_starts_is_given_what_lasts_and_what_came_meanwhile() -> None:
    made, told = client(), []

    class Starting:
        async def pause_generation(self, **_: Any) -> None:
            told.append(("pause",))

        async def sleep(self, *args: Any) -> None:
            told.append(("sleep", *args))

        async def wake_up(self, *args: Any) -> None:
            told.append(("wake_up", *args))

    llm, lasting = Starting(), made._lasting
    await made.sleep(1, "keep")
    taken = await lasting.give(llm, {})
    assert (told, taken) == ([("pause",), ("sleep", 1, "keep")], lasting.calls)
    assert await made.wake_up()
    assert await lasting.give(llm, taken) == lasting.calls == {}
    assert told[2:] == [("wake_up",)]


async def test_moves_end_before_engines_are_paused_and_none_begins_meanwhile() -> None:
    told: list[str] = []

    async def pause_generation(**_: Any) -> None:
        told.append("pause")

    made = client([SimpleNamespace(llm=SimpleNamespace(pause_generation=pause_generation))])

    async def end_moves(_: str) -> None:
        assert made._lasting.calls
        told.append("moves end")

    made._end_moves = end_moves
    await made.pause_generation(mode="keep")
    assert told == ["moves end", "pause"]


async def test_a_sleep_that_an_engine_refuses_leaves_all_paused() -> None:
    class Engine:
        async def pause_generation(self, **_: Any) -> None: ...

        async def sleep(self, *_: Any) -> None:
            raise RuntimeError("no memory for the weights")

    made = client([SimpleNamespace(llm=Engine())])
    with pytest.raises(RuntimeError):
        await made.sleep(1)
    assert [*made._lasting.calls] == ["pause_generation"]


async def test_requests_under_way_do_not_outlast_their_kv() -> None:
    made = client()
    made._sequences = {1: [await prepared(made, 4)]}
    for call in (made.sleep(1, "keep"), made.release_kv_cache_memory()):
        with pytest.raises(ValueError, match="another mode"):
            await call
    assert not made._lasting.calls


async def test_requests_that_come_while_a_sleep_pauses_engines_come_after_it() -> None:
    told: list[str] = []

    class Engine:
        output_processor = SimpleNamespace(external_req_ids={})

        async def pause_generation(self, **_: Any) -> None:
            self.coming = asyncio.create_task(passes())
            await asyncio.sleep(0)
            told.append("paused")

        async def sleep(self, *_: Any) -> None:
            told.append("asleep")

    made = client([SimpleNamespace(llm=(llm := Engine()))])

    async def passes() -> None:
        await made._gate.passed()
        told.append("comes")

    await made.sleep(1, "keep")
    await llm.coming
    assert told == ["paused", "asleep", "comes"]


async def test_requests_that_come_before_the_turn_of_a_release_of_kv_keep_theirs() -> None:
    made = client()
    async with made._calling:
        releasing = asyncio.create_task(made.release_kv_cache_memory())
        await asyncio.sleep(0)
        made._sequences = {1: [await prepared(made, 4)]}
    with pytest.raises(ValueError, match="another mode"):
        await releasing
    assert not made._lasting.calls


@pytest.mark.parametrize(
    ("most_requests", "most_tokens", "n", "error"),
    [
        (None, None, 1, None),
        (3, 10, 1, None),
        (3, 10, 2, QueueOverflowError),
        (2, None, 1, QueueOverflowError),
        (None, 9, 1, MaxQueuedTokensError),
    ],
)
async def test_limits_of_waiting_requests_are_of_all_instances(
    most_requests: int | None, most_tokens: int | None, n: int, error: type[Exception] | None
) -> None:
    made = client()
    limits = made.vllm_config.scheduler_config
    limits.max_num_queued_reqs, limits.max_num_queued_tokens = most_requests, most_tokens
    made._sequences = {1: [await prepared(made, 4)], 2: [await prepared(made, 5)]}
    with nullcontext() if error is None else pytest.raises(error):
        made.check_admission(n)


async def test_a_logits_processor_of_the_users_sees_the_whole_output() -> None:
    job = await prepared(client(logits_processors=["some.Processor"]), 4)
    assert job.blockers == Blockers(None, "logits_processors")


async def test_what_vllms_client_offers_is_done_or_refused_in_plain_words() -> None:
    inherited = {
        name
        for name, method in vars(EngineClient).items()
        if inspect.iscoroutinefunction(method)
        and getattr(DisaggregatedClient, name) is getattr(EngineClient, name)
    }
    assert inherited == set()
    with pytest.raises(NotImplementedError, match="restart it"):
        await client().update_weights(None)


@pytest.mark.parametrize(("is_healthy", "status"), [(True, 200), (False, 503)])
async def test_health_says_no_when_nothing_serves(is_healthy: bool, status: int) -> None:
    app, made = FastAPI(), client()
    made._cluster.is_healthy = is_healthy
    app.include_router(health.router)
    app.state.engine_client = made
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as door:
        assert (await door.get("/health")).status_code == status


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", "load_model", "sleep"])
async def test_weights_change_by_no_call_of_the_workers(method: str) -> None:
    called: list[str] = []

    async def collective_rpc(name: str, *_: Any) -> list[Any]:
        called.append(name)
        return [None]

    app = FastAPI()
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)
    attach_router(app)
    made = client([SimpleNamespace(llm=SimpleNamespace(collective_rpc=collective_rpc))])
    app.state.engine_client = made
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as door:
        refused = await door.post("/collective_rpc", json={"method": method})
        taken = await door.post("/collective_rpc", json={"method": "check_health"})
    assert (refused.status_code, taken.status_code, called) == (501, 200, ["check_health"])
    assert "restart it" in refused.json()["error"]["message"]
    with pytest.raises(NotImplementedError, match="level 1"):
        await made.sleep(2)


async def test_pooling_where_nobody_serves_is_refused_in_plain_words() -> None:
    with pytest.raises(GracefulHTTPError, match="no instance serves"):
        await anext(client().encode(prompt(3), PoolingParams(), "r"))


@pytest.mark.parametrize(
    ("name", "given", "salt"),
    [(None, "s", "s"), ("t", "s", "t:s"), ("t", "", "t:"), ("t", "t:s", "t:s")],
)
async def test_tenants_share_no_cache_of_pooling_models(
    name: str | None, given: str, salt: str
) -> None:
    seen: list[Any] = []

    async def encode(prompt: Any, *_: Any) -> Any:
        seen.append(prompt)
        yield "output"

    instance = SimpleNamespace(
        llm=SimpleNamespace(encode=encode),
        inflight_requests=0,
        holding=lambda _: _Nothing(),
    )
    token = tenant.set(name)
    try:
        asked = prompt(3, cache_salt=given)
        outputs = [o async for o in client([instance]).encode(asked, PoolingParams(), "r")]
    finally:
        tenant.reset(token)
    assert (outputs, seen[0]["cache_salt"]) == (["output"], salt)


async def test_a_pooling_request_outlives_its_instance_and_not_its_deadline() -> None:
    async def die(*_: Any) -> Any:
        raise compat.EngineDeadError
        yield

    async def hang(*_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    def instance(encode: Any, requests: int, is_orphaned: bool = False) -> Any:
        return SimpleNamespace(
            llm=SimpleNamespace(encode=encode),
            inflight_requests=requests,
            holding=lambda _: _Nothing(),
            is_orphaned=is_orphaned,
        )

    with_parent = [instance(die, 0, is_orphaned=True) for _ in range(4)]
    serving = [*with_parent, instance(die, 0), instance(hang, 1)]
    made = client(serving)
    made._request_timeout_s = 0.2
    made._cluster.serving = lambda: [serving.pop(0)]
    with pytest.raises(GracefulHTTPError, match="--request-timeout"):
        await anext(made.encode(prompt(3), PoolingParams(), "r"))
    assert serving == []


async def test_a_pooling_request_outlives_an_instance_that_ends_as_it_loads_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def encode(*_: Any) -> Any:
        yield "output"

    async def load(instance: Any, _: object) -> None:
        instance.llm = instance.llm if instance is serves else None

    dies, serves = _dying(), _dying()
    serves.llm.encode = encode
    left, made = [dies, serves], client()
    made._cluster.serving = lambda: [left.pop(0)]
    monkeypatch.setattr("banaserve.serving.client.load_adapter", load)
    assert [o async for o in made.encode(prompt(3), PoolingParams(), "r")] == ["output"]


async def test_a_request_that_fails_did_not_end_as_one_of_its_sequences_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(sequences: list[RequestContext], _: object) -> AsyncGenerator[Any, None]:
        ended = SimpleNamespace(finish_reason="stop")
        output: Any = SimpleNamespace(outputs=[ended], finished=True, num_cached_tokens=0)
        sequences[0].send(output)
        output.finished = False  # as `run_sequences` says while another one goes on
        yield output
        raise GracefulHTTPError("no instance serves", HTTPStatus.SERVICE_UNAVAILABLE)

    monkeypatch.setattr("banaserve.serving.client.run_sequences", run)
    made, lengths = client(), list[int]()
    made.requests, made.tracer = RequestLog(WallClock()), None
    made._router.output_lengths = SimpleNamespace(ended=lengths.append)
    stream = made.generate(prompt(3), SamplingParams(n=2), "r", prompt_text="")
    await anext(stream)
    with pytest.raises(GracefulHTTPError):
        await anext(stream)
    (seen,) = made.requests.last()
    assert (seen.end, lengths) == ("error", [])


async def test_an_error_of_an_engine_is_answered_in_the_api_s_form() -> None:
    app = FastAPI()
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.engine_client = SimpleNamespace(errored=True, is_running=False)
    app.state.server = ServerStub()

    @app.post("/v1/x")
    async def fail() -> None:
        raise compat.EngineDeadError

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as door:
        answer = await door.post("/v1/x")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"]


async def test_a_client_is_told_not_to_send_again_what_engines_died_of() -> None:
    app = vllm_app(parse_vllm_argv([]), ("generate",), None)
    app.state.args = SimpleNamespace(log_error_stack=False)
    made = client([_dying(), _dying()])

    @app.post("/v1/x")
    async def pool() -> None:
        await anext(made.encode(prompt(3), PoolingParams(), "r"))

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as door:
        answer = await door.post("/v1/x")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert answer.json()["error"]["code"] == "engines_died"
    assert "3 instances died" in answer.json()["error"]["message"]


def _dying() -> Any:
    async def die(*_: Any) -> Any:
        raise compat.EngineDeadError
        yield

    return SimpleNamespace(
        llm=SimpleNamespace(encode=die),
        inflight_requests=0,
        holding=lambda _: _Nothing(),
        is_orphaned=False,
    )


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Splitting:
    """Splits every request, and keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[RequestView] = []

    def route(self, request: RequestView, _: object) -> Route:
        self.shown.append(request)
        return Route(InstanceId("p0"), InstanceId("d0"), "two_legs")


@pytest.mark.parametrize("blocker", [None, "prompt_logprobs"])
async def test_a_request_that_cannot_be_split_is_not_whatever_the_policy_says(
    blocker: str | None,
) -> None:
    policy = _Splitting()
    instances: Any = [_viewed("p0"), _viewed("d0")]
    router = router_of(instances, NamedPolicy(policy, "splitting"))
    asked = RequestView(RequestId("r"), 3, 2, 7, RequestLimits(ttft_s=0.5), blocker is None)
    legs = await router.route(asked, blocker, RequestNotes(WallClock(), "r", 3, HttpCall(0.0, 0.0)))
    assert (legs.prefill, legs.decode) == (None if blocker else instances[0], instances[1])
    assert policy.shown == [asked]


def router_of(instances: list[Any], policy: NamedPolicy) -> Router:
    cluster = Cluster(instances, WallClock(), ClusterTimeouts())
    return Router(cluster, policy, WallClock())


def _viewed(name: str) -> SimpleNamespace:
    view = InstanceView(InstanceId(name), Role.COLOCATED, True, None, 0, 0, 1.0)
    return SimpleNamespace(
        id=view.id,
        view=lambda _: view,
        weights="w",
        service=ServiceState(view.id),
        place=InstancePlace(),
    )


class _Broken:
    def route(self, *_: object) -> Any:
        raise ValueError("boom")


async def test_a_routing_policy_that_fails_is_answered_500_under_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = NamedPolicy(_Broken(), "broken", "acme-routing 1.0")
    router = router_of([], policy)
    app = vllm_app(parse_vllm_argv([]), ("generate",), None)
    app.state.args = SimpleNamespace(log_error_stack=False)

    @app.post("/v1/x")
    async def ask() -> None:
        asked = RequestView(RequestId("r"), 2)
        await router.route(asked, None, RequestNotes(WallClock(), "r", 2, HttpCall(0.0, 0.0)))

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as door:
        answers = [await door.post("/v1/x") for _ in range(2)]
    line = "routing policy broken of acme-routing 1.0: ValueError: boom"
    assert [(one.status_code, one.json()["error"]["message"]) for one in answers] == [
        (500, line),
        (500, line),
    ]
    told = [one for one in caplog.records if one.name == "banaserve.serving.requests.router"]
    assert [(one.getMessage(), bool(one.exc_info)) for one in told] == [(line, True), (line, False)]


async def test_a_session_whose_instance_dies_ends_in_one_error_and_is_counted() -> None:
    async def generate(*_: Any, **__: Any) -> AsyncGenerator[str, None]:
        yield "a piece"
        raise compat.EngineDeadError

    async def pieces() -> AsyncGenerator[None, None]:
        yield None

    held = SimpleNamespace(
        id="d0", llm=SimpleNamespace(generate=generate), holding=lambda _: nullcontext()
    )

    def num_broken() -> float:
        return REGISTRY.get_sample_value("banaserve_streams_broken_total") or 0.0

    before = num_broken()
    stream = client([held]).generate(pieces(), SamplingParams(), "r")
    assert await anext(stream) == "a piece"
    with pytest.raises(compat.EngineGenerateError, match="d0 died in mid-session"):
        await anext(stream)
    assert num_broken() == before + 1


async def test_what_a_leg_says_is_refused_from_a_client_on_every_way_in() -> None:
    handover = {"kv_transfer_params": {"banaserve_handover": 100}}

    async def pieces() -> AsyncGenerator[Any, None]:
        yield prompt(4)

    for given in (prompt(4), pieces()):
        params = SamplingParams(extra_args=handover)
        with pytest.raises(ValueError, match="banaserve_handover is no argument"):
            await anext(client().generate(given, params, "r"))
