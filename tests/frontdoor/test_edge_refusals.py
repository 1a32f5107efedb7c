"""Every refusal of the front door: its status, one line, a count, one line of log a second.

One table over all layers in front of vLLM, through a real door. Each case is refused three times
while a stream of a client with a key is under way, which comes to its end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client import REGISTRY

pytest.importorskip("vllm")

from banaserve.base.access.tenants import TENANT_FIELD, TenantKey
from banaserve.base.config.serve_config import ServeConfig
from banaserve.frontdoor import app as front_app
from banaserve.frontdoor.app import guarded
from banaserve.frontdoor.bodies.bounds import BodyRefusedError
from banaserve.frontdoor.bodies.grammar_process import GrammarSpec
from banaserve.frontdoor.edge import refusals
from banaserve.frontdoor.edge.limits import EdgeLimits
from edge_server import HEAD, KEY, NUM_EVENTS, Caller, Rig, on_uvloop, patient, serving
from waiting import until

TIMES = 3
CONFIG = ServeConfig(
    tenants=(TenantKey(key="good"), TenantKey(key="balancer", is_balancer=True)),
    metrics_key="figures",
    max_concurrent_requests=64,
    max_body_size="1MiB",
)
Provoke = Callable[[Rig], Awaitable[Caller]]
"""Does what is refused; returns the connection on which the answer comes."""


def said(*parts: str | bytes) -> Provoke:
    """Bytes on a connection of their own."""

    async def provoke(rig: Rig) -> Caller:
        caller = await rig.caller()
        await caller.send(b"".join(one.encode() if isinstance(one, str) else one for one in parts))
        return caller

    return provoke


def posted(body: Any, *fields: str, key: str = "good") -> Provoke:
    """A body of a client with a key, as JSON if it is no bytes."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"Authorization: Bearer {key}", f"Content-Length: {len(text)}", *fields]
    return said(HEAD, *(f"{one}\r\n" for one in head), "\r\n", text)


def announced(num_bytes: int) -> Provoke:
    """A body that does not come yet."""
    return said(HEAD, KEY, f"Content-Length: {num_bytes}\r\n\r\n")


async def connected(rig: Rig) -> Caller:
    """A connection that says nothing."""
    return await rig.caller()


async def half_a_head(rig: Rig) -> Caller:
    caller = await said(HEAD)(rig)
    await until(lambda: any(one._framing_bytes and not one._is_refused for one in rig.edge.table))
    rig.later(rig.limits.head_s + 1.0)
    return caller


async def half_a_body(rig: Rig) -> Caller:
    caller = await said(HEAD, KEY, "Content-Length: 10\r\n\r\nhalf")(rig)
    await until(lambda: any(one._body_bytes and not one._is_refused for one in rig.edge.table))
    rig.later(rig.limits.body_s + 60.0)
    return caller


async def more_than_all_may_hold(rig: Rig) -> Caller:
    """One body is being held; there is no room for another."""
    if not any(one._body_bytes for one in rig.edge.table):
        await said(HEAD, KEY, "Content-Length: 1000\r\n\r\n", bytes(900))(rig)
        await until(lambda: any(one._body_bytes == 900 for one in rig.edge.table))
    return await announced(200)(rig)


class Refusing:
    """In place of the process that compiles grammars: it could not, or they are too much."""

    def __init__(self, status: HTTPStatus, cause: str) -> None:
        self._refusal = BodyRefusedError(status, cause, f"{cause} says no")

    async def check(self, specs: Sequence[GrammarSpec]) -> None:
        assert specs
        raise self._refusal


@dataclass
class Case:
    """What is refused and how.

    Attributes:
        says: Words of the message.
        config, limits: Settings of the front door that differ from the usual ones.
        patches: Constants of ``frontdoor.app``.
        is_closed: Whether the connection ends behind the answer.
    """

    status: int
    cause: str
    says: str
    provoke: Provoke
    config: ServeConfig = CONFIG
    limits: EdgeLimits = field(default_factory=patient)
    grammars: Refusing | None = None
    patches: dict[str, Any] = field(default_factory=dict)
    is_closed: bool = False


def keys(**limits: int) -> ServeConfig:
    return replace(CONFIG, tenants=(TenantKey(key="good", **limits),))


