"""Tenants of the front door: their limits, and what a balancer says of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

import torch
from prometheus_client.registry import REGISTRY
from starlette.types import Receive, Scope, Send
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from banaserve.base.access.cache_salt import tenant
from banaserve.base.access.tenants import (
    TENANT_FIELD,
    TenantKey,
    TenantTerms,
    is_tenant_name,
    read_tenants,
    tenant_name,
    tenant_terms,
)
from banaserve.base.clock import WallClock
from banaserve.base.errors import UserError
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.frontdoor.middleware.api_keys import KeyMiddleware
from banaserve.serving import client as clients
from banaserve.serving.tracing.request_log import RequestLog
from test_engine_client import client as engine_client
from test_engine_client import prompt
from waiting import until

NAME = tenant_name("replica-key", "client-key")


class Application:
    """Notes who asks; answers when told to."""

    def __init__(self) -> None:
        self.tenants: list[str | None] = []
        self.fields: list[list[tuple[bytes, bytes]]] = []
        self.terms: TenantTerms | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.tenants.append(tenant.get())
        self.fields.append(scope["headers"])
        self.terms = tenant_terms.get()
        await self.answers.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def door(*keys: TenantKey) -> tuple[Application, httpx.AsyncClient]:
    app = Application()
    transport = httpx.ASGITransport(app=KeyMiddleware(app, keys))
    return app, httpx.AsyncClient(transport=transport, base_url="http://door")


def shown(key: str, **fields: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **fields}


async def test_only_a_balancers_word_is_taken_for_who_asks() -> None:
    app, client = door(TenantKey(key="theirs"), TenantKey(key="ours", is_balancer=True))
    async with client:
        for key in ("ours", "theirs"):
            for named in (NAME, tenant_name("replica-key", "another")):
                headers = shown(key, **{TENANT_FIELD: named})
                assert (await client.post("/v1/x", headers=headers)).status_code == 200
        assert (await client.post("/v1/x", headers=shown("ours"))).status_code == 200
    from_balancer, other, direct, same, own = app.tenants
    assert (from_balancer, direct) == (NAME, same)
    assert len({from_balancer, other, direct, own}) == 4
    assert None not in app.tenants
    names = [name.lower() for fields in app.fields for name, _ in fields]
    assert TENANT_FIELD.lower().encode() not in names


async def test_a_single_balancers_tenants_are_kept_apart_too() -> None:
    app, client = door(TenantKey(key="ours", is_balancer=True))
    async with client:
        await client.post("/v1/x", headers=shown("ours", **{TENANT_FIELD: NAME}))
    assert app.tenants == [NAME]


@pytest.mark.parametrize("named", ["x", "A" * 32, "a" * 33, "../" * 8, f"{NAME}:salt"])
async def test_a_name_that_no_balancer_makes_is_refused(named: str) -> None:
    app, client = door(TenantKey(key="ours", is_balancer=True))
    async with client:
        answer = await client.post("/v1/x", headers=shown("ours", **{TENANT_FIELD: named}))
    assert (answer.status_code, app.tenants) == (400, [])


def test_the_name_of_a_tenant_needs_the_secret() -> None:
    assert is_tenant_name(NAME)
    assert tenant_name("replica-key", "client-key") == NAME
    assert tenant_name("another", "client-key") != NAME != tenant_name("replica-key", "other")
    assert "client" not in NAME


def refusals(cause: str) -> float:
    samples = [one for metric in REGISTRY.collect() for one in metric.samples]
    name = "banaserve_refused_total"
    return sum(s.value for s in samples if s.name == name and s.labels["cause"] == cause)


async def test_requests_at_once_of_one_key_leave_others_alone() -> None:
    app, client = door(TenantKey(key="a", max_requests=1), TenantKey(key="b"))
    app.answers.clear()
    before = refusals("max_requests")
    async with client:
        first = asyncio.create_task(client.post("/v1/x", headers=shown("a")))
        await until(lambda: len(app.tenants) == 1)
        refused = await client.post("/v1/x", headers=shown("a"))
        other = asyncio.create_task(client.post("/v1/x", headers=shown("b")))
        await until(lambda: len(app.tenants) == 2)
        app.answers.set()
        assert [(await one).status_code for one in (first, other)] == [200, 200]
        again = await client.post("/v1/x", headers=shown("a"))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["message"].startswith("this API key may have 1 requests at once")
    assert again.status_code == 200
    assert refusals("max_requests") == before + 1


async def test_tokens_that_were_used_are_waited_for() -> None:
    app, client = door(TenantKey(key="a", tokens_per_minute=60))
    async with client:
        assert (await client.post("/v1/x", headers=shown("a"))).status_code == 200
        assert app.terms is not None
        app.terms.use_tokens(6_000)
        refused = await client.post("/v1/x", headers=shown("a"))
        assert (await client.get("/health")).status_code == 200
    assert refused.status_code == 429
    # What was told of less than a minute ago is most of it.
    assert int(refused.headers["retry-after"]) > 1_000


@pytest.mark.parametrize("embeddings", [None, torch.zeros(3, 4)])
async def test_tokens_are_counted_and_the_keys_priority_wins(
    embeddings: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    options: dict[str, Any] = {}
    made: Any = engine_client()
    made.requests, made._sequences = RequestLog(WallClock()), {}

    take = made.input_processor.process_inputs

    def process_inputs(*given: Any, **said: Any) -> Any:
        options.update(said)
        request = take(*given)
        if embeddings is not None:
            request.prompt_token_ids, request.prompt_embeds = None, embeddings
        return request

    part = SimpleNamespace(finished=False)

    async def outputs(*_: Any) -> AsyncIterator[Any]:
        yield part

    made.input_processor.process_inputs = process_inputs
    sequences = [SimpleNamespace(num_output_tokens=5), SimpleNamespace(num_output_tokens=6)]
    monkeypatch.setattr(clients, "sequences_of", lambda _: sequences)
    monkeypatch.setattr(clients, "run_sequences", outputs)
    before = tenant_terms.set(TenantTerms(used.append, priority=7))
    try:
        told = {"priority": -100, "prompt_text": ""}
        stream = made.generate(prompt(3), SamplingParams(n=2), "r", **told)
        assert [output async for output in stream] == [part]
    finally:
        tenant_terms.reset(before)
    assert (used, options["priority"]) == ([3, 11], 7)


class Outputs(list[RequestOutput]):
    """What an instance answers to a session; the kind of ``params`` says how."""

    def put(self, prompt_token_ids: list[int], token_ids: list[int]) -> None:
        answer = CompletionOutput(0, "", token_ids, None, None)
        self.append(RequestOutput("r", None, prompt_token_ids, None, [answer], False))


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_tokens_of_a_session_are_counted_while_it_goes_on(kind: RequestOutputKind) -> None:
    is_delta, outputs = kind is RequestOutputKind.DELTA, Outputs()
    outputs.put([1, 2, 3], [7])
    outputs.put([1, 2, 3], [8, 9] if is_delta else [7, 8, 9])
    outputs.put([1, 2, 3], [] if is_delta else [7, 8, 9])
    outputs.put([1, 2, 3, 4, 5], [6] if is_delta else [7, 8, 9, 6])

    async def generate(*_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        for output in outputs:
            yield output

    async def pieces() -> AsyncIterator[Any]:
        yield prompt(3)

    instance = SimpleNamespace(
        id="p0", llm=SimpleNamespace(generate=generate), holding=lambda _: nullcontext()
    )
    used: list[int] = []
    before = tenant_terms.set(TenantTerms(used.append))
    try:
        stream = engine_client([instance]).generate(pieces(), SamplingParams(output_kind=kind), "r")
        seen = [list(used) async for _ in stream]
    finally:
        tenant_terms.reset(before)
    assert seen == [[4], [4, 2], [4, 2], [4, 2, 3]]


async def test_a_session_ends_where_its_key_has_used_its_tokens() -> None:
    app, client = door(TenantKey(key="a", tokens_per_minute=6), TenantKey(key="b"))
    async with client:
        assert (await client.post("/v1/x", headers=shown("a"))).status_code == 200
    outputs, begun = Outputs(), []
    for tokens in ([7], [8], [9, 9, 9], [10]):
        outputs.put([1, 2, 3], tokens)

    async def generate(*_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        begun.append(1)
        for output in outputs:
            yield output

    async def pieces() -> AsyncIterator[Any]:
        yield prompt(3)

    refused = pytest.raises(GracefulHTTPError, match="may have 6 tokens per minute")

    async def received() -> int:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        stream = engine_client([instance]).generate(pieces(), params, "r")
        found = iter(range(9))
        with refused as refusal:
            [next(found) async for _ in stream]
        assert refusal.value.http_status == 429
        return next(found)

    instance = SimpleNamespace(
        id="p0", llm=SimpleNamespace(generate=generate), holding=lambda _: nullcontext()
    )
    causes, before = refusals("tokens_per_minute"), tenant_terms.set(app.terms)
    try:
        # The third output goes beyond six tokens a minute; another session does not begin.
        assert (await received(), await received()) == (3, 0)
    finally:
        tenant_terms.reset(before)
    assert (begun, refusals("tokens_per_minute")) == ([1], causes + 2)


async def test_sessions_of_two_keys_share_no_block() -> None:
    salts: list[str | None] = []

    async def generate(pieces: Any, *_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        async for piece in pieces:
            salts.append(piece.prompt.get("cache_salt"))
        for output in ():
            yield output

    async def pieces() -> AsyncIterator[Any]:
        yield StreamingInput(prompt(3))  # type: ignore[arg-type]
        yield StreamingInput(prompt(3, cache_salt="own"))  # type: ignore[arg-type]

    instance = SimpleNamespace(
        id="p0", llm=SimpleNamespace(generate=generate), holding=lambda _: nullcontext()
    )
    for name in ("a", "b", None):
        before = tenant.set(name)
        try:
            stream = engine_client([instance]).generate(pieces(), SamplingParams(), "r")
            assert [output async for output in stream] == []
        finally:
            tenant.reset(before)
    assert salts == ["a:", "a:own", "b:", "b:own", None, "own"]


FILE = """
[[tenants]]
key = "a"
max_requests = 4
priority = 3
[[tenants]]
key = "b"
is_balancer = true
"""


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    assert read_tenants(path) == (
        TenantKey(key="a", max_requests=4, priority=3),
        TenantKey(key="b", is_balancer=True),
    )
    words = ["--tenants", str(path), "--api-key", "c", "--scheduling-policy", "priority"]
    config = parse_serve_argv(words)
    assert [one.key for one in config.keys] == ["c", "a", "b"]
    assert config.tenant_quota == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "required field `tenants`"),
        ("[[tenants]]\nkey = 3", "Expected `str`, got `int`"),
        ("[[tenants]]\nkey = 'a'\nmax = 3", "unknown field `max`"),
        ("[[tenants]]\nkey = 'a'\nmax_requests = -3", "tenant 1: max_requests is -3"),
        ("[[tenants", "tenants.toml: "),
        ("[[tenants]]\nkey = 'a'\n[[tenants]]\nkey = 'a'", "is there twice"),
        ("[[tenants]]\nkey = ''", "is empty"),
        ("[[tenants]]\nkey = 'a'\npriority = 1", "add --scheduling-policy priority"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        parse_serve_argv(["--tenants", str(path)])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_tenants(tmp_path / "tenants.toml")


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ([], 1.0),
        (["--api-key", "a"], 1.0),
        (["--api-key", "a", "--api-key", "b"], 0.5),
        (["--api-key", "a", "--api-key", "b", "--kv-store-tenant-quota", "1"], 1.0),
    ],
)
def test_several_tenants_share_the_store(options: list[str], share: float) -> None:
    assert parse_serve_argv(options).tenant_quota == share
