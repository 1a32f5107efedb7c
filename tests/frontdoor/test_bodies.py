"""Bodies of requests: what they may cost is bounded before they become objects."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import pytest

pytest.importorskip("vllm")

from fastapi import Body, FastAPI
from prometheus_client.registry import REGISTRY

from banaserve.base.errors import UserError
from banaserve.base.text.json_text import as_utf8
from banaserve.engine.engine_args import parse_vllm_argv
from banaserve.frontdoor.app import vllm_app
from banaserve.frontdoor.bodies.bounds import (
    BodyRefusedError,
    JsonShape,
    RequestBounds,
    measure,
    read_outline,
    upper_bound,
)
from banaserve.frontdoor.bodies.grammar_checker import grammars_of
from banaserve.frontdoor.bodies.grammar_process import GrammarSpec
from banaserve.frontdoor.bodies.guard import (
    FRACTION,
    LEAST_S,
    LONG_BYTES,
    BodyGuard,
    ValidationPace,
    take_parsed_bodies,
)
from banaserve.frontdoor.middleware.admission import BodyLimit

BOUNDS = RequestBounds()
HELLO = {"role": "user", "content": "hi"}


def text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (b"", JsonShape()),
        (b"1", JsonShape()),
        (b"[1, 2]", JsonShape(1, 0, 2, 0, 1)),
        (b'{"a": [{}, {}]}', JsonShape(4, 1, 5, 1, 3)),
        (rb'{"[{,:": "\"[{,:\\"}', JsonShape(1, 1, 1, 2, 1)),
        (b"[[[]], []]", JsonShape(4, 0, 5, 0, 3)),
    ],
)
def test_the_shape_of_a_text_is_that_of_its_json(body: bytes, shape: JsonShape) -> None:
    assert measure(body) == shape


@pytest.mark.parametrize("place", range(2**20 - 3, 2**20 + 4))
@pytest.mark.parametrize("piece", [rb"\\", rb"\"", rb"\\\"", rb"\\\\"])
def test_an_escape_on_the_border_of_two_steps_ends_no_string(place: int, piece: bytes) -> None:
    body = b'["' + b"x" * (place - 2) + piece + b'[", {}]'
    assert json.loads(body)[1] == {}
    assert measure(body) == JsonShape(2, 0, 3, 1, 2)


def test_no_shape_exceeds_its_upper_bound() -> None:
    body = text({"a": ["b,{[:", {"c": [1, 2, None]}]})
    shape, most = measure(body), upper_bound(body)
    assert all(getattr(shape, name) <= getattr(most, name) for name in JsonShape.__slots__)


REFUSED = {
    "a million tiny messages": ({"messages": [HELLO] * 20_000}, 413, "containers"),
    "messages": ({"messages": [HELLO] * 1_025}, 400, "messages"),
    "messages of a batch": ({"messages": [[HELLO] * 600] * 2}, 400, "messages"),
    "messages beside a batch": ({"messages": [HELLO, [HELLO] * 1_024]}, 400, "messages"),
    "fields of a message": (
        {"messages": [{**HELLO, **{str(i): 1 for i in range(200)}}]},
        400,
        "fields",
    ),
    "fields": ({str(i): 1 for i in range(200)}, 400, "fields"),
    "parts": ({"messages": [{"role": "user", "content": [{"a": 1}] * 5_000}]}, 400, "parts"),
    "items of input": ({"input": [HELLO] * 257}, 400, "items"),
    "arrays in items": ({"input": [{"role": "user", "summary": [1] * 3_000}]}, 400, "parts"),
    "arrays in tools": ({"tools": [{"type": "x", "any": [1.5] * 3_000}]}, 400, "parts"),
    "prompts that are numbers": ({"prompt": [1.5] * 5_000}, 400, "elements"),
    "negative token ids": ({"prompt": [-1] * 5_000}, 400, "elements"),
    "a text among token ids": ({"prompt": [1] * 5_000 + ["a"]}, 400, "elements"),
    "numbers in a batch": ({"prompt": [[1.5] * 5_000]}, 400, "elements"),
    "numbers in an input": ({"input": [[1.5] * 5_000]}, 400, "elements"),
    "tokens": ({"tokens": [1.5] * 5_000}, 400, "elements"),
    "null": ({"allowed_token_ids": [None] * 5_000}, 400, "elements"),
    "tools": ({"tools": [{}] * 513}, 400, "tools"),
    "prompts": ({"prompt": ["a"] * 2_049}, 400, "prompts"),
    "prompts of ids": ({"prompt": [[1]] * 2_049}, 400, "prompts"),
    "inputs": ({"input": ["a"] * 2_049}, 400, "prompts"),
    "stop": ({"stop": ["a"] * 257}, 400, "stops"),
    "stop tokens": ({"stop_token_ids": [1] * 257}, 400, "stops"),
    "bad words": ({"bad_words": ["a"] * 257}, 400, "stops"),
    "n": ({"n": 129}, 400, "n"),
    "n as text": ({"n": "1e9"}, 400, "n"),
    "n without a fraction": ({"n": 10**30}, 400, "n"),
    "n of many prompts": ({"n": 100, "prompt": ["a"] * 100}, 400, "sequences"),
    "logprobs": ({"top_logprobs": 2_000}, 400, "logprobs"),
    "n behind spaces": ({"n": " " * 100 + "100000"}, 400, "n"),
    "n behind zeros": ({"n": "0" * 100 + "100000"}, 400, "n"),
    "n by an exponent": (b'{"n": 0.%b1e105}' % (b"0" * 100), 400, "n"),
    "n in escapes": (b'{"n": "\\u0031\\u0030\\u0030\\u0030\\u0030\\u0030"}', 400, "n"),
    "n without end": (b'{"n": 1%b}' % (b"0" * 10_000), 400, "n"),
    "logit_bias": ({"logit_bias": {str(i): 1 for i in range(3_000)}}, 400, "logit_bias"),
    "nested parameters": ({"sampling_params": {"n": 1_000}}, 400, "n"),
    "a long grammar": ({"structured_outputs": {"regex": "a" * 300_000}}, 413, "grammar_bytes"),
    "a long schema": ({"response_format": {"x": "a" * 300_000}}, 413, "grammar_bytes"),
    "values": ({"prompt": [1] * 2_000_002}, 413, "values"),
    "strings": ({"a": ["b"] * 140_000}, 400, "strings"),
}


@pytest.mark.parametrize(("body", "status", "cause"), REFUSED.values(), ids=REFUSED)
def test_what_is_beyond_a_bound_is_refused_in_one_line(
    body: dict[str, Any] | bytes, status: int, cause: str
) -> None:
    with pytest.raises(BodyRefusedError) as refused:
        read_outline(text(body), BOUNDS)
    assert (refused.value.status, refused.value.cause) == (status, cause)
    assert "\n" not in str(refused.value)


def test_depth_is_bounded_before_anything_recurses() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert read_outline(nested(64), BOUNDS) is not None
    for depth, cause in ((65, "depth"), (16_000, "depth"), (100_000, "containers")):
        with pytest.raises(BodyRefusedError) as refused:
            read_outline(nested(depth), BOUNDS)
        assert refused.value.cause == cause


@pytest.mark.parametrize("body", [b"{", b'{"a" 1}', b'{"a": "\xff"}', b"\xff", b"NaN", b"[1]"])
def test_what_is_no_object_is_left_to_the_endpoint(body: bytes) -> None:
    assert read_outline(body, BOUNDS) is None


BY_PYTHON = {
    "NaN": b"NaN",
    "infinity": b"[-Infinity, 1e400, 1e999]",
    "half of a pair": b'"\\ud83d"',
    "half of a pair, as a key": b'{"\\ude00": NaN}',
    "half of a pair, encoded": b'"\xed\xa0\xbd"',
    "a large number": b"9" * 400,
}
"""Values that Python's reader, and so vLLM, accepts, and other parsers do not."""


