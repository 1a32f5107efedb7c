"""How a step is cut, and when that is refused."""

from __future__ import annotations

import itertools
import socket
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.base.errors import MigrationError
from banaserve.engine.compat.runner import attention as compat
from banaserve.migration import checks
from banaserve.migration.microbatch import planner
from banaserve.migration.microbatch.pipeline import microbatch_blocker, seen_of, work_of
from banaserve.migration.microbatch.planner import (
    MicroBatchWork,
    StageTimes,
    flow_makespan_s,
    plan_microbatches,
)
from banaserve.migration.modules.layer_proxy import LayerOrder
from banaserve.migration.rpc.guest_channel import GuestChannel
from banaserve.orchestrator.control.model.overlapping import makespan_s
from banaserve.transport.channels.connect import over_unix
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import Message, Tensor
from depth import seeds

HALVES = [(planner.HERE, 15), ("g", 15)]


def learnt(fixed_s: float, token_s: float, stages: tuple[str, ...] = (planner.HERE, "g")) -> Any:
    """Times of layers that take so much each, as steps of many sizes have shown."""
    times = StageTimes()
    for tokens in [1, 8, 32, 64, 128, 512, 2048] * 6:
        work = MicroBatchWork(tokens, tokens * tokens / 2)
        for stage in stages:
            times.observe(stage, 15, work, 15 * (fixed_s + token_s * tokens))
    return times


def prompt(num_tokens: int, behind: int = 0) -> Any:
    """At how many tokens each token of one prompt looks."""
    return np.arange(behind + 1, behind + num_tokens + 1, dtype=float)


def test_a_large_step_is_cut_and_half_the_layers_nearly_halve_it() -> None:
    plan = plan_microbatches(learnt(1e-4, 4e-5), HALVES, prompt(2048), 64)
    assert 8 <= len(plan.sizes) <= 64
    assert 1.6 < plan.waiting_s / plan.predicted_s < 2.0


