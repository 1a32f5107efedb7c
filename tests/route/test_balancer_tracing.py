"""A request's path: one trace over two balancers, and lines that hold no prompt."""

from __future__ import annotations

import socket

import msgspec
import pytest

from banaserve.cli import main as cli
from banaserve_route.balancer.config import (
    BalancerSettings,
    PeerSettings,
    PolicySettings,
    ReplicaSettings,
)
from banaserve_route.balancer.tracing import Spans
from waiting import until

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.mark.parametrize("states", [["a=b"], ["a=b", "c=d"]])
async def test_trace_context_passes_on_without_a_collector(house, states):
    replica = await house.replica()
    await house.balance(replica)
    fields = "".join(f"tracestate: {state}\r\n" for state in states)
    await house.ask(fields=f"traceparent: {PARENT}\r\n{fields}")
    asked = replica.asked[0]
    assert asked.field("traceparent") == PARENT
    assert [value for name, value in asked.fields if name == "tracestate"] == states


async def test_a_path_over_two_balancers_is_one_trace(house):
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporters = [export.InMemorySpanExporter() for _ in range(2)]
    replica = await house.replica()
    far, port, _ = await house.open(
        BalancerSettings(region="us", peer_key="k", replicas=(ReplicaSettings(url=replica.url),))
    )
    near, house.port, _ = await house.open(
        BalancerSettings(
            region="eu",
            peer_key="k",
            policy=PolicySettings(name="skywalker"),
            peers=(PeerSettings(region="us", url=f"http://127.0.0.1:{port}"),),
        )
    )
    for balancer, exporter in zip((near, far), exporters, strict=True):
        spans = Spans("", balancer.settings.region, SimpleSpanProcessor(exporter))
        balancer.observers.append(spans)
    reply = await house.ask(body=b'{"prompt": "secret"}', fields=f"traceparent: {PARENT}\r\n")
    assert reply.status == 200
    await house.until(lambda: len(exporters[1].get_finished_spans()) == 2)
    attempt, route = exporters[0].get_finished_spans()
    far_attempt, far_route = exporters[1].get_finished_spans()
    assert f"{route.parent.span_id:016x}" == PARENT.split("-")[2]
    assert attempt.parent.span_id == route.context.span_id == far_route.parent.span_id
    assert far_attempt.parent.span_id == far_route.context.span_id
    traces = {one.context.trace_id for one in (attempt, route, far_attempt, far_route)}
    assert {f"{one:032x}" for one in traces} == {PARENT.split("-")[1]}
    assert attempt.attributes["banaserve.target"] == "region:us"
    assert far_attempt.attributes["banaserve.target"] == replica.id
    assert (
        replica.asked[0].field("traceparent").split("-")[2] == f"{far_route.context.span_id:016x}"
    )
    every = [
        value
        for one in (attempt, route, far_attempt, far_route)
        for value in one.attributes.values()
    ]
    assert not any("secret" in str(value) for value in every)


async def test_the_decision_log_has_a_line_a_request_and_no_prompt(house, tmp_path):
    async def kill(asked):
        asked.kill()

    path = tmp_path / "decisions.jsonl"
    broken, well = await house.replica(kill), await house.replica()
    await house.balance(broken, well, decision_log=str(path))
    for _ in range(3):
        await house.ask(body=b'{"prompt": "secret", "model": "m"}')
    await until(lambda: path.read_bytes().count(b"\n") == 3)  # nothing is closed
    text = path.read_bytes()
    assert b"secret" not in text
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    assert [(line["status"], line["model"], line["was_forwarded"]) for line in lines] == [
        (200, "m", False)
    ] * 3
    attempts = [line["attempts"] for line in lines]
    assert [each[-1]["target"] for each in attempts] == [well.id] * 3
    assert max(map(len, attempts)) > 1
    assert all({"waited_ms", "first_byte_ms", "ended_ms"} <= set(each[-1]) for each in attempts)


def test_a_log_that_cannot_be_written_is_named(tmp_path, capfd):
    path = tmp_path / "none" / "log"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    argv = ["--replica", "http://127.0.0.1:9", "--port", str(port), "--decision-log", str(path)]
    assert cli.main(["route", *argv]) == cli.EXIT_USER_ERROR
    assert f"cannot write {path}" in capfd.readouterr().err