@pytest.mark.parametrize("value", BY_PYTHON.values(), ids=BY_PYTHON)
def test_what_only_pythons_reader_accepts_is_bounded_too(value: bytes) -> None:
    grammar = b'"structured_outputs": {"json": {"minimum": 0.5, "default": %b}}' % value
    outline = read_outline(b'{"a": %b, %b}' % (value, grammar), BOUNDS)
    assert outline is not None
    assert [spec.kind for spec in grammars_of(outline)] == ["json"]
    with pytest.raises(BodyRefusedError, match="n: 129 are more"):
        read_outline(b'{"a": %b, "n": 129}' % value, BOUNDS)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [HELLO] * 1_000, "n": 4, "stop": ["a"], "logprobs": True, "top_logprobs": 20},
        {"messages": [[HELLO], [HELLO]]},
        {"messages": None, "n": None, "stop": None, "tools": None},
        {"messages": [1, "a"], "tools": ["a", None], "best_of": 1_000},
        {"prompt": [1] * 1_000_000},
        {"prompt": "{[,:" * 1_000_000},
        {"input": ["a"] * 2_048},
        {"seed": 2**70},
    ],
)
def test_what_is_within_the_bounds_passes(body: dict[str, Any]) -> None:
    assert read_outline(text(body), BOUNDS) is not None


