"""The forms of a request on its legs, and when the prefill leg's token is the first one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.logprobs import Logprob, append_logprobs_for_next_position
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.runner.hooks import RewindableGenerator, advance, restore_output
from banaserve.engine.connector.handover import Handover
from banaserve.engine.continuation import logprob_rows, output_of, with_output
from banaserve.serving.instances.supervisor import RestartPolicy
from banaserve.serving.requests.intake import (
    end_with_context,
    first_token_blocker,
    give_seed,
    take_client_args,
)
from banaserve.serving.requests.legs import decode_leg, prefill_leg


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=32, **options)


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(seed=3),
        greedy(stop=["a", "bc"], include_stop_str_in_output=True),
        greedy(stop_token_ids=[5], min_tokens=4, ignore_eos=True),
        greedy(logit_bias={3: 1.5}, allowed_token_ids=[1, 2]),
        greedy(output_kind=RequestOutputKind.DELTA, skip_special_tokens=False),
        greedy(extra_args={}),
    ],
)
def test_greedy_without_a_look_back_takes_prefills_token(params: SamplingParams) -> None:
    assert first_token_blocker(params) is None


SEEDED = {"temperature": 0.7, "seed": 1}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(**SEEDED, top_p=0.9, top_k=20),
        SamplingParams(**SEEDED, n=2),
        greedy(presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1),
        greedy(logprobs=1),
        greedy(logprobs=0),
        greedy(bad_words=["no"]),
        greedy(structured_outputs=StructuredOutputsParams(regex="a+")),
    ],
)
def test_what_looks_back_over_the_output_takes_it_along(params: SamplingParams) -> None:
    assert first_token_blocker(params) is None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(temperature=0.7), "unseeded"),
        (greedy(logprob_token_ids=[7]), "logprob_token_ids"),
        (greedy(logprobs=1, flat_logprobs=True), "flat_logprobs"),
        (greedy(thinking_token_budget=0), "thinking_token_budget"),
        (greedy(prompt_logprob_token_ids=np.ones((2, 2), int)), "prompt_logprob_token_ids"),
        (greedy(prompt_logprobs=1), "prompt_logprobs"),
        (greedy(extra_args={"anything": 1}), "extra_args"),
    ],
)
def test_everything_else_lets_decode_sample(params: SamplingParams, reason: str) -> None:
    assert first_token_blocker(params) == reason


def request(params: SamplingParams, num_tokens: int = 10) -> compat.EngineCoreRequest:
    return compat.EngineCoreRequest(
        request_id="r-1",
        prompt_token_ids=list(range(num_tokens)),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="r",
    )


@pytest.mark.parametrize(("max_model_len", "max_tokens"), [(11, 1), (20, 10), (100, 32)])
def test_no_leg_is_as_long_as_the_context(max_model_len: int, max_tokens: int) -> None:
    given = request(greedy(min_tokens=20))
    end_with_context(given, max_model_len)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(params_of(given)), type=SamplingParams)
    assert received.max_tokens == max_tokens


def params_of(leg: compat.EngineCoreRequest) -> SamplingParams:
    assert leg.sampling_params is not None
    return leg.sampling_params


def test_the_prefill_leg_computes_one_token_and_leaves_the_original_alone() -> None:
    given = request(greedy(min_tokens=4, stop=["x"], logit_bias={1: 2.0}))
    leg = prefill_leg(given, True, Handover(leaves_tail=True))
    params = params_of(leg)
    assert (leg.request_id, leg.external_req_id) == ("r-1-p", "r-p")
    assert (params.max_tokens, params.min_tokens, params.stop) == (1, 1, [])
    assert params.logit_bias == {1: 2.0}
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    transfer = (params.extra_args or {})["kv_transfer_params"]
    assert Handover.of(transfer) == Handover(leaves_tail=True)
    original = params_of(given)
    assert (original.max_tokens, original.stop, original.extra_args) == (32, ["x"], None)


def test_a_token_that_is_thrown_away_is_sampled_in_the_cheapest_way() -> None:
    given = request(SamplingParams(temperature=0.9, seed=4, logprobs=5, max_tokens=9, n=3))
    params = params_of(prefill_leg(given, False, Handover(leaves_tail=True)))
    assert (params.temperature, params.seed, params.logprobs, params.n) == (0.0, None, None, 1)


def test_the_decode_leg_brings_the_tokens_along_as_output() -> None:
    given = request(greedy(min_tokens=2, prompt_logprobs=1))
    params = params_of(leg := decode_leg(given, [7], Handover(tokens=10)))
    assert (leg.prompt_token_ids, list(output_of(params))) == (list(range(10)), [7])
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs) == (32, 2, None)
    assert Handover.of((params.extra_args or {})["kv_transfer_params"]).tokens == 10
    assert (output_of(given.sampling_params), params_of(given).prompt_logprobs) == ((), 1)


def test_of_a_leg_that_goes_on_after_a_death_all_is_looked_up() -> None:
    params = params_of(decode_leg(request(greedy()), [7, 8, 9], Handover(tokens=10)))
    assert list(output_of(params)) == [7, 8, 9]
    assert "kv_transfer_params" not in (params.extra_args or {})


def test_what_a_leg_keeps_it_keeps_after_a_death_too() -> None:
    told = Handover(tokens=10, hold=3, keep_s=60.0)
    params = params_of(decode_leg(request(greedy()), [7, 8, 9], told))
    assert Handover.of((params.extra_args or {})["kv_transfer_params"]) == Handover(keep_s=60.0)


def test_only_what_draws_gets_a_seed_and_never_another_one() -> None:
    draws, seeded, certain = (
        SamplingParams(temperature=0.7),
        SamplingParams(**SEEDED),
        greedy(),
    )
    for params in (draws, seeded, certain):
        give_seed(params)
    assert draws.seed is not None
    assert first_token_blocker(draws) is None
    assert (seeded.seed, certain.seed) == (1, None)


def test_a_client_cannot_bring_output_along() -> None:
    with pytest.raises(ValueError, match="leave it out of vllm_xargs"):
        take_client_args(greedy(extra_args=with_output(None, [10**9])))
    with pytest.raises(ValueError, match="leave it out of vllm_xargs"):
        take_client_args(greedy(extra_args={"banaserve_new": 1}))
    params = greedy(extra_args={"anything": 1})
    take_client_args(params)
    assert params.extra_args == {"anything": 1}


@pytest.mark.parametrize(
    "handover", [Handover(tokens=100), Handover(is_stored=True), Handover(leaves_tail=True)]
)
def test_a_client_cannot_say_what_a_leg_says(handover: Handover) -> None:
    """It would skip the cost gate, or have tokens counted as cached."""
    given = {"kv_transfer_params": handover.to_params()}
    with pytest.raises(ValueError, match="leave it out of kv_transfer_params"):
        take_client_args(greedy(extra_args=given))


def test_words_of_other_connectors_do_not_reach_the_engines() -> None:
    transfer = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}}
    params, alone = greedy(extra_args={**transfer, "anything": 1}), greedy(extra_args=transfer)
    for one in (params, alone):
        take_client_args(one)
    assert (params.extra_args, alone.extra_args) == ({"anything": 1}, None)


@pytest.mark.parametrize(
    ("sampled", "num_logprobs"), [(11, 0), (11, 2), (13, 2), (14, 3), (12, -1), (19, -1)]
)
def test_logprobs_become_again_what_the_engine_put_out(sampled: int, num_logprobs: int) -> None:
    likeliest = list(range(10, 20))
    values = [-0.25 * (i + 1) for i in range(10)]
    rank = likeliest.index(sampled) + 1
    shown = num_logprobs if num_logprobs >= 0 else 10
    ids = [sampled, *likeliest[:shown]]
    found: list[dict[int, Logprob]] = []

    def append(ids: list[int], values: list[float], rank: int) -> None:
        append_logprobs_for_next_position(found, ids, values, [None] * 11, rank, num_logprobs)

    append(ids, [values[likeliest.index(one)] for one in ids], rank)
    append(*logprob_rows(found[0], sampled))
    assert found[1] == found[0]
    assert set(found[0]) == set(ids)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_seeds_draws_go_on_where_they_stood(num_tokens: int) -> None:
    """As vLLM's sampler on a CPU draws them, one number a token."""

    def draw(generator: torch.Generator) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())

    whole, later = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    drawn = [draw(whole) for _ in range(num_tokens + 3)]
    advance(later, num_tokens, vocab_size=100)
    assert [draw(later) for _ in range(3)] == drawn[num_tokens:]