GRAMMAR = {"structured_outputs": {"regex": "a"}}
CASES = [
    Case(400, "no_request", "no valid HTTP/1.1 request", said("nonsense\r\n\r\n"), is_closed=True),
    Case(400, "n", "--request-bound n=N", posted({"n": 1000})),
    Case(400, "depth", "--request-bound depth=N", posted(b'{"a":' + b"[" * 99 + b"]" * 99 + b"}")),
    Case(400, "fields", "--request-bound fields=N", posted({str(n): 0 for n in range(200)})),
    Case(400, "stops", "--request-bound stops=N", posted({"stop": ["a"] * 300})),
    Case(400, "messages", "1025 are more than 1024", posted({"messages": [1] * 1025})),
    Case(400, "header", "give seconds, 0 or more", posted({}, "X-Banaserve-SLO-TTFT: soon")),
    Case(400, "tenant", "no tenant's name", posted({}, f"{TENANT_FIELD}: odd", key="balancer")),
    Case(
        *(400, "grammar", "grammar says no", posted(GRAMMAR)),
        grammars=Refusing(HTTPStatus.BAD_REQUEST, "grammar"),
    ),
    Case(401, "key", "no valid API key", posted({}, key="bad")),
    Case(401, "key", "no valid API key", said(HEAD, "Content-Length: 0\r\n\r\n")),
    Case(401, "metrics_key", "--metrics-key", said("GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n")),
    Case(408, "head_time", "the head took too long", half_a_head, is_closed=True),
    Case(408, "body_time", "the body took too long", half_a_body, is_closed=True),
    Case(413, "body_size", "--max-body-size", announced(2**20 + 1), is_closed=True),
    Case(
        *(413, "values", "--request-bound values=N", posted({"prompt": [1] * 200})),
        config=replace(CONFIG, request_bounds=(("values", 100),)),
    ),
    Case(
        *(413, "grammar_bytes", "--request-bound grammar_bytes=N"),
        posted({"structured_outputs": {"regex": "a" * 2**19}}),
    ),
    Case(
        *(429, "requests", "1 requests are under way", posted({})),
        config=replace(CONFIG, max_concurrent_requests=1),
    ),
    Case(429, "max_requests", "1 requests at once", posted({}), config=keys(max_requests=1)),
    Case(
        *(429, "requests_per_minute", "1 requests per minute", posted({})),
        config=keys(requests_per_minute=1),
    ),
    Case(431, "head_size", "or 256 fields", said(HEAD, "a:b\r\n" * 300), is_closed=True),
    Case(431, "head_size", "65536 bytes", said(HEAD, "a:", b"b" * 2**17), is_closed=True),
    Case(
        *(503, "connections", "too many connections are open", connected),
        limits=patient(max_connections=1),
        is_closed=True,
    ),
    Case(
        *(503, "bodies", "hold 1000 bytes", more_than_all_may_hold),
        config=replace(CONFIG, max_body_size="1000"),
        patches={"_MAX_HELD_BYTES": 1000},
        is_closed=True,
    ),
    Case(
        *(503, "grammar_check", "grammar_check says no", posted(GRAMMAR)),
        grammars=Refusing(HTTPStatus.SERVICE_UNAVAILABLE, "grammar_check"),
    ),
]


def counted(cause: str, status: int) -> float:
    labels = {"cause": cause, "status": str(status)}
    return REGISTRY.get_sample_value("banaserve_refused_total", labels) or 0.0


@contextlib.asynccontextmanager
async def a_stream(rig: Rig) -> AsyncIterator[None]:
    """Of a client with a key; it comes to its end whatever is refused meanwhile."""
    known = await rig.caller()
    await known.send(f"POST /v1/stream HTTP/1.1\r\nHost: d\r\n{KEY}Content-Length: 0\r\n\r\n")
    assert (await known.head())[0] == 200
    yield
    rig.app.may_go_on.set()
    body = b""
    while size := int(await known.within(known.reader.readuntil(b"\r\n")), 16):
        body += (await known.within(known.reader.readexactly(size + 2)))[:-2]
    assert body == b"".join(b"data: %d\n\n" % number for number in range(NUM_EVENTS))


@pytest.mark.parametrize("case", CASES, ids=lambda one: f"{one.status}-{one.cause}")
@on_uvloop
async def test_a_refusal_is_one_line_counted_and_logged_once_a_second(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(refusals, "_log", refusals.RefusalLog(lines.append, lambda: 100.0))
    for name, value in case.patches.items():
        monkeypatch.setattr(front_app, name, value)
    before = counted(case.cause, case.status)
    guards = partial(guarded, config=case.config, grammars=case.grammars)
    async with serving(case.limits, guards=guards) as rig, a_stream(rig):
        for number in range(1, TIMES + 1):
            caller = await case.provoke(rig)
            status, fields = await caller.head()
            body = await caller.within(caller.reader.readexactly(int(fields["content-length"])))
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (case.status, case.status)
            assert error["type"] == HTTPStatus(case.status).phrase
            assert case.says in error["message"]
            assert "\n" not in error["message"]
            assert ("retry-after" in fields) == (status in (429, 503))
            assert ("www-authenticate" in fields) == (status == 401)
            if case.is_closed:
                assert await caller.is_closed()
            caller.hang_up()
            assert counted(case.cause, case.status) == before + number
        of_cause = [one for one in lines if one.startswith(f"refused ({case.status}): ")]
        assert of_cause == [f"refused ({case.status}): {error['message']}"]


def test_the_table_has_every_status_that_clients_are_told() -> None:
    assert {case.status for case in CASES} == {400, 401, 408, 413, 429, 431, 503}
