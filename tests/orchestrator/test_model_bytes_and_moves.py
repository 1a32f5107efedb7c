"""Bytes of models and costs of moves, against numbers worked out by hand from the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

import paper_equations
from banaserve.base.types import Module
from banaserve.orchestrator.control.costs.profile import ModelSection
from banaserve.orchestrator.control.model import moving
from banaserve.orchestrator.control.model.moving import Link
from benchmarks.drivers.layer_pipeline import Prefill
from migration_clusters import OPT_13B as OPT_13B_FACTS

OTHERS = (1, 2048)
"""Other weights, and the longest context."""

LLAMA_8B = ModelSection(
    32, 4096, 32, 8, paper_equations.llama_layer_weights(4096, 14336, 32, 8), *OTHERS
)
LLAMA_13B = ModelSection(
    40, 5120, 40, 40, paper_equations.llama_layer_weights(5120, 13824, 40, 40), *OTHERS
)
OPT_13B = ModelSection(40, 5120, 40, 40, paper_equations.opt_layer_weights(5120, 20480), *OTHERS)
GBPS_200 = 25e9
EQUATION_17 = Prefill(0.270, 32, 1000, 0.5, 4096)


def opt_13b_prefill(cached_fraction: float) -> Prefill:
    """1,000 tokens on one A100 by DistServe's fit: 18.10 + 101.91 + 7.122 ms."""
    return Prefill(0.127132, 40, 1000, cached_fraction, 20480)


@pytest.mark.parametrize(
    ("model", "head_dim", "layer_token_bytes", "token_bytes"),
    [
        (LLAMA_8B, 128, 4096, 128 * 1024),
        (LLAMA_13B, 128, 20480, 800 * 1024),
        (OPT_13B, 128, 20480, 800 * 1024),
    ],
)
def test_equations_14_to_16(
    model: ModelSection, head_dim: int, layer_token_bytes: int, token_bytes: int
) -> None:
    assert model.head_dim == head_dim
    assert model.layer_token_bytes == layer_token_bytes
    assert model.token_bytes == token_bytes


def test_weights_of_a_layer() -> None:
    assert OPT_13B.layer_weight_bytes == 2 * 314_639_360
    assert LLAMA_13B.layer_weight_bytes == 2 * 317_204_480
    assert LLAMA_8B.layer_weight_bytes == 2 * 218_112_000


@pytest.mark.parametrize(
    ("matrices", "layer_token_bytes", "tokens"),
    [
        (12 * 5120 * 5120, 20480, 30_720),
        (4 * 5120 * 5120 + 3 * 5120 * 13824, 20480, 30_976),
        (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 4096, 106_496),
    ],
)
def test_kv_outweighs_the_matrices_of_a_layer_from_here_on(
    matrices: int, layer_token_bytes: int, tokens: int
) -> None:
    assert paper_equations.crossover_tokens(2 * matrices, layer_token_bytes) == tokens
    below = paper_equations.layers_bytes(1, 2 * matrices, layer_token_bytes, tokens)
    assert below == 2 * (2 * matrices)


def test_kv_of_one_layer_of_a_full_decode_instance() -> None:
    assert paper_equations.heads_bytes(1, 40, 40, 20480, 66_144) == 1_354_629_120
    assert paper_equations.heads_bytes(10, 10, 40, 20480, 66_144) == 10 * 1_354_629_120 // 4


def test_memory_footprint() -> None:
    """40 layers of 629 MB, 1 GB apart from them, 10,000 tokens at 800 KiB."""
    total = paper_equations.memory_bytes(
        10**9, 40, OPT_13B.layer_weight_bytes, 10_000, OPT_13B.token_bytes
    )
    assert total == 10**9 + 25_171_148_800 + 8_192_000_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"num_kv_heads": 0},
        {"num_kv_heads": 3},
        {"num_heads": 7, "num_kv_heads": 7},
        {"layer_weights": 0},
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, int]) -> None:
    right = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4}
    right |= {"layer_weights": 1, "fixed_weights": 1, "max_context_tokens": 1}
    with pytest.raises(ValueError, match=r"must be|multiple"):
        ModelSection(**{**right, **wrong})


def test_equations_4_and_28() -> None:
    link = Link(GBPS_200, sync_s=0.002)
    payload = paper_equations.layers_bytes(10, 629_145_600, 20480, 30_720)
    assert payload == 20 * 629_145_600
    assert moving.migration_s(payload, link) == pytest.approx(0.50332 + 0.002, rel=1e-4)
    # As printed, ten modules would synchronise and reallocate ten times.
    ten_at_once = moving.migration_s(payload, link, realloc_s=0.003)
    assert ten_at_once == pytest.approx(0.50832, rel=1e-4)


