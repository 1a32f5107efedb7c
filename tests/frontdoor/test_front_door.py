"""Keys and limits, on a bare ASGI application; and the command line of ``serve``."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import httpx
import pytest

pytest.importorskip("vllm")

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.base.access.cache_salt import tenant
from banaserve.base.access.tenants import TenantKey
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.platform import run_dir
from banaserve.base.platform.run_dir import open_run_dir
from banaserve.base.types import RequestLimits, Role
from banaserve.cli.serve import machine
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.cli.serve.engine_options import PARALLEL, gives
from banaserve.cli.serve.launch import check_tls
from banaserve.engine import engine_args
from banaserve.engine.compat.engine_errors import last_error_in
from banaserve.engine.compat.front import server
from banaserve.engine.engine_args import refuse_taken
from banaserve.frontdoor.app import ApiServer, make_app
from banaserve.frontdoor.edge.edge import Edge, RootPath
from banaserve.frontdoor.edge.http_protocol import HttpProtocol
from banaserve.frontdoor.edge.limits import EdgeLimits
from banaserve.frontdoor.middleware.admission import BodyLimit, ConcurrencyLimit
from banaserve.frontdoor.middleware.api_keys import KeyMiddleware
from banaserve.frontdoor.middleware.request_context import (
    KEEP_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    RequestHeaderReader,
)
from banaserve.serving.client import request_keep_s, request_limits
from waiting import until


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's length and the tenant."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = json.dumps({"bytes": num_bytes, "tenant": tenant.get()}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def keys(*given: str) -> list[TenantKey]:
    return [TenantKey(key=key) for key in given]


def client(app: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://door")


async def test_a_wrong_key_is_refused_and_the_probes_are_open() -> None:
    async with client(KeyMiddleware(echo, keys("k1"))) as door:
        assert (await door.post("/v1/x")).status_code == 401
        assert (await door.post("/tokenize")).status_code == 401
        wrong = {"Authorization": "Bearer k2"}
        assert (await door.post("/v1/x", headers=wrong)).status_code == 401
        assert (await door.post("/v1/x", headers={"Authorization": "k1"})).status_code == 401
        right = await door.post("/v1/x", headers={"Authorization": "Bearer k1"})
        assert (right.status_code, right.json()["tenant"]) == (200, None)
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await door.get(path)).status_code == 200
            assert (await door.post(path, json={})).status_code == 401


@pytest.mark.parametrize("field", [None, "", "Bearer", "Bearer ", "Basic k1"])
async def test_an_empty_key_opens_nothing(field: str | None) -> None:
    headers = {} if field is None else {"Authorization": field}
    async with client(KeyMiddleware(echo, keys("", "k1"))) as door:
        assert (await door.post("/v1/x", headers=headers)).status_code == 401


@pytest.mark.parametrize("known", [[], ["k1"]])
async def test_a_key_for_metrics_closes_them_but_for_clients(known: list[str]) -> None:
    async with client(KeyMiddleware(echo, keys(*known), "m1")) as door:
        for path in ("/metrics", "/metrics/", "/metrics/any"):
            assert (await door.get(path)).status_code == 401
            for wrong in ("m2", "", "m1 "):
                headers = {"Authorization": f"Bearer {wrong}"}
                assert (await door.get(path, headers=headers)).status_code == 401
            assert (await door.get(path, headers={"Authorization": "m1"})).status_code == 401
            for right in ("m1", *known):
                headers = {"Authorization": f"Bearer {right}"}
                assert (await door.get(path, headers=headers)).status_code == 200
        assert (await door.get("/health")).status_code == 200
        asked = await door.post("/v1/x", headers={"Authorization": "Bearer m1"})
        assert asked.status_code == (401 if known else 200)


@pytest.mark.parametrize(("root_path", "path"), [("/api", "/api/metrics"), ("/m", "/metrics")])
async def test_no_root_path_opens_metrics(root_path: str, path: str) -> None:
    async with client(RootPath(KeyMiddleware(echo, [], "m1"), root_path)) as door:
        assert (await door.get(path)).status_code == 401


async def test_each_of_several_keys_is_a_tenant() -> None:
    async with client(KeyMiddleware(echo, keys("k1", "k2"))) as door:
        tenants = [
            (await door.post("/v1/x", headers={"Authorization": f"Bearer {key}"})).json()["tenant"]
            for key in ("k1", "k2", "k1")
        ]
    assert tenants[0] == tenants[2] != tenants[1]
    assert None not in tenants


@pytest.mark.parametrize("name", [TTFT_HEADER, TPOT_HEADER])
@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "", "1,5"])
async def test_a_limit_that_is_no_number_of_seconds_is_refused(name: str, text: str) -> None:
    async with client(RequestHeaderReader(echo)) as door:
        answer = await door.post("/v1/completions", headers={name: text})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{name} is {text!r}: give seconds, 0 or more"


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, RequestLimits()),
        ({TTFT_HEADER: "0.5"}, RequestLimits(ttft_s=0.5)),
        ({"x-banaserve-slo-tpot": " 2e-2 "}, RequestLimits(tpot_s=0.02)),
        ({TTFT_HEADER: "0", TPOT_HEADER: "1"}, RequestLimits(0.0, 1.0)),
    ],
)
async def test_a_request_names_limits_of_its_own(
    headers: dict[str, str], wanted: RequestLimits
) -> None:
    seen = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(request_limits.get())
        await echo(scope, receive, send)

    async with client(RequestHeaderReader(application)) as door:
        assert (await door.post("/v1/x", headers=headers)).status_code == 200
        assert (await door.post("/v1/x")).status_code == 200
    assert seen == [wanted, RequestLimits()]


async def test_limits_of_its_own_are_stretched_as_the_engines_time_is() -> None:
    seen = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(request_limits.get())
        await echo(scope, receive, send)

    async with client(RequestHeaderReader(application, dilation=4.0)) as door:
        await door.post("/v1/x", headers={TTFT_HEADER: "0.5"})
    assert seen == [RequestLimits(ttft_s=2.0)]


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "", "3600.1"])
async def test_a_time_to_keep_kv_that_is_none_is_refused(text: str) -> None:
    async with client(RequestHeaderReader(echo)) as door:
        answer = await door.post("/v1/completions", headers={KEEP_HEADER: text})
    assert answer.status_code == 400
    expected = f"{KEEP_HEADER} is {text!r}: give seconds, 0 to 3600"
    assert answer.json()["error"]["message"] == expected


@pytest.mark.parametrize(("text", "keep_s"), [("0", 0.0), ("90", 180.0), ("3600", 3600.0)])
async def test_a_request_says_how_long_to_keep_its_kv(text: str, keep_s: float) -> None:
    seen = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(request_keep_s.get())
        await echo(scope, receive, send)

    async with client(RequestHeaderReader(application, dilation=2.0)) as door:
        await door.post("/v1/x", headers={KEEP_HEADER: text})
        await door.post("/v1/x")
    assert seen == [keep_s, 0.0]


async def test_no_key_set_lets_everybody_in() -> None:
    async with client(KeyMiddleware(echo, keys())) as door:
        assert (await door.post("/v1/x")).status_code == 200


async def whole_app(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> ASGIApp:
    """The application of a server that has no engines."""

    async def tasks() -> tuple[str, ...]:
        return ("generate",)

    async def bind(*_: object) -> None:
        pass

    monkeypatch.setattr(server, "bind_engines", bind)
    return await make_app(
        engine_args.parse_vllm_argv(argv),
        SimpleNamespace(get_supported_tasks=tasks, model_config=None, tracer=None),  # type: ignore[arg-type]
        SimpleNamespace(instances={}),  # type: ignore[arg-type]
        SimpleNamespace(answer=echo),  # type: ignore[arg-type]
        ServeConfig(),
        None,
    )


async def test_a_call_without_ids_aborts_requests_in_vllms_development_mode_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client(await whole_app(["--tokens-only"], monkeypatch)) as door:
        answer = await door.post("/abort_requests", json={})
    assert answer.status_code == 400
    assert "request_ids" in answer.json()["error"]["message"]


async def test_no_path_leads_to_a_page_of_metrics_without_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client(await whole_app([], monkeypatch)) as door:
        found = [await door.get(path) for path in ("/metrics/", "/metrics/any", "/metricsany")]
    assert [one.status_code for one in found] == [307, 404, 404]
    assert found[0].headers["location"] == "http://door/metrics"


def connection_to(app: ASGIApp) -> HttpProtocol:
    """A connection without a socket."""
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    config.load()
    state = uvicorn.Server(config).server_state
    door = HttpProtocol(Edge(EdgeLimits()), config=config, server_state=state, app_state={})
    door.connection_made(MagicMock(get_extra_info=lambda *_: None, is_closing=lambda: False))
    return door


@pytest.mark.parametrize("at_a_time", [1, 7, 1000])
@pytest.mark.parametrize(
    "framed",
    [
        b"Content-Length: 5\r\n\r\nabcde",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"\r\n",
    ],
)
@pytest.mark.parametrize(
    "after", [b"", b"GET / HTTP/1.1\r\nHost: d\r\n\r\n", b"no request\r\n\r\n"]
)
async def test_the_body_of_an_offer_of_http_2_is_read(
    framed: bytes, after: bytes, at_a_time: int
) -> None:
    bodies = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append(await Request(scope, receive).body())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    door = connection_to(application)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    sent = b"POST / HTTP/1.1\r\nHost: d\r\n" + offer + framed + after
    for at in range(0, len(sent), at_a_time):
        door.data_received(sent[at : at + at_a_time])
    await until(lambda: door.cycle.response_complete)
    assert bodies == [b"abcde" if b"abcde" in framed else b""]
    written = b"".join(call.args[0] for call in door.transport.write.call_args_list)
    assert written == b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"


async def test_a_large_body_behind_an_offer_of_http_2_is_no_long_head() -> None:
    door = connection_to(echo)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 400000\r\n\r\n"
    door.data_received(b"POST / HTTP/1.1\r\nHost: d\r\n" + offer + bytes(200_000))
    door.data_received(bytes(200_000))
    await until(lambda: door.cycle.response_complete)
    written = b"".join(call.args[0] for call in door.transport.write.call_args_list)
    assert b'{"bytes": 400000, "tenant": null}' in written


async def test_no_request_of_a_pipeline_gets_the_limits_of_the_one_before() -> None:
    seen = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((request_limits.get(), request_keep_s.get()))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    door = connection_to(RequestHeaderReader(application))
    limits = f"{TTFT_HEADER}: 1\r\n{KEEP_HEADER}: 60\r\n"
    for fields in (limits, ""):
        door.data_received(f"GET / HTTP/1.1\r\nHost: d\r\n{fields}\r\n".encode())
    await until(lambda: len(seen) == 2)
    assert seen == [(RequestLimits(ttft_s=1.0), 60.0), (RequestLimits(), 0.0)]


@pytest.mark.parametrize(("num_bytes", "status"), [(100, 200), (101, 413)])
async def test_a_body_over_the_limit_is_refused_however_it_comes(
    num_bytes: int, status: int
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(num_bytes):
            yield b"x"

    async with client(BodyLimit(echo, 100)) as door:
        assert (await door.post("/", content=b"x" * num_bytes)).status_code == status
        assert (await door.post("/", content=chunks())).status_code == status


async def test_bodies_that_are_too_much_together_get_503_and_a_time_to_come_back() -> None:
    read, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        read.set()
        await leave.wait()
        num_bytes = len(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(num_bytes).encode()})

    async def unannounced() -> AsyncIterator[bytes]:
        yield b"x" * 50

    async with client(BodyLimit(slow, 60, 100)) as door:
        first = asyncio.create_task(door.post("/", content=b"x" * 60))
        await read.wait()
        for body in (b"x" * 50, unannounced()):
            refused = await door.post("/", content=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        leave.set()
        assert ((await first).status_code, (await first).text) == (200, "60")
        for body in (b"x" * 50, unannounced()):
            assert (await door.post("/", content=body)).text == "50"


async def test_more_than_the_limit_at_once_gets_429_and_a_time_to_come_back() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await leave.wait()
        await echo(scope, receive, send)

    async with client(ConcurrencyLimit(slow, 1)) as door:
        first = asyncio.create_task(door.post("/"))
        await entered.wait()
        second = await door.post("/")
        leave.set()
        assert (await first).status_code == 200
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert (await door.post("/")).status_code == 200


@pytest.mark.parametrize(
    ("argv", "model", "shape", "vllm_argv"),
    [
        ([], "smollm2-135m", (1, 1, 0), ()),
        (["opt-13b", "--pd", "2:3"], "opt-13b", (2, 3, 0), ()),
        (["--model", "m", "--colocated", "4"], "m", (0, 0, 4), ()),
        (["m", "--max-model-len", "64"], "m", (1, 1, 0), ("--max-model-len", "64")),
        (["--port", "9", "--", "--seed", "3"], "smollm2-135m", (1, 1, 0), ("--seed", "3")),
    ],
)
def test_command_lines(
    argv: list[str], model: str, shape: tuple[int, int, int], vllm_argv: tuple[str, ...]
) -> None:
    config = parse_serve_argv(argv)
    assert config.model == model
    assert (config.prefill, config.decode, config.colocated) == shape
    assert config.vllm_argv == vllm_argv


@pytest.mark.parametrize(
    ("kv_bytes", "fraction", "fits"),
    [(2**30, 0.9, True), (2**32, 0.9, False), (None, 0.2, True), (None, 0.3, False)],
)
def test_what_all_engines_take_has_to_be_there(
    kv_bytes: int | None,
    fraction: float,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ram = SimpleNamespace(total=16 * 2**30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: ram)
    refused = pytest.raises(UserError, match="--gpu-memory-utilization")
    with contextlib.nullcontext() if fits else refused:
        each_bytes = machine.instance_bytes(0, kv_bytes, fraction)
        machine.check_memory(ServeConfig(), each_bytes, 8 * 2**30)


def test_no_option_of_vllm_counts_as_one_of_ours_misspelt() -> None:
    compat = pytest.importorskip("banaserve.engine.compat.front.server")
    parser = compat.make_arg_parser(compat.FlexibleArgumentParser())
    names = {name for action in parser._actions for name in action.option_strings}
    own = {"--help", "--model", "--host", "--port", "--api-key", "--config"}
    assert len(names) > 200
    for name in sorted(names - own):
        if name.startswith("--"):
            for word in (name, f"--{name[2:].replace('-', '_')}", f"{name}=x"):
                assert word in parse_serve_argv(["m", word]).vllm_argv


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--pd", "1"], "--pd 1: write the number"),
        (["--pd", "0:1"], "--pd 0:1"),
        (["--pd", "1:1", "--colocated", "2"], "exclude each other"),
        (["a", "--model", "b"], "two models"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--no-kv-store"], "--colocated"),
        (["--kv-store-sise", "1GiB"], "did you mean --kv-store-size"),
        (["--port", "0"], "--port 0"),
        (["--routing-option", "preset"], "KEY=VALUE"),
        (["--request-timeout", "nan"], "--request-timeout nan: must be more than 0"),
        (["--restart-grace", "nan"], "--restart-grace nan: must not be negative"),
        (["--migration-kv-growth", "nan"], "at least 1"),
        (["--orchestrator-interval", "nan"], "--orchestrator-interval nan: must be above 0"),
        (["--instances", "2", "--pd", "1:1"], "--pd and --instances exclude each other"),
        (["--instances", "2", "--no-kv-store"], "need the store"),
        (["--elastic", "--orchestrator", "off"], "--elastic and --orchestrator off exclude"),
        (["--elastic", "--orchestrator-policy", "repaired"], "repaired exclude each other"),
        (["--scale-max", "4"], "give --orchestrator on too"),
        (["--scale-min", "2"], "give that too"),
        (["--scale-max", "1", "--orchestrator", "on"], "do not enclose the 2 instances"),
        (["--elastic", "--scale-max", "4", "--scale-min", "3"], "do not enclose the 2 instances"),
        (["--elastic", "--scale-max", "4", "--scale-min", "0"], "do not enclose the 2 instances"),
        (["--slo-ttft", "nan"], "--slo-ttft nan: seconds above 0"),
        (["--slo-tpot", "-1"], "--slo-tpot -1: seconds above 0"),
        (
            ["--slo-ttft", "2"],
            "--slo-ttft is used only by --elastic and --routing-policy slo_aware",
        ),
        (["--slo-tpot", "0.1", "--orchestrator", "on"], "--slo-tpot is used only by"),
        (
            ["--slo-ttft", "2", "--orchestrator-policy", "elastic", "--orchestrator", "off"],
            "--slo-ttft is used only by",
        ),
        (["--prefill-tensor-parallel-size", "-1"], "size -1: must not be negative"),
        (["--colocated", "2", "--decode-tensor-parallel-size", "2"], "give --pd P:D, or"),
        (["--prefill-tensor-parallel-size", "2", "--pace", "opt-13b-a100"], "and --pace exclude"),
        (["--decode-tensor-parallel-size", "2", "--node", "h:1"], "for all"),
        (["--instances", "-1"], "--instances -1: must not be negative"),
        (["--colocated", "-1"], "--colocated -1: must not be negative"),
    ],
)
def test_senseless_command_lines_say_what_to_do(argv: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_serve_argv(argv)


def test_instances_that_are_left_to_the_load() -> None:
    config = parse_serve_argv(["--instances", "4", "--slo-ttft", "2"])
    chosen = config.orchestrator
    assert [role for _, role in config.instances()] == [Role.COLOCATED] * 4
    assert (chosen.mode, chosen.policy, chosen.slo_ttft_s) == ("on", "elastic", 2.0)
    config = parse_serve_argv(["--pd", "2:2", "--elastic"])
    assert (config.prefill, config.decode, config.orchestrator.policy) == (2, 2, "elastic")
    assert config.orchestrator.concurrent > 100
    assert parse_serve_argv([]).orchestrator.policy == "repaired"
    by_hand = parse_serve_argv(["--instances", "2", "--orchestrator", "off"]).orchestrator
    assert (by_hand.mode, by_hand.policy) == ("off", "repaired")


@pytest.mark.parametrize(
    ("argv", "is_given"),
    [
        (("-tp", "2"), True),
        (("-tp=2",), True),
        (("--tensor_parallel_size=2",), True),
        (("--seed", "3"), False),
        ((), False),
    ],
)
def test_which_of_vllms_options_are_given(argv: tuple[str, ...], is_given: bool) -> None:
    assert gives(argv, *PARALLEL) is is_given


OTHER_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--max-model-len", "512"], ""),
        (["--api-key", "k"], "--api-key cannot go to vLLM: give it before --"),
        (["--port", "9"], "--port cannot go to vLLM: give it before --"),
        (["--model", "other"], "--model cannot go to vLLM"),
        (["--uds", "/s"], "API server"),
        (["some/model"], "some/model is left over: name one model, first"),
        (["--data-parallel-size", "2"], "more instances"),
        (["--mm-processor-cache-gb", "4"], "leave it out"),
        (["--kv-transfer-config", OTHER_CONNECTOR], "banaserve's store"),
        (["--worker-extension-cls", "mine.Worker"], "leave it out"),
    ],
)
def test_what_vllm_is_told_and_would_not_happen_is_refused(given: list[str], says: str) -> None:
    _refuse_taken(given, says)


@pytest.mark.parametrize(("is_on_cpu", "says"), [(True, "on a CPU its workers die"), (False, "")])
def test_expert_parallel_is_refused_on_a_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, is_on_cpu: bool, says: str
) -> None:
    monkeypatch.setattr(engine_args, "is_on_cpu", lambda: is_on_cpu)
    _refuse_taken(["--enable-expert-parallel"], says)


def _refuse_taken(given: list[str], says: str) -> None:
    config = ServeConfig()
    argv = ["--model", "m", "--host", config.host, "--port", str(config.port)]
    argv += [*engine_args.common_options(), *engine_args.store_options("/socket", ""), *given]
    args = engine_args.parse_vllm_argv(argv)
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        refuse_taken(args, config, "m")


TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--reasoning-parser", "deepseek_r1", *TOOLS, "hermes"], ""),
        ([*TOOLS, "nobodys"], "tool call parser: nobodys"),
        (["--reasoning-parser", "nobodys"], "reasoning parser: nobodys"),
        (["--reasoning-parser", "mine", "--reasoning-parser-plugin", "PLUGIN"], ""),
        ([*TOOLS, "ours", "--tool-parser-plugin", "PLUGIN"], ""),
    ],
)
def test_parsers_are_known_by_the_server_before_anything_starts(
    given: list[str], says: str, tmp_path: Path
) -> None:
    """Engines and vLLM's server read the options from the same object."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PARSERS)
    argv = [str(plugin) if word == "PLUGIN" else word for word in given]
    args = engine_args.parse_vllm_argv(["--model", "m", *argv])
    engine_args.AsyncEngineArgs.from_cli_args(args).create_structured_outputs_config()
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        engine_args.load_parsers(args)