def test_bounds_are_given_by_name() -> None:
    bounds = RequestBounds.of([("messages", 1)])
    with pytest.raises(BodyRefusedError, match=r"messages: 2 are more than 1 \(--request-bound"):
        read_outline(text({"messages": [HELLO] * 2}), bounds)
    with pytest.raises(UserError, match="did you mean messages"):
        RequestBounds.of([("mesages", 1)])
    for value in (0, -1, "many", 1.5):
        with pytest.raises(UserError, match="give a number above 0"):
            RequestBounds.of([("messages", value)])


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ({}, []),
        ({"structured_outputs": {"json": SCHEMA}}, ["json"]),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ["json"]),
        ({"structured_outputs": {"regex": "a"}}, ["regex"]),
        ({"structured_outputs": {"choice": ["a"]}}, ["choice"]),
        ({"structured_outputs": {"grammar": "root ::= a"}}, ["grammar"]),
        ({"response_format": {"type": "text"}}, []),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ["json"],
        ),
        ({"response_format": {"type": "json_object", "json_schema": SCHEMA}}, ["json"]),
        ({"response_format": {"type": "json_object", "json_schema": None}}, []),
        ({"response_format": {"type": "structural_tag", "format": {}}}, ["structural_tag"]),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ["json"]),
        ({"text": "a classifier's"}, []),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ["json"]),
        ({"output_config": {"effort": "low"}}, []),
        (
            {"tools": [{"function": {"parameters": SCHEMA}}, {"input_schema": {"a": 1}}]},
            ["json"] * 2,
        ),
        ({"tools": [{"function": {"parameters": SCHEMA}}] * 3}, ["json"]),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, ["regex"]),
        ({"structured_outputs": None, "tools": 3}, []),
    ],
)
def test_the_grammars_of_a_request_are_found(body: dict[str, Any], kinds: list[str]) -> None:
    outline = read_outline(text(body), BOUNDS)
    assert outline is not None
    assert [spec.kind for spec in grammars_of(outline)] == kinds


# The guard, in front of an application of FastAPI ------------------------------------------------


