"""Instructions of this processor, the number type that engines use on it, and permission for AMX.

Linux permits AMX to a process that asks once (``arch_prctl``, Documentation/arch/x86/xstate).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

BFLOAT16_FLAGS = {"x86_64": ("avx512_bf16", "amx_bf16"), "aarch64": ("bf16",)}
"""Flags by architecture: with any of them the processor has bfloat16 instructions."""
_FIELDS = ("flags", "Features")  # x86, ARM
_ARCH_PRCTL, _ASK_LEAVE, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A number type, as vLLM's ``--dtype`` names it, and the reason for it in one phrase."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_dtype(machine: str, flags: Set[str]) -> DtypeChoice:
    """Return the faster type on a processor: bfloat16 if it has instructions for it, else float32.

    Without them bfloat16 is emulated: 9 GFLOP/s against 67 in float32 on one AVX2 core.

    Args:
        machine: Architecture, as ``platform.machine()`` names it.
        flags: Flags of the processor, as in /proc/cpuinfo.
    """
    wanted = BFLOAT16_FLAGS.get(machine, ())
    if found := [flag for flag in wanted if flag in flags]:
        return DtypeChoice("bfloat16", f"this processor has {' and '.join(found)}")
    named = f" ({', '.join(wanted)})" if wanted else ""
    return DtypeChoice("float32", f"this processor has no bfloat16 instructions{named}")


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first processor; empty if they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() in _FIELDS:
            return frozenset(value.split())
    return frozenset()


def ask_for_amx() -> None:
    """Ask Linux to let this process use AMX tiles; no effect if the processor has none.

    A process without permission is killed by SIGILL at its first tile. oneDNN asks at its first
    product, vLLM's attention does not: a process that begins with attention has to ask itself.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_LEAVE, _TILE_DATA)
