"""Which kernels are picked and why, how work is cut up, and what FlashInfer is told."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from banaserve.base.errors import UserError
from banaserve.kernels.interface import Batch, Heads
from banaserve.kernels.registry import missing, pick
from banaserve.kernels.tiling import MIN_SPLIT_TOKENS, choose_num_splits, choose_tiling

CPU = torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_a_cpu_gets_the_reference_and_is_told_why():
    kernels, reason = pick(CPU)
    assert kernels.name == "reference"
    assert "triton" in reason
    assert pick(CPU, "reference").reason == "asked for"


def test_what_cannot_run_is_refused_and_not_replaced():
    with pytest.raises(UserError, match=r"triton kernels cannot run: .*choose auto"):
        pick(CPU, "triton")
    with pytest.raises(UserError, match=r"flashinfer kernels cannot run: .*choose auto"):
        pick(CPU, "flashinfer")
    with pytest.raises(UserError, match=r"unknown kernels: tritn .*did you mean triton"):
        pick(CPU, "tritn")


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_a_gpu_gets_triton_where_it_is_installed(monkeypatch):
    assert missing("triton", "cuda") is None
    assert missing("triton", "cpu") == "triton does not run on cpu"
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    assert missing("triton", "cuda") == "triton is not installed"


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_triton_refuses_a_tensor_that_it_cannot_reach():
    from banaserve.kernels.triton.merge_op import merge_parts

    with pytest.raises(ValueError, match=r"^output: on cpu; allowed: cuda"):
        merge_parts([torch.zeros(1, 1, 64)], [torch.zeros(1, 1)])


def test_decode_gets_few_rows_and_prefill_many():
    decode = choose_tiling(64, 64, 4, 128, 2)
    prefill = choose_tiling(4096, 2, 4, 128, 2)
    assert decode.rows == 16
    assert prefill.rows == 64
    assert choose_tiling(1, 1, 20, 128, 2).rows == 32


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_there_are_tiles_for_all_that_is_taken(head_size, element_bytes, num_tokens):
    tiles = choose_tiling(num_tokens, 1, 4, head_size, element_bytes)
    assert tiles.keys >= 16
    assert tiles.rows >= 16


def test_a_long_context_alone_fills_the_gpu():
    def splits(num_seqs, context):
        return choose_num_splits(num_seqs, num_seqs, 8, 4, 16, context, 132)

    assert splits(1, 131072) * 8 >= 4 * 132
    assert splits(1, 1000) == 1000 // MIN_SPLIT_TOKENS
    assert splits(1, 10) == 1
    assert splits(4096, 8192) == 1


def _batch(*seqs):
    """Sequences of (tokens asking, position, start, end)."""
    asking, position, start, end = (list(column) for column in zip(*seqs, strict=True))
    ints = [torch.tensor(x, dtype=torch.int32) for x in (position, start, end)]
    table = torch.arange(len(seqs) * 4, dtype=torch.int32).view(-1, 4)
    return Batch(table, torch.tensor([0, *asking]).cumsum(0).int(), *ints)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
class TestFlashInferPlan:
    @pytest.fixture(autouse=True)
    def plan(self):
        from banaserve.kernels.flashinfer_kernels import plan_pages

        self.plan = plan_pages

    def test_ranges_become_pages(self):
        plan = self.plan(_batch((1, 30, 16, 31), (1, 5, 0, 40), (1, 9, 8, 8)), 8, True)
        assert plan.page_start.tolist() == [0, 2, 3, 3]
        assert plan.pages.tolist() == [2, 3, 4]
        assert plan.last_page_tokens.tolist() == [7, 6, 8]
        assert plan.is_empty.tolist() == [False, False, True]
        assert not plan.is_causal

    def test_a_triangle_ends_with_the_range(self):
        assert self.plan(_batch((4, 6, 0, 10), (1, 6, 0, 10)), 8, True).is_causal
        plan = self.plan(_batch((4, 6, 8, 10)), 8, True)
        assert plan.is_causal
        assert plan.is_empty.tolist() == [True, True, False, False]
        assert not self.plan(_batch((4, 8, 0, 8)), 8, True).is_causal
        assert not self.plan(_batch((4, 6, 0, 10)), 8, False).is_causal

    @pytest.mark.parametrize(
        ("named", "seqs"),
        [
            ("range_start", [(1, 9, 3, 9)]),
            ("range_end", [(4, 6, 0, 8)]),
            ("range_end", [(4, 6, 0, 10), (4, 8, 0, 8)]),
        ],
    )
    def test_what_flashinfer_cannot_say_is_refused(self, named, seqs):
        with pytest.raises(ValueError, match=rf"^{named}.*allowed"):
            self.plan(_batch(*seqs), 8, True)

    @pytest.mark.parametrize(
        ("kv_heads", "groups", "runs"),
        [
            ((0, 1, 2), (), [((0, 1, 2), (0, 1, 2))]),
            ((0, 2), (), [((0,), (0,)), ((2,), (1,))]),
            ((2, 3, 1), (5, 6, 4), [((2, 3), (5, 6)), ((1,), (4,))]),
        ],
    )
    def test_heads_that_are_no_neighbours_are_attended_run_by_run(self, kv_heads, groups, runs):
        from banaserve.kernels.flashinfer_kernels import neighbours

        found = neighbours(Heads(kv_heads, 4, groups))
        assert [(one.kv_heads, one.groups) for one in found] == runs
        assert {one.group_size for one in found} == {4}
