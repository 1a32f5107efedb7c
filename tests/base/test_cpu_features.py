"""The number type that engines compute in, by what the processor can."""

from __future__ import annotations

import subprocess
import sys

import pytest

from banaserve.base.platform.cpu_features import choose_dtype, read_cpu_flags

AVX512 = frozenset({"avx2", "avx512f", "avx512bw", "avx512_vnni"})
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
HAS, NONE = "bfloat16: this processor has ", "float32: this processor has no bfloat16 instructions"
NONE_OF_X86 = f"{NONE} (avx512_bf16, amx_bf16)"


@pytest.mark.parametrize(
    ("machine", "flags", "chosen"),
    [
        ("x86_64", {"avx2"}, NONE_OF_X86),
        ("x86_64", AVX512, NONE_OF_X86),
        ("x86_64", AVX512 | {"avx512_bf16"}, f"{HAS}avx512_bf16"),
        ("x86_64", AVX512 | AMX, f"{HAS}amx_bf16"),
        ("x86_64", AVX512 | AMX | {"avx512_bf16"}, f"{HAS}avx512_bf16 and amx_bf16"),
        ("x86_64", {"bf16"}, NONE_OF_X86),
        ("x86_64", {"amx_tile", "amx_int8"}, NONE_OF_X86),
        ("aarch64", {"asimd", "bf16"}, f"{HAS}bf16"),
        ("aarch64", {"asimd", "sve"}, f"{NONE} (bf16)"),
        ("riscv64", {"bf16"}, NONE),
        ("x86_64", set(), NONE_OF_X86),
    ],
)
def test_bfloat16_is_for_processors_that_multiply_it(machine, flags, chosen):
    assert str(choose_dtype(machine, flags)) == chosen


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu amx_bf16\n\nflags\t\t: fpu\n", {"fpu", "amx_bf16"}),
        ("processor\t: 0\nvmx flags\t: ept\nflags\t\t: fpu\n", {"fpu"}),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("processor\t: 0\n", set()),
        ("", set()),
    ],
)
def test_flags_are_read_as_linux_writes_them(text, flags, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert read_cpu_flags(path) == flags


def test_no_flags_where_there_is_no_such_file(tmp_path):
    assert read_cpu_flags(tmp_path / "none") == set()


LEAVE = """
import ctypes
from banaserve.base.platform.cpu_features import ask_for_amx

def leave():
    allowed = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(allowed)) == 0
    return allowed.value >> 18 & 1

print(leave(), ask_for_amx(), leave())
"""


@pytest.mark.skipif("amx_tile" not in read_cpu_flags(), reason="this processor has no AMX")
def test_a_process_that_asks_may_use_amx():
    done = subprocess.run([sys.executable, "-P", "-c", LEAVE], capture_output=True, text=True)
    assert done.stdout == "0 None 1\n", done.stderr


def test_asking_for_amx_harms_nobody():
    code = "from banaserve.base.platform.cpu_features import ask_for_amx; ask_for_amx()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
