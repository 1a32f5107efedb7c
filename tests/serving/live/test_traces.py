"""A request's spans at a collector, and its trace in examples of histograms: of real engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.serving.tracing.spans import SpanName
from observing import writer
from otlp_receiver import OtlpReceiver, ReceivedSpan
from server_run import Run

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m"
OUTPUT_TOKENS = 40
PROMPT = [100 + (i * 31) % 4000 for i in range(300)]
SERVE_OPTIONS = ("--pd", "1:2", "--dtype", "float32", "--skip-prefill-below-tokens", "16")
OF_REQUEST = (
    *(SpanName.RECEIVE, SpanName.PREPARE, SpanName.ROUTE, SpanName.WAIT, SpanName.QUEUE),
    *(SpanName.PREFILL, SpanName.HAND_OVER, SpanName.DECODE, SpanName.RESPOND),
)
"""Parts of a request that follow each other."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    one = OtlpReceiver()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def server(serve, receiver: OtlpReceiver) -> Iterator[Run]:
    run = serve(*SERVE_OPTIONS, "--otlp-traces-endpoint", receiver.url)
    yield run
    assert run.end() == 0


def traceparent(number: int) -> tuple[str, dict[str, str]]:
    trace_id = f"{number:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-00000000000000aa-01"}


async def stream(
    server: Run,
    headers: dict[str, str],
    kill_after: int | None = None,
    num_tokens: int = OUTPUT_TOKENS,
) -> str:
    """The text of a stream, under which the engine that decodes it may be killed."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    text, num_events = "", 0
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            text += event["choices"][0]["text"]
            num_events += 1
            if num_events == kill_after:
                *_, last = AdminClient(*find_admin(server.run_dir)).requests(1)
                os.kill(writer(server.run_dir, last.instances[-1]), signal.SIGKILL)
    return text


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return sorted((one for one in spans if one.name == name), key=lambda one: one.start_s)


async def test_a_request_over_two_legs(server: Run, receiver: OtlpReceiver) -> None:
    trace_id, headers = traceparent(1)
    await stream(server, headers)
    spans = await asyncio.to_thread(receiver.trace, trace_id)
    [prefill], [handed], [decode] = (
        named(spans, name) for name in ("prefill", "hand-over", "decode")
    )
    assert prefill.attributes["banaserve.process"] == "p0"
    assert handed.attributes["banaserve.process"] == decode.attributes["banaserve.process"]
    # The first token is prefill's, the second that of the step which fetches.
    assert decode.attributes["banaserve.tokens"] >= OUTPUT_TOKENS - 2
    by_id = {one.span_id: one for one in spans}
    assert by_id[named(spans, "save")[0].parent_id] is prefill
    assert by_id[named(spans, "fetch")[0].parent_id] is handed
    assert named(spans, "route")[0].attributes["banaserve.reason"] == "two_legs"
    [server_span] = [one for one in spans if one.kind == 2]
    [request] = [one for one in spans if "gen_ai.operation.name" in one.attributes]
    assert "banaserve.missing" not in request.attributes
    above = {server_span.span_id, request.span_id}
    parts = [one for one in spans if one.parent_id in above and one.name in OF_REQUEST]
    assert sum(one.took_s for one in parts) == pytest.approx(server_span.took_s, abs=1e-3)
    assert not any(one.is_error for one in spans)


async def test_a_death_in_mid_stream_is_seen(server: Run, receiver: OtlpReceiver) -> None:
    # So long that the engine has not ended it when its instance has been looked up and killed.
    expected = await stream(server, {}, num_tokens=400)
    trace_id, headers = traceparent(2)
    assert await stream(server, headers, kill_after=10, num_tokens=400) == expected
    spans = await asyncio.to_thread(receiver.trace, trace_id)
    died, went_on = named(spans, "decode")
    assert died.is_error
    assert not went_on.is_error
    assert died.attributes["banaserve.process"] != went_on.attributes["banaserve.process"]
    assert named(spans, "route")[-1].attributes["banaserve.retries"] == 1
    assert named(spans, "prefill")[-1].attributes["banaserve.resumed_tokens"] >= 10


def test_examples_of_histograms_lead_to_traces(server: Run) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    page = httpx.get(f"{server.url}/metrics", headers={"Accept": accept}, timeout=60)
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    families = {one.name: one for one in text_string_to_metric_families(page.text)}
    for name in ("banaserve_time_to_first_token_seconds", "banaserve_request_duration_seconds"):
        found = [one.exemplar for one in families[name].samples if one.exemplar]
        assert {one.labels["trace_id"] for one in found} & {f"{1:032x}", f"{2:032x}"}
    assert families["banaserve_kvstore_hits"].type == "counter"
    assert any(name.startswith("vllm:") for name in families)
    plain = httpx.get(f"{server.url}/metrics", timeout=60)
    assert plain.headers["content-type"].startswith("text/plain")
    assert "trace_id" not in plain.text
