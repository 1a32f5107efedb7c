"""The kernels compile for real GPUs, also where there is none: the interpreter takes much more."""

from __future__ import annotations

import importlib.util
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from banaserve.kernels.tiling import choose_tiling, next_power_of_2
from banaserve.kernels.triton import attention, merge, pack

INT32 = ("block_table", "query_start", "query_position", "range_start", "range_end")
DATA = {"query", "key", "value", "output", "outputs", "cache", "pages"}
POINTERS = {
    **dict.fromkeys((*INT32, "kv_heads", "query_groups"), "*i32"),
    **dict.fromkeys(("lse", "lses"), "*fp32"),
    "block_ids": "*i64",
}


def compile_for(capability, kernel, dtype, constants, types=None, **options):
    """PTX of ``kernel``, whose other pointers are to ``dtype``, all strides multiples of 16."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif types and name in types:
            signature[name] = types[name]
        elif name in POINTERS:
            signature[name] = POINTERS[name]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
            if name in DATA:
                signature[name] = f"*{dtype}"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if isinstance(signature[name], str) and (signature[name].startswith("*") or "_by_" in name)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    # What an earlier run has left must not stand in for compiling.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "asking"),
    [
        (80, "bf16", 128, 1),
        pytest.param(90, "bf16", 128, 1, marks=pytest.mark.long),
        (90, "bf16", 128, 64),
        (100, "fp32", 80, 1),
    ],
)
def test_attention_compiles_with_loads_under_way(capability, dtype, head_size, asking):
    tiles = choose_tiling(8 * asking, 8, 4, head_size, 4 if dtype == "fp32" else 2)
    constants = {
        "BLOCK_SIZE": 16,
        "GROUP_SIZE": 4,
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": next_power_of_2(head_size),
        "TILE_ROWS": tiles.rows,
        "TILE_KEYS": tiles.keys,
        "CAUSAL": True,
        "IS_SPLIT": True,
        "UPCAST": False,
    }
    compiled = compile_for(
        capability,
        attention.attend_parts,
        dtype,
        constants,
        {"output": "*fp32"},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    ptx = compiled.asm["ptx"]
    # 16 bytes a thread, from global to shared memory behind the arithmetic.
    assert re.search(r"cp\.async\.cg\.shared\.global[^;]*0x10", ptx)
    if dtype != "fp32":
        assert "mma" in ptx
    # A tile of keys and one of values, and for decode another of each under way.
    tile_bytes = tiles.keys * next_power_of_2(head_size) * (4 if dtype == "fp32" else 2)
    assert compiled.metadata.shared >= tile_bytes * (4 if asking == 1 else 2)


def test_merge_compiles():
    constants = {"HEAD_SIZE": 80, "HEAD_PADDED": 128, "TILE_ROWS": 8}
    types = {"outputs": "*fp32"}
    assert compile_for(90, merge.merge_stacked, "bf16", constants, types).asm["cubin"]
    apart = {
        "outputs": ("*bf16", "*bf16"),
        "lses": ("*fp32", "*fp32"),
        "strides": ("i32",) * 8,
    }
    constants["NUM_PARTS"] = 2
    assert compile_for(90, merge.merge_apart, "bf16", constants, apart).asm["cubin"]


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (attention.attend_parts, {"num_seqs", "table_by_seq", "lse_by_split"}),
        (merge.merge_stacked, {"num_parts", "num_rows", "lses_by_part"}),
        (merge.merge_apart, {"num_rows"}),
    ],
)
def test_a_step_of_other_sizes_needs_no_other_kernel(kernel, sizes):
    """Triton compiles one for a value of 1, one for multiples of 16 and one for the others."""
    assert {one.name for one in kernel.params if one.do_not_specialize} == sizes


@pytest.mark.parametrize("into_pages", [True, False])
def test_packing_compiles_to_wide_copies(into_pages):
    constants = {
        "BLOCK_SIZE": 16,
        "CONTENT_SIZE": 256,
        "CONTENT_PADDED": 256,
        "TILE_TOKENS": 16,
        "INTO_PAGES": into_pages,
    }
    ptx = compile_for(90, pack.copy_pages, "i16", constants).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)