def test_parts_take_equally_long_though_late_tokens_look_at_more() -> None:
    fixed_s, token_s, pair_s = 1e-4, 4e-5, 8e-8
    times = StageTimes()
    for tokens, behind in itertools.product([16, 128, 512, 2048], [0, 500, 3000] * 4):
        work = MicroBatchWork(tokens, prompt(tokens, behind).sum())
        for stage, _ in HALVES:
            layer_s = fixed_s + token_s * tokens + pair_s * work.pairs
            times.observe(stage, 15, work, 15 * layer_s)
    plan = plan_microbatches(times, HALVES, prompt(4000), 16)

    def part_s(begin: int, end: int) -> float:
        pairs = float(prompt(4000)[begin:end].sum())
        return 15 * (fixed_s + token_s * (end - begin) + pair_s * pairs)

    ends = [0, *np.cumsum(plan.sizes).tolist()]
    mine = [part_s(*cut) for cut in itertools.pairwise(ends)]
    even = [part_s(*cut) for cut in itertools.pairwise(range(0, 4001, 4000 // len(mine)))]
    assert plan.sizes[0] > 2 * plan.sizes[-1]
    assert max(mine) < 0.75 * max(even)
    assert plan.predicted_s == pytest.approx(sum(mine) + max(mine), rel=0.1)


def test_the_makespan_of_parts_that_are_not_alike() -> None:
    """The second part leaves the first stage at 4 and finds the second free; the third waits."""
    each = np.array([1.0, 3.0, 1.0]), np.array([2.0, 4.0, 1.0])
    assert flow_makespan_s(each) == 9.0
    assert flow_makespan_s([np.full(4, 2.0), np.full(4, 3.0)]) == makespan_s((2.0, 3.0), 4)


def test_the_makespan_is_that_of_passing_part_after_part() -> None:
    draw = np.random.default_rng(7)
    for _ in range(50):
        each = draw.uniform(0.0, 1.0, (draw.integers(1, 5), draw.integers(1, 20)))
        free_at = np.zeros(len(each))
        for part in each.T:
            at = 0.0
            for stage, took in enumerate(part):
                at = free_at[stage] = max(at, free_at[stage]) + took
        assert flow_makespan_s(list(each)) == pytest.approx(free_at[-1])


def test_what_is_bound_by_reading_weights_is_not_cut() -> None:
    plan = plan_microbatches(learnt(2e-3, 1e-5), HALVES, np.full(32, 100.0), 64)
    assert plan.sizes == (32,)
    assert plan.predicted_s == plan.waiting_s


@pytest.mark.parametrize(("most", "tokens"), [(1, 4096), (64, 31), (64, 1)])
def test_no_more_parts_than_are_allowed_or_filled(most: int, tokens: int) -> None:
    assert plan_microbatches(learnt(1e-9, 1e-4), HALVES, np.ones(tokens), most).sizes == (tokens,)


def test_a_slow_guest_gains_less() -> None:
    times = learnt(1e-4, 4e-5, (planner.HERE,))
    for tokens in [1, 32, 512, 2048] * 8:
        times.observe("g", 15, MicroBatchWork(tokens, tokens**2 / 2), 15 * (3e-4 + 12e-5 * tokens))
    plan = plan_microbatches(times, HALVES, prompt(2048), 64)
    assert 1.0 < plan.waiting_s / plan.predicted_s < 4 / 3
    times.keep([])
    assert plan_microbatches(times, HALVES, prompt(2048), 64).waiting_s < plan.waiting_s


@pytest.mark.parametrize("seed", seeds(40, 40))
def test_parts_hold_all_tokens_and_are_what_kernels_work_on(seed: int) -> None:
    draw = np.random.default_rng(seed)
    queries = draw.integers(1, 300, draw.integers(1, 6))
    seen = np.concatenate([prompt(n, int(draw.integers(0, 2000))) for n in queries])
    times = learnt(10 ** draw.uniform(-9, -3), 10 ** draw.uniform(-6, -3))
    most = int(draw.integers(1, 65))
    plan = plan_microbatches(times, HALVES, seen, most)
    assert sum(plan.sizes) == len(seen)
    assert 1 <= len(plan.sizes) <= most
    assert min(plan.sizes) > 0
    assert all(size % planner.LEAST_TOKENS == 0 for size in plan.sizes[:-1])
    assert plan.predicted_s <= plan.waiting_s


def batch(queries: list[int], contexts: list[int]) -> CommonAttentionMetadata:
    """Requests with so many tokens to compute behind so many others."""
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([q + c for q, c in zip(queries, contexts, strict=True)])
    num_tokens = sum(queries)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        num_reqs=len(queries),
        num_actual_tokens=num_tokens,
        max_query_len=max(queries),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(len(queries))[:, None],
        slot_mapping=torch.arange(num_tokens),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )


@pytest.mark.parametrize("sizes", [[30], [1, 29], [7, 7, 7, 7, 2], [1] * 30, [12, 18], [2, 10, 18]])
def test_parts_see_what_the_whole_sees(sizes: list[int]) -> None:
    whole = batch([1, 1, 10, 18], [100, 3, 0, 40])
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 1, 10, 18]))

    def seen(common: CommonAttentionMetadata) -> list[tuple[int, int, int]]:
        """For each token its request, its slot and how many tokens it looks at."""
        found = []
        starts = common.query_start_loc_cpu.tolist()
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            for token in range(begin, end):
                length = int(common.seq_lens[row]) - (end - 1 - token)
                request = int(common.block_table_tensor[row, 0])
                found.append((request, int(common.slot_mapping[token]), length))
        return found

    parts = compat.split_batch(whole, sizes)
    assert [p.num_actual_tokens for p in parts] == sizes
    together = [token for part in parts for token in seen(part)]
    assert together == seen(whole)
    assert [request for request, _, _ in together] == owner.tolist()
    assert sum(work_of(p).pairs for p in parts) == pytest.approx(work_of(whole).pairs)
    assert work_of(whole).pairs == sum(length for _, _, length in seen(whole))
    assert seen_of(whole).tolist() == [length for _, _, length in seen(whole)]


def test_a_step_that_is_no_rows_of_tokens_is_not_cut() -> None:
    common = batch([4], [0])
    context: Any = SimpleNamespace(attn_metadata={}, slot_mapping={})
    rows = {"positions": torch.zeros(4), "hidden_states": torch.zeros(4, 2), "residual": None}
    assert microbatch_blocker(rows, common, context) == ""
    assert "positions" in microbatch_blocker(
        {**rows, "positions": torch.zeros(3, 4)}, common, context
    )
    assert "later" in microbatch_blocker(rows, common.replace(causal=False), context)
    assert "padded" in microbatch_blocker(rows, common.replace(num_actual_tokens=8), context)
    several: Any = SimpleNamespace(attn_metadata=[{}], slot_mapping={})
    assert "cut it already" in microbatch_blocker(rows, common, several)