@pytest.mark.parametrize(
    ("told", "note"),
    [
        (Handover(tokens=10), Handover(tokens=10)),
        (Handover(is_stored=True), Handover(is_stored=True)),
        (None, Handover()),
    ],
)
def test_the_decode_leg_says_what_the_store_has(told: Handover | None, note: Handover) -> None:
    params = params_of(decode_leg(request(greedy()), [], told))
    assert Handover.of((params.extra_args or {}).get("kv_transfer_params")) == note


@pytest.mark.parametrize(
    "handover",
    [
        Handover(leaves_tail=True),
        Handover(leaves_tail=True, push_to="10.0.0.2:7100"),
        Handover(tokens=300),
        Handover(is_stored=True),
        Handover(is_stored=True, keep_s=3600.0),
    ],
)
def test_a_handover_survives_its_way_through_vllm(handover: Handover) -> None:
    assert Handover.of(handover.to_params()) == handover


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        {"banaserve_handover": True},
        {"banaserve_handover": "x"},
        {"banaserve_push_to": "h:1"},
        {"other": 1},
    ],
)
def test_what_a_client_sends_there_is_no_handover(given: dict[str, object] | None) -> None:
    assert Handover.of(given) == Handover()


def test_restarts_wait_longer_each_time_and_end() -> None:
    policy = RestartPolicy(limit=3)
    assert [policy.next_delay_s(now_s=10.0 + i) for i in range(4)] == [0.5, 1.0, 2.0, None]
    assert policy.next_delay_s(now_s=309.0) is None
    assert policy.next_delay_s(now_s=500.0) == 0.5