def test_a_live_migration_stops_for_what_was_written_last() -> None:
    """10 GB at 10 GB/s while 1 GB/s is written: 1 GB, 0.1 GB, 0.01 GB; then 1 ms of copying."""
    link = Link(1e10, sync_s=0.001)
    assert paper_equations.live_stall_s(8e9, 2e9, 1e9, link) == pytest.approx(0.001 + 0.001)
    assert paper_equations.live_stall_s(8e9, 2e9, 0.0, link) == 0.001
    with pytest.raises(ValueError, match="as fast"):
        paper_equations.live_stall_s(8e9, 2e9, 1e10, link)


def test_what_a_remote_range_adds_to_each_step() -> None:
    """48 tokens of 5,120 bf16 there and back over 25 GB/s, two hops of 10 us."""
    link = Link(GBPS_200, hop_s=10e-6)
    added_s = moving.hop_s(OPT_13B_FACTS, Module(0, 10), 48, link)
    assert added_s == pytest.approx(20e-6 + 983_040 / 25e9)


def test_what_remote_heads_add_to_each_step() -> None:
    """10 of 40 heads in 40 layers, batch 48: (3 + 1) x 10 x 128 x 2 bytes a token and layer."""
    link, heads = Link(GBPS_200, hop_s=10e-6), Module(0, 40, tuple(range(10)))
    added_s = moving.hop_s(OPT_13B_FACTS, heads, 48, link)
    assert added_s == pytest.approx(40 * (20e-6 + 48 * 10_240 / 25e9))
    with_gqa_s = moving.hop_s(replace(OPT_13B_FACTS, queries_a_head=4), heads, 48, link)
    assert with_gqa_s == pytest.approx(40 * (20e-6 + 48 * 25_600 / 25e9))


@pytest.mark.parametrize(
    ("before_s", "after_s", "budget_s", "kept"),
    [
        (0.05, 0.08, 0.1, True),
        (0.05, 0.12, 0.1, False),
        (0.15, 0.12, 0.1, True),
        (0.15, 0.16, 0.1, False),
        (0.05, 9.0, None, True),
    ],
)
def test_budgets(before_s: float, after_s: float, budget_s: float | None, kept: bool) -> None:
    assert moving.within_budget(before_s, after_s, budget_s) is kept


@pytest.mark.parametrize("wrong", [(0.0, 0.0, 0.0), (1.0, -1.0, 0.0), (1.0, 0.0, -1.0)])
def test_impossible_links_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        Link(*wrong)


def test_equation_17() -> None:
    assert EQUATION_17.compute_layer_s() == pytest.approx(4.22e-3, abs=5e-6)
    assert EQUATION_17.fetch_layer_s(GBPS_200) == pytest.approx(0.082e-3, abs=5e-7)


@pytest.mark.parametrize(("cached_fraction", "equal"), [(0.5, True), (0.9, False), (0.1, False)])
def test_equation_12_as_printed_is_right_at_one_half_only(
    cached_fraction: float, equal: bool
) -> None:
    prefill = Prefill(0.270, 32, 1000, cached_fraction, 4096)
    published_s = paper_equations.published_compute_layer_s(prefill)
    assert (published_s == pytest.approx(prefill.compute_layer_s())) is equal
    if cached_fraction == 0.9:
        assert published_s == pytest.approx(7.594e-3, abs=1e-6)
        assert prefill.compute_layer_s() == pytest.approx(0.844e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("prefill", "bytes_per_s", "fraction"),
    [
        (EQUATION_17, GBPS_200, 0.981),
        (opt_13b_prefill(0.5), GBPS_200, 0.795),
        (opt_13b_prefill(0.5), GBPS_200 / 2, 0.660),
    ],
)
def test_where_fetches_stop_hiding(prefill: Prefill, bytes_per_s: float, fraction: float) -> None:
    assert paper_equations.break_even_fraction(prefill, bytes_per_s) == pytest.approx(
        fraction, abs=5e-4
    )


def test_the_published_break_even_does_not_depend_on_the_hit_rate() -> None:
    published = [
        paper_equations.published_break_even_bytes_per_s(opt_13b_prefill(r))
        for r in (0.1, 0.5, 0.9)
    ]
    assert published == [published[0]] * 3
    assert published[0] == pytest.approx(opt_13b_prefill(0.5).break_even_bytes_per_s())


def test_a_prefill_with_a_fetched_prefix() -> None:
    """Hidden: 32 layers of 4.22 ms, one fetch before and one store after them."""
    took_s = paper_equations.prefill_s(EQUATION_17, GBPS_200, GBPS_200)
    assert took_s == pytest.approx(0.135 + 2 * 0.082e-3, abs=1e-6)
    # Not hidden: 40 fetches of 0.9 x 20.48 MB, then one layer computed and one stored.
    bound = opt_13b_prefill(0.9)
    assert paper_equations.prefill_s(bound, GBPS_200, GBPS_200) == pytest.approx(
        40 * 0.73728e-3 + 0.1 * 0.127132 / 40 + 0.08192e-3, rel=1e-6
    )
