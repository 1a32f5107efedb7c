"""The Triton kernels in Triton's interpreter; ``test_kernels_interpreter.py`` starts it.

``TRITON_INTERPRET`` counts when kernels are defined and changes what vLLM does, so these tests have
a process of their own. ``tests/gpu`` runs the same tables on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, with TRITON_INTERPRET=1", allow_module_level=True)

import kernel_cases as cases
from banaserve.kernels.interface import HEAD_SIZES, Heads
from banaserve.kernels.packed_pages import PackedPages
from banaserve.kernels.tiling import Tiling
from banaserve.kernels.triton.attention_op import partial_attention
from banaserve.kernels.triton.kernels import TritonKernels
from banaserve.kernels.triton.merge_op import merge_parts
from banaserve.kernels.triton.pack_op import pack_blocks, unpack_blocks
from depth import num_examples

CPU = "cpu"
DTYPES = cases.DTYPES
TINY = Tiling(16, 4, 1, 1)
SMALL = Tiling(16, 8, 1, 1)
# Three sequences that meet: several steps, a range within a block, and nothing to see.
FEW = (cases.Seq(1, 9, 0, 10), cases.Seq(1, 9, 3, 3), cases.Seq(4, 7, 3, 11))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_attention_of_every_head_size_and_dtype(head_size, dtype):
    case = cases.problem(FEW, dtype=dtype, head_size=head_size, num_kv_heads=1)
    cases.check_attention_case(TritonKernels(2, SMALL), case, CPU)


@pytest.mark.parametrize("num_splits", [0, 1, pytest.param(3, marks=pytest.mark.long)])
def test_attention_of_ragged_ranges(num_splits):
    cases.check_attention_case(TritonKernels(num_splits), cases.problem(), CPU)
    cases.check_attention_case(TritonKernels(num_splits, SMALL), cases.problem(block_size=5), CPU)


@pytest.mark.parametrize("name", cases.HEADS)
def test_attention_of_chosen_heads(name):
    num_kv_heads, heads = cases.HEADS[name]
    case = cases.problem(FEW, num_kv_heads=num_kv_heads, heads=heads)
    rows = 32 if heads.group_size > 16 else 16
    cases.check_attention_case(TritonKernels(1, Tiling(rows, 8, 1, 1)), case, CPU)


def test_tiles_smaller_than_a_group_are_refused():
    case = cases.problem(FEW, num_kv_heads=1, heads=Heads((0,), 20))
    with pytest.raises(ValueError, match=r"^tiling: 16 rows; allowed: 20 or more"):
        TritonKernels(1, SMALL).partial_attention(*case.arguments())


def test_attention_without_a_causal_mask():
    cases.check_attention_case(TritonKernels(2, SMALL), cases.problem(FEW, causal=False), CPU)


def test_attention_where_tokens_lie_before_heads():
    case = cases.problem(FEW, by_token=True)
    cases.check_attention_case(TritonKernels(1, SMALL), case, CPU)


def test_nobody_asking_is_no_error():
    case = cases.problem((cases.Seq(0, 3, 0, 4),))
    assert TritonKernels().partial_attention(*case.arguments()).output.shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "head_size"), [(1, 64), (2, 80), (3, 256), (9, 96)])
def test_merge(num, head_size, dtype):
    cases.check_merge(TritonKernels(), num, head_size, dtype, CPU)


@pytest.mark.parametrize("by_token", [False, True])
def test_blocks_go_to_pages_and_back(by_token):
    cases.check_blocks(TritonKernels(), by_token, torch.bfloat16, CPU)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn], ids=str)
def test_blocks_of_any_element_size(dtype):
    cases.check_blocks(TritonKernels(), False, dtype, CPU, 4, 64)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_blocks_whose_heads_lie_apart_become_pages_and_blocks_again(order):
    sizes = {"L": 2, "B": 5, "H": 3, "N": 4, "C": 160}
    whole = torch.randn([sizes[axis] for axis in order]).bfloat16()
    layers = list(whole.permute([order.index(axis) for axis in "LBHNC"]))
    before = layers[1].clone()
    packed = PackedPages(layers, TritonKernels())
    stage = packed.stage()[:2]
    packed.pack(1, [4, 0], stage)
    assert torch.equal(stage.view(torch.bfloat16).view(2, *layers[1].shape[1:]), before[[4, 0]])
    packed.unpack(1, [2, 3], stage)
    assert torch.equal(layers[1], before[[0, 1, 4, 0, 4]])


@st.composite
def _seqs(draw):
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 9))
        end = draw(st.integers(0, 13))
        found.append(cases.Seq(draw(st.integers(0, 3)), draw(st.integers(0, 12)), start, end))
    return tuple(found)


@settings(max_examples=num_examples(25))
@given(
    seqs=_seqs(),
    cuts=st.lists(st.integers(0, 13), max_size=2),
    block_size=st.integers(1, 6),
    heads=st.sampled_from([Heads((0,), 1), Heads((1, 0), 3), Heads((1,), 2, (1,))]),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_split_anywhere_merges_to_the_whole(seqs, cuts, block_size, heads, dtype, causal, seed):
    case = cases.problem(
        seqs, dtype=dtype, heads=heads, block_size=block_size, causal=causal, seed=seed
    )
    cases.check_split(TritonKernels(1, SMALL), case, CPU, tuple(cuts), dtype)


@settings(max_examples=num_examples(6))
@given(
    order=st.permutations([0, 1, 2]),
    cut=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
)
def test_heads_apart_lie_side_by_side_to_the_whole(order, cut, dtype):
    kernels, size = TritonKernels(1, SMALL), 2
    whole = cases.problem(FEW, dtype=dtype, num_kv_heads=3)
    groups = (tuple(order[:cut]), tuple(order[cut:]))
    parts = [
        kernels.partial_attention(*whole._replace(heads=Heads(g, size, g)).arguments()).output
        for g in groups
    ]
    together = kernels.partial_attention(*whole.arguments()).output
    assert torch.equal(cases.joined(parts, groups), together)


def test_operators_keep_the_rules_of_torch():
    case = cases.problem(FEW[:2])
    batch = case.batch
    tensors = (batch.block_table, batch.query_start, batch.query_position)
    ranges = (batch.range_start, batch.range_end)
    heads = (list(case.heads.kv_heads), list(case.heads.groups), case.heads.group_size)
    # opcheck compares results bit by bit and copies its arguments: NaN and holes would confuse it.
    key, value = (torch.nan_to_num(cache).contiguous() for cache in (case.key, case.value))
    table = tensors[0].masked_fill(tensors[0] == cases.NOWHERE, 0)
    torch.library.opcheck(
        partial_attention,
        (case.query, key, value, table, *tensors[1:], *ranges, *heads, 0, 0.1, True, 2, TINY_LIST),
    )
    parts = [torch.randn(2, 3, 64) for _ in range(2)]
    torch.library.opcheck(merge_parts, (parts, [torch.randn(2, 3) for _ in parts]))


TINY_LIST = [TINY.rows, 16, TINY.num_warps, TINY.num_stages]


@pytest.mark.parametrize("operator", [pack_blocks, unpack_blocks], ids=["pack", "unpack"])
def test_copying_operators_keep_the_rules_of_torch(operator):
    pages = torch.randn(2, 2 * 2 * 128).view(torch.uint8)
    arguments = torch.randn(3, 2, 2, 128), torch.tensor([2, 0]), [0], pages
    torch.library.opcheck(operator, arguments)


def test_a_graph_holds_the_operators_whole():
    kernels = TritonKernels(1, SMALL)

    def step(query, *rest):
        part = kernels.partial_attention(query, *rest)
        return kernels.merge([part, part]).output * 2

    case = cases.problem(FEW[:2])
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*case.arguments()), step(*case.arguments()))