class Refusing:
    """Refuses one grammar."""

    async def check(self, specs: list[GrammarSpec]) -> None:
        if any(spec.text == "bad" for spec in specs):
            raise BodyRefusedError(HTTPStatus.BAD_REQUEST, "grammar", "make it simpler")


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/x")
    async def endpoint(body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        return {"keys": sorted(body), "seed": body.get("seed")}

    @app.post("/v1/audio/upload")
    async def upload() -> dict[str, Any]:
        return {}

    take_parsed_bodies(app)
    return app


def door(guard: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://door")


def guarded(**options: Any) -> BodyGuard:
    return BodyGuard(application(), BOUNDS, Refusing(), **options)


def refusals(cause: str) -> float:
    samples = [one for metric in REGISTRY.collect() for one in metric.samples]
    name = "banaserve_refused_total"
    return sum(s.value for s in samples if s.name == name and s.labels["cause"] == cause)


@pytest.mark.parametrize("padding", [0, LONG_BYTES])
async def test_an_endpoint_gets_its_body_however_long(padding: int) -> None:
    body = {"seed": 2**60, "text": "x" * padding}
    async with door(guarded()) as client:
        answer = await client.post("/v1/x", json=body)
        broken = await client.post("/v1/x", json=[body])
    assert (answer.status_code, answer.json()) == (200, {"keys": ["seed", "text"], "seed": 2**60})
    assert broken.status_code == 422  # by the endpoint


@pytest.mark.parametrize("padding", [0, LONG_BYTES])
async def test_a_body_is_json_if_it_is_for_the_endpoint(padding: int) -> None:
    bodies = [b'{"seed": 1, "a": %b, "b": "%b"}' % (v, b"x" * padding) for v in BY_PYTHON.values()]
    bodies.append(
        b'{"messages": [1, [2], "a"], "input": [3], "tools": [4], "b": "%b"}' % (b"x" * padding)
    )
    bodies += ['{"seed": 2, "a": "\ud83d"}'.encode("utf-16", "surrogatepass"), b"{%b" % bodies[0]]
    headers = {"content-type": "application/json"}
    async with door(guarded()) as client, door(application()) as plain:
        for body in bodies:
            answer = await client.post("/v1/x", content=body, headers=headers)
            same = await plain.post("/v1/x", content=body, headers=headers)
            assert (answer.status_code, answer.json()) == (same.status_code, same.json())
    assert same.status_code == 422


async def test_a_long_body_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parse(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*given, **options)

    import banaserve.frontdoor.bodies.guard as module

    real = module.msgspec.json.decode
    monkeypatch.setattr(module.msgspec.json, "decode", parse)
    monkeypatch.setattr("json.loads", lambda *_: pytest.fail("parsed again"))
    async with door(guarded()) as client:
        content = b'{"a": "%b"}' % (b"x" * LONG_BYTES)
        answer = await client.post(
            "/v1/x", content=content, headers={"content-type": "application/json"}
        )
    monkeypatch.undo()
    assert answer.json()["keys"] == ["a"]
    assert threads
    assert all(name.startswith("body") for name in threads)


async def test_a_long_body_in_another_encoding_is_decoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import banaserve.frontdoor.bodies.guard as module

    threads: list[str] = []

    def convert(body: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return as_utf8(body)

    monkeypatch.setattr(module, "as_utf8", convert)
    content = ('{"a": "%s"}' % ("é" * LONG_BYTES)).encode("utf-16")
    headers = {"content-type": "application/json"}
    async with door(guarded()) as client:
        answer = await client.post("/v1/x", content=content, headers=headers)
    assert answer.json()["keys"] == ["a"]
    assert [name.split("_")[0] for name in threads] == ["body"]


async def test_a_refusal_has_openais_form_and_is_counted() -> None:
    before = refusals("messages"), refusals("grammar")
    async with door(guarded()) as client:
        many = await client.post("/v1/x", json={"messages": [HELLO] * 3_000})
        bad = await client.post("/v1/x", json={"structured_outputs": {"regex": "bad"}})
        good = await client.post("/v1/x", json={"structured_outputs": {"regex": "good"}})
    assert (many.status_code, many.json()["error"]["type"]) == (400, "Bad Request")
    assert (bad.status_code, bad.json()["error"]["message"]) == (400, "make it simpler")
    assert good.status_code == 200
    assert (refusals("messages"), refusals("grammar")) == (before[0] + 1, before[1] + 1)


async def test_objects_of_all_bodies_together_are_bounded_and_given_back() -> None:
    body = {"prompt": [1] * 200_000}
    async with door(guarded(max_held_object_bytes=10 * 2**20)) as client:
        assert [(await client.post("/v1/x", json=body)).status_code for _ in range(3)] == [200] * 3
    async with door(guarded(max_held_object_bytes=2**20)) as client:
        answer = await client.post("/v1/x", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_what_a_check_that_breaks_has_counted_is_given_back() -> None:
    class Breaking:
        async def check(self, _: Any) -> None:
            raise RuntimeError("no process can be started")

    body = {"prompt": [1] * 200_000, "structured_outputs": {"regex": "a"}}
    guard = BodyGuard(application(), BOUNDS, Breaking())
    async with door(guard) as client:
        with pytest.raises(RuntimeError):
            await client.post("/v1/x", json=body)
    assert guard._held_object_bytes == 0


SLOW = {
    "parts": {"messages": [{"role": "user", "content": [{"text": ""}] * 1_900}]},
    "parts of a batch": {"messages": [[{"role": "user", "content": [{"text": ""}] * 1_900}]]},
    "parts of an item": {"input": [{"role": "user", "content": [{"text": ""}] * 1_900}]},
    "token ids": {"prompt": [1] * 1_900_000},
}
QUICK = {
    "messages": {"messages": [HELLO] * 300, "tools": [{"a": {"b": [{}] * 5}}] * 300},
    "prose": {"prompt": "a, {[" * 500_000},
}


@pytest.mark.parametrize("body", SLOW.values(), ids=SLOW)
async def test_slow_validations_take_a_fifth_of_the_loop_however_many_there_are(
    body: dict[str, Any],
) -> None:
    now_s, waits_s = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)

    guard = guarded(pace=ValidationPace(lambda: now_s, sleep))
    async with door(guard) as client:
        answers = [(await client.post("/v1/x", json=body)).status_code for _ in range(3)]
        quick = await client.post("/v1/x", json=QUICK["messages"])
    assert answers == [200] * 3
    assert quick.status_code == 200
    first_s, second_s = waits_s
    assert second_s == pytest.approx(2 * first_s)
    assert first_s >= LEAST_S / FRACTION


@pytest.mark.parametrize("body", QUICK.values(), ids=QUICK)
async def test_other_requests_wait_for_no_validation(body: dict[str, Any]) -> None:
    guard = guarded(pace=ValidationPace(lambda: 100.0, lambda _: pytest.fail("waits")))
    async with door(guard) as client:
        assert (await client.post("/v1/x", json=body)).status_code == 200
        assert (await client.post("/v1/x", json=body)).status_code == 200


async def test_a_validation_that_would_wait_for_long_is_refused() -> None:
    async def sleep(_: float) -> None: ...

    before = refusals("validation")
    pace = ValidationPace(lambda: 100.0, sleep)
    for _ in range(1000):
        try:
            await pace.wait(0.13)
        except BodyRefusedError:
            break
    async with door(guarded(pace=pace)) as client:
        answer = await client.post("/v1/x", json=SLOW["parts"])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert refusals("validation") == before + 1


@pytest.mark.parametrize("kind", ["octet-stream+json", "x-www-form-urlencoded+JSON ; a=b"])
async def test_what_an_endpoint_reads_as_json_is_no_upload(kind: str) -> None:
    headers = {"content-type": f"application/{kind}"}
    async with door(guarded()) as client, door(application()) as plain:
        answers = [
            await one.post("/v1/x", content=b'{"n": 129}', headers=headers)
            for one in (client, plain)
        ]
    assert [one.status_code for one in answers] == [400, 200]


async def test_uploads_and_empty_bodies_pass() -> None:
    async with door(guarded()) as client:
        files = {"file": ("a.wav", b"{[" * 100_000)}
        assert (await client.post("/v1/audio/upload", files=files)).status_code == 200
        assert (await client.post("/v1/audio/upload")).status_code == 200


async def test_a_body_is_no_upload_where_none_is_taken() -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with door(guarded()) as client:
        answer = await client.post("/v1/aborts", content=b'{"n": 129}', headers=headers)
    assert (answer.status_code, "--request-bound n=N" in answer.text) == (400, True)


async def test_a_body_that_is_too_long_is_still_cut_off() -> None:
    async with door(BodyLimit(guarded(), 100)) as client:

        async def chunks() -> Any:
            for _ in range(200):
                yield b"x"

        assert (await client.post("/v1/x", content=chunks())).status_code == 413


async def test_the_endpoints_of_vllm_take_what_was_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = vllm_app(parse_vllm_argv([]), ("generate",), None)
    app.state.args = SimpleNamespace(log_error_stack=False)
    lengths: list[int] = []

    def loads(text: Any, **options: Any) -> Any:
        lengths.append(len(text))
        return real(text, **options)

    real = json.loads
    body = text({"messages": [{"role": "user", "content": 3}], "pad": "x" * LONG_BYTES})
    guard = BodyGuard(app, BOUNDS, None)
    async with door(guard) as client:
        monkeypatch.setattr(json, "loads", loads)
        headers = {"content-type": "application/json"}
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            answer = await client.post(path, content=body, headers=headers)
            assert answer.status_code == 400, path  # by the endpoint, of a wrong type
    monkeypatch.undo()
    assert max(lengths, default=0) < LONG_BYTES