class Layer(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, residual: Any = None) -> Any:
        return hidden_states, residual


def order(calls: list[tuple[int, tuple[Any, ...], Any]]) -> LayerOrder:
    found, layer = LayerOrder(3), Layer()
    for index, args, returned in calls:
        found.called(index, layer, args, {})
        found.returned(index, returned)
    return found


def test_a_model_that_passes_on_what_it_gets() -> None:
    p, a, b, c, d = (object() for _ in range(5))
    chain = order([(0, (p, a, None), (b, c)), (1, (p, b, c), (d, a)), (2, (p, d, a), (a, b))])
    assert chain.is_known
    assert chain.blocker == ""


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((1, ("p", "other", "c"), ("d", "e")), "gets hidden_states from elsewhere"),
        ((1, ("q", "b", "c"), ("d", "e")), "gets positions from elsewhere"),
        ((2, ("p", "b", "c"), ("d", "e")), "out of turn"),
        ((1, ("p", "b", "c", "more"), ("d", "e")), "other arguments"),
    ],
)
def test_a_model_that_does_something_between_its_layers(second: Any, why: str) -> None:
    found = order([(0, ("p", "a", None), ("b", "c")), second])
    assert found.is_known
    assert why in found.blocker


@pytest.mark.parametrize(
    ("facts", "connector", "why"),
    [
        ({}, None, ""),
        ({}, "StoreConnector", ""),
        ({}, "NixlConnector", "NixlConnector"),
        ({"is_encoder_decoder": True}, None, "encoder"),
        ({"is_mm_prefix_lm": True}, None, "image"),
        ({"uses_mrope": True}, None, "positions"),
        ({"use_mla": True}, None, "MLA"),
        ({"num_ranks": 2}, None, "ranks"),
    ],
)
def test_engines_whose_steps_cannot_be_cut(facts: Any, connector: str | None, why: str) -> None:
    facts = dict(facts)
    parallel = SimpleNamespace(tensor_parallel_size=facts.pop("num_ranks", 1))
    kinds = ("is_encoder_decoder", "is_mm_prefix_lm", "uses_mrope", "use_mla")
    plain = dict.fromkeys(kinds, False)
    transfer = connector and SimpleNamespace(kv_connector=connector)
    config: Any = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(**{**plain, **facts}),
        kv_transfer_config=transfer,
    )
    found = checks.overlap_blocker(config)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(("backend", "cannot"), [("FLASH_ATTN", False), ("FLASHINFER", True)])
def test_steps_whose_attention_plans_one_batch_are_not_cut(backend: str, cannot: bool) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_mm_prefix_lm=False, uses_mrope=False, use_mla=False
        ),
        kv_transfer_config=None,
    )
    attention = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    assert ("FlashInfer" in checks.overlap_blocker(config, [attention])) is cannot


def test_what_cannot_be_cut_stays_as_it_is() -> None:
    from banaserve.migration.microbatch.overlap import Overlap

    overlap = Overlap(nn.ModuleList([Layer()]), None, "it is odd", 1)  # type: ignore[arg-type]
    with pytest.raises(MigrationError, match="it is odd"):
        overlap.allow(4)
    overlap.allow(1)
    assert overlap.status().blocker == "it is odd"


def large(number: int) -> Message:
    """More than a socket holds."""
    data = torch.full((4 << 20,), number % 256, dtype=torch.uint8).numpy()
    return Message(str(number).encode(), (Tensor("uint8", (4 << 20,), data),))


def test_parts_larger_than_a_socket_pass_each_other() -> None:
    ours, theirs = socket.socketpair()
    host, channel = over_unix(ours), over_unix(theirs)
    guest_channel = GuestChannel(channel)

    def guest() -> None:
        try:
            while True:
                message = guest_channel.receive(3600.0)
                guest_channel.expect(int(message.body) if int(message.body) < 10 else 0)
                guest_channel.answer(message, message)
        except PeerGoneError:
            guest_channel.close()
            channel.close()

    thread = threading.Thread(target=guest)
    thread.start()
    for sent in ([3, 2, 1, 0], [0], [2, 1, 0]):
        for number in sent:
            host.send(large(number), 60.0)
        assert [int(host.receive(60.0).body) for _ in sent] == sent
    host.close()
    thread.join()