PARSERS = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers import ToolParser, ToolParserManager

@ReasoningParserManager.register_module("mine")
class Mine(ReasoningParser): ...

@ToolParserManager.register_module("ours")
class Ours(ToolParser): ...
"""


def test_certificates_are_looked_at_before_anything_slow(tmp_path: Path) -> None:
    none = dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ciphers"))
    usual = {**none, "ssl_cert_reqs": 0}
    check_tls(Namespace(**usual))
    with pytest.raises(UserError, match="certificate too"):
        check_tls(Namespace(**{**usual, "ssl_keyfile": "key.pem"}))
    with pytest.raises(UserError, match=r"nothing\.pem: No such file"):
        check_tls(Namespace(**{**usual, "ssl_certfile": str(tmp_path / "nothing.pem")}))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(UserError, match=r"empty\.pem: "):
        check_tls(Namespace(**{**usual, "ssl_certfile": str(tmp_path / "empty.pem")}))


async def test_a_door_that_cannot_open_says_why(tmp_path: Path) -> None:
    files = dict.fromkeys(("ssl_keyfile", "ssl_certfile"), str(tmp_path / "nothing.pem"))
    others = dict.fromkeys(("ssl_ca_certs", "ssl_ciphers"))
    args = Namespace(
        **files,
        **others,
        ssl_cert_reqs=0,
        uvicorn_log_level="error",
        disable_uvicorn_access_log=True,
    )
    with socket.socket() as sock, pytest.raises(UserError, match=r"cannot open: .*No such file"):
        await ApiServer(echo, sock, args).open()


def test_a_file_holds_the_same_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('pd = "2:1"\nport = 9000\napi-key = ["a", "b"]\n')
    config = parse_serve_argv(["--config", str(file), "--port", "9001"])
    assert (config.prefill, config.port, config.api_keys) == (2, 9001, ("a", "b"))
    file.write_text(
        "kv-store-verify = false\nenable-prefix-caching = false\nenforce-eager = true\n"
    )
    told = parse_serve_argv(["--config", str(file)]).vllm_argv
    assert told == ("--no-enable-prefix-caching", "--enforce-eager")
    file.write_text("migration = false\n")
    with pytest.raises(UserError, match="migration takes a value"):
        parse_serve_argv(["--config", str(file)])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"--config .*decode"):
        parse_serve_argv(["--config", str(file)])
    file.write_text("pd = {p = 1}\n")
    with pytest.raises(UserError, match="pd is neither"):
        parse_serve_argv(["--config", str(file)])


def test_instances_are_named_by_their_role() -> None:
    assert [i for i, _ in ServeConfig(prefill=2, decode=1).instances()] == ["p0", "p1", "d0"]


def test_a_run_directory_is_one_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "_LOCK_S", 0.05)
    folder = tmp_path / "run"
    with open_run_dir(folder) as run:
        assert run.sockets.is_dir()
        with pytest.raises(UserError, match="in use"), open_run_dir(folder):
            pass
    assert not run.sockets.exists()
    with open_run_dir(folder):
        pass
    assert list(folder.iterdir()) == []


def test_a_run_directory_is_used_again_after_a_run_that_was_killed(tmp_path: Path) -> None:
    """In a container it has the process id of the next one."""
    folder = tmp_path / "run"
    _killed_run(folder)
    (folder / "run.json").write_text(json.dumps({"pid": os.getpid()}))
    (folder / "admin.json").write_text("of the killed run")
    with open_run_dir(folder) as run:
        assert json.loads((folder / "run.json").read_text())["sockets"] == str(run.sockets)
        assert not (folder / "admin.json").exists()
    assert list(folder.iterdir()) == []


def test_a_run_directory_is_a_runs_until_its_last_engine_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "_LOCK_S", 0.05)
    folder = tmp_path / "run"
    to_engine, from_test = os.pipe()
    with open_run_dir(folder):
        engine = os.fork()
        if engine == 0:
            os.close(from_test)
            os.read(to_engine, 1)
            os._exit(0)
    (folder / "run.json").touch()
    with (folder / "run.json").open("a") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use"), open_run_dir(folder):
            pass
    os.close(from_test)
    os.waitpid(engine, 0)
    os.close(to_engine)
    with open_run_dir(folder):
        pass


@pytest.mark.parametrize(
    ("said", "tail"),
    [
        (b"", ""),
        (b"short\n", "short\n"),
        (b"x" * 10 + b"\nlast\n", "last\n"),
        (b"\xffok\n", "\ufffdok\n"),
    ],
)
def test_the_tail_of_a_log_is_its_last_whole_lines(said: bytes, tail: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(said)
    assert run_dir.tail_of(tmp_path / "log", 8) == tail


def test_the_end_of_a_long_log_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # reading all of it would take hours
        file.seek(0, os.SEEK_END)
        file.write(b"\nValueError: the last words\n")
    assert last_error_in(log) == f"ValueError: the last words (log: {log})"


def test_sockets_of_a_killed_run_are_swept_and_those_of_a_live_one_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = _killed_run(tmp_path / "killed")
    with open_run_dir(tmp_path / "first") as first:
        assert not killed.exists()
        with open_run_dir(tmp_path / "second"):
            assert first.sockets.is_dir()


def _killed_run(logs: Path) -> Path:
    """The sockets that a run leaves behind whose process is killed."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open_run_dir(logs) as run:
            os.write(writable, str(run.sockets).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    sockets = Path(os.read(readable, 4096).decode())
    os.waitpid(pid, 0)
    os.close(readable)
    os.close(writable)
    assert sockets.is_dir()
    return sockets
