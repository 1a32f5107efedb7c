"""The kernels' tables on a GPU, and what only a GPU shows: full size, graphs, and no waiting."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import kernel_cases as cases
from banaserve.kernels.interface import HEAD_SIZES, Heads
from banaserve.kernels.registry import pick
from banaserve.kernels.triton.kernels import TritonKernels

GPU = "cuda"
DTYPES = cases.DTYPES
Seq = cases.Seq
LONG = (
    Seq(1, 4000, 0, 4001),
    Seq(1, 999, 17, 900),
    Seq(1, 5, 3, 3),
    Seq(300, 700, 33, 1000),
    Seq(77, 0, 0, 77),
)
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None


def test_a_gpu_gets_the_triton_kernels():
    assert pick(torch.device(GPU)).kernels.name == "triton"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_attention_of_every_head_size_and_dtype(head_size, dtype, num_splits):
    case = cases.problem(dtype=dtype, head_size=head_size)
    cases.check_attention_case(TritonKernels(num_splits), case, GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_attention_of_long_ranges(head_size, dtype):
    heads = Heads((1, 3), 4, (1, 3))
    for seqs in (LONG, LONG[:3]):
        case = cases.problem(
            seqs, dtype=dtype, head_size=head_size, num_kv_heads=4, heads=heads, block_size=16
        )
        cases.check_attention_case(TritonKernels(), case, GPU)


@pytest.mark.parametrize("name", cases.HEADS)
@pytest.mark.parametrize("block_size", [5, 16, 128])
def test_attention_of_chosen_heads(name, block_size):
    num_kv_heads, heads = cases.HEADS[name]
    case = cases.problem(
        LONG, dtype=torch.bfloat16, num_kv_heads=num_kv_heads, heads=heads, block_size=block_size
    )
    cases.check_attention_case(TritonKernels(), case, GPU)


def test_attention_without_a_causal_mask():
    case = cases.problem(LONG, dtype=torch.float16, causal=False)
    cases.check_attention_case(TritonKernels(), case, GPU)


def test_attention_where_tokens_lie_before_heads():
    cases.check_attention_case(TritonKernels(), cases.problem(LONG, by_token=True), GPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(1000,), (16, 33, 600), tuple(range(50, 1000, 90))])
def test_a_split_anywhere_merges_to_the_whole(cuts, dtype):
    case = cases.problem(LONG, dtype=dtype, block_size=16)
    cases.check_split(TritonKernels(), case, GPU, cuts, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "head_size"), [(1, 64), (2, 80), (3, 256), (9, 96)])
def test_merge(num, head_size, dtype):
    cases.check_merge(TritonKernels(), num, head_size, dtype, GPU, tokens=333)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("block_size", "head_size"), [(5, 80), (16, 128)])
def test_blocks_go_to_pages_and_back(by_token, block_size, head_size):
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        cases.check_blocks(TritonKernels(), by_token, dtype, GPU, block_size, head_size)


def test_attention_is_captured_in_a_graph_and_follows_its_inputs():
    """Capturing fails where a call waits for the GPU; replaying reads what stands there then."""
    kernels = TritonKernels()
    case, other = (
        cases.problem(LONG[:3], dtype=torch.bfloat16, block_size=16, seed=seed).on(GPU)
        for seed in (1, 2)
    )
    for _ in range(2):
        part = kernels.partial_attention(*case.arguments())
        kernels.merge([part, part])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part = kernels.partial_attention(*case.arguments())
        merged = kernels.merge([part, part])
    case.query.copy_(other.query)
    case.key._base.copy_(other.key._base)
    case.batch.block_table.copy_(other.batch.block_table)
    graph.replay()
    cases.assert_close(merged, cases.EXACT.merge([part, part]), torch.bfloat16)
    cases.assert_close(part, cases.EXACT.partial_attention(*other.arguments()), torch.bfloat16)


def test_a_compiled_step_gives_the_same():
    kernels = TritonKernels()

    def step(query, *rest):
        part = kernels.partial_attention(query * 2, *rest)
        return kernels.merge([part, part]).output + 1

    arguments = cases.problem(LONG[:3], dtype=torch.bfloat16).on(GPU).arguments()
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), step(*arguments))


@pytest.mark.skipif(not HAS_FLASHINFER, reason="needs flashinfer")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_flashinfer_gives_the_same(head_size, dtype):
    kernels = pick(torch.device(GPU), "flashinfer").kernels
    for seqs in ((Seq(1, 999, 16, 900), Seq(1, 5, 16, 16)), (Seq(40, 100, 0, 140),)):
        case = cases.problem(seqs, dtype=dtype, head_size=head_size, block_size=16)
        cases.check_attention_case(kernels, case, GPU)
    cases.check_merge(kernels, 3, head_size, dtype, GPU)
