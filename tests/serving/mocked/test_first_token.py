"""The time to first token is when the token was there, streamed or not, as vLLM's own figure says.

Steps of mock engines take as long as they are told to: an answer takes many times its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from mock_facts import MockOptions
from mock_run import MockRun

pytestmark = pytest.mark.deep

OURS = "banaserve_time_to_first_token_seconds_sum"
VLLMS = "vllm:time_to_first_token_seconds_sum"
NUM_TOKENS = 60
NUM_SEQUENCES = 3


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "1:1", mocks=MockOptions(step_ms=20.0))
    yield run
    assert run.end() == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("n", [1, NUM_SEQUENCES])
@pytest.mark.parametrize("legs", [1, 2])
def test_it_is_when_the_token_was_there(server: MockRun, stream: bool, n: int, legs: int) -> None:
    def figures() -> tuple[float, float]:
        return server.metric(OURS), server.metric(VLLMS, instance_id="d0")

    length = 300 if legs == 2 else 3  # shorter prompts are computed where they are decoded
    body = {"prompt": [7] * length, "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": n}
    ours_before, vllms_before = figures()
    answer = server.post("/v1/completions", {**body, "stream": stream, "seed": 1})
    assert answer.status_code == 200
    ours, vllms = (
        now - before for now, before in zip(figures(), (ours_before, vllms_before), strict=True)
    )
    (last,) = AdminClient(*find_admin(server.run_dir)).requests(1)
    assert last.output_tokens == n * NUM_TOKENS
    assert last.ttft_s == pytest.approx(ours, abs=1e-6)
    # vLLM counts each sequence, and a prompt's own leg not for the decode engine. The time of
    # another token would be away by most of the answer's; a busy machine delays one by some steps.
    assert abs(ours - vllms / n) < last.took_s / 2