def test_an_instance_that_has_served_for_a_while_is_as_good_as_new() -> None:
    policy = RestartPolicy(limit=2)
    assert [policy.next_delay_s(float(i)) for i in range(2)] == [0.5, 1.0]
    policy.has_served(9.0)
    assert policy.next_delay_s(20.0) is None
    policy.has_served(10.0)
    assert policy.next_delay_s(30.0) == 0.5


def test_a_rewound_generator_draws_the_same_again() -> None:
    plain = torch.Generator().manual_seed(11)
    generator = RewindableGenerator.like(plain)
    generator.remember()
    first = torch.rand(5, generator=generator)
    generator.set_offset(generator.get_offset() - 4)
    assert torch.equal(first, torch.rand(5, generator=generator))
    assert torch.equal(first, torch.rand(5, generator=plain))
    with pytest.raises(ValueError, match="offset 8"):
        generator.set_offset(8)


def test_a_request_that_is_resumed_draws_again_what_was_dropped() -> None:
    whole, drawn = (torch.Generator().manual_seed(3) for _ in range(2))
    advance(whole, 2, vocab_size=100)
    advance(drawn, 4, vocab_size=100)  # two of the four tokens were dropped

    class Runner:
        input_batch = SimpleNamespace(vocab_size=100)
        requests = {  # noqa: RUF012 - of one test
            "a": SimpleNamespace(generator=drawn, sampling_params=SimpleNamespace(seed=3)),
            "greedy": SimpleNamespace(generator=None),
            "runs": SimpleNamespace(generator=None),
        }

        def _update_states(self, output: Any) -> None:
            pass

    restore_output(Runner, output_of)
    for resumed in ({"a", "greedy"}, set()):  # the step after it changes nothing
        names = ["runs", "greedy", "a"]
        cached = SimpleNamespace(
            req_ids=names, num_output_tokens=[9, 1, 2], resumed_req_ids=resumed
        )
        output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
        Runner()._update_states(output)
        assert torch.equal(drawn.get_state(), whole.get_state())
        advance(whole, 1, vocab_size=100)
        advance(drawn, 1, vocab_size=100)
