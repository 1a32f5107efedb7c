"""vLLM's request metrics, summed over all instances and legs, count each request once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until, writer
from server_run import Metrics
from streams import asked_all, back, greedy

pytestmark = pytest.mark.room

NUM_STREAMS, NUM_TOKENS, PROMPT_TOKENS = 12, 24, 301
LONG_TOKENS = 400
"""Ten seconds of steps: a busy machine may look late."""
ONCE_A_SEQUENCE = (
    "request_success_total",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
    "request_params_max_tokens_count",
    "request_prefill_kv_computed_tokens_count",
    "request_num_preemptions_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_inference_time_seconds_count",
    "request_time_per_output_token_seconds_count",
    "time_to_first_token_seconds_count",
    "e2e_request_latency_seconds_count",
)
ONCE_A_REQUEST = ("request_params_n_count", "request_max_num_generation_tokens_count")
GENERATED = "vllm:generation_tokens_total"
OF_PROMPTS = ("prompt_tokens_total", "prompt_tokens_by_source_total", "request_prompt_tokens_sum")
OF_OUTPUT = (
    "generation_tokens_total",
    "request_generation_tokens_sum",
    "request_max_num_generation_tokens_sum",
)


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "2:2", mocks=MockOptions(step_ms=25.0))
    yield run
    assert run.end() == 0


def total(found: Metrics, name: str, **labels: str) -> float:
    samples = found.get(f"vllm:{name}", {})
    return sum(value for given, value in samples.items() if labels.items() <= dict(given).items())


def counted(before: Metrics, after: Metrics, **labels: str) -> Callable[[str], float]:
    return lambda name: total(after, name, **labels) - total(before, name, **labels)


def expected(num_requests: int, prompt_tokens: int, tokens: int, n: int = 1) -> dict[str, float]:
    """What one vLLM engine would count."""
    sequences = num_requests * n
    return {
        **dict.fromkeys(ONCE_A_SEQUENCE, sequences),
        **dict.fromkeys(ONCE_A_REQUEST, num_requests),
        **dict.fromkeys(OF_PROMPTS, sequences * prompt_tokens),
        **dict.fromkeys(OF_OUTPUT, sequences * tokens),
        "request_max_num_generation_tokens_sum": num_requests * tokens,
        "request_params_n_sum": sequences,
        "inter_token_latency_seconds_count": sequences * (tokens - 1),
    }


LEGS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "whole": (3, {}, {"whole"}),
    "two legs": (PROMPT_TOKENS, {}, {"prefill", "decode"}),
    "two legs, and decode samples all": (
        PROMPT_TOKENS,
        {"repetition_detection": {"max_pattern_size": 20, "min_count": 50}},
        {"prefill", "decode"},
    ),
    "prompt's probabilities": (PROMPT_TOKENS, {"prompt_logprobs": 1}, {"whole"}),
}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "at once"])
@pytest.mark.parametrize("way", LEGS)
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_counts_once(server: MockRun, way: str, stream: bool, n: int) -> None:
    num_prompt, more, legs = LEGS[way]
    if "prompt_logprobs" in more and stream:
        pytest.skip("vLLM refuses these of a stream")
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "n": n, "seed": 1, "stream": stream}
    before = server.metrics()
    prompt = [7 + len(way) + 10 * n + stream] * num_prompt
    answer = server.post("/v1/completions", {**body, **more, "prompt": prompt})
    assert answer.status_code == 200
    after = server.metrics()
    wanted = expected(1, num_prompt, NUM_TOKENS, n)
    assert {name: counted(before, after)(name) for name in wanted} == wanted
    for leg in ("prefill", "decode", "whole"):
        of_leg = counted(before, after, leg=leg)
        # Sequences after the first need no prefill leg of their own.
        has_others = leg == "whole" and n > 1
        assert (of_leg("prompt_tokens_total") > 0) == (leg in legs - {"decode"} or has_others)
        assert (of_leg("request_success_total") > 0) == (leg in legs - {"prefill"} or has_others)


def test_what_is_of_engines_has_no_leg(server: MockRun) -> None:
    found = server.metrics()
    for name in ("num_requests_running", "iteration_tokens_total_count", "num_preemptions_total"):
        labels = [dict(given) for given in found[f"vllm:{name}"]]
        assert sorted(one["instance_id"] for one in labels) == ["d0", "d1", "p0", "p1"]
        assert not any("leg" in one for one in labels)


@pytest.mark.parametrize("act", ["d0 is drained", "p0 is killed", "d1 is killed"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "at once"])
def test_a_request_that_goes_on_elsewhere_counts_once(
    server: MockRun, act: str, stream: bool
) -> None:
    name, _, what = act.partition(" ")
    admin = AdminClient(*find_admin(server.run_dir))
    first = 20 * (1 + ("d0", "p0", "d1").index(name)) + 100 * stream
    kinds = greedy(NUM_STREAMS, first, num_tokens=LONG_TOKENS)
    for one in kinds.values():
        one.body["stream"] = stream
    before = server.metrics()

    def generated() -> float:
        return server.metric(GENERATED) - sum(before[GENERATED].values())

    def do() -> None:
        until(lambda: generated() >= 4 * NUM_STREAMS, "all go on")
        if what == "is drained":
            admin.drain(name)
        elif what == "is killed":
            os.kill(pid, signal.SIGKILL)

    async def asked() -> None:
        asking = asyncio.create_task(asked_all(server, kinds))
        await asyncio.to_thread(do)
        await asking

    pid = writer(server.run_dir, name)
    asyncio.run(asked())
    after = server.metrics()
    if what == "is drained":
        admin.release(name)
    else:
        back(server, name, pid)
    if name.startswith("d"):
        gone_on = "banaserve_streams_resumed_total"
        assert sum(after[gone_on].values()) > sum(before[gone_on].values())
    wanted = expected(NUM_STREAMS, PROMPT_TOKENS, LONG_TOKENS)
    assert {name: counted(before, after)(name) for name in wanted} == wanted
