"""Errors that vLLM writes into the log of an engine, and the option that fixes an error.

vLLM names the check that failed, such as the types that a kernel supports, but no option.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from banaserve.base.platform.run_dir import tail_of

_ERROR = re.compile(r"\b((?:[\w.]*(?:Error|Exception)): .{1,300})")
_OWN_CLASS = re.compile(r"^banaserve\.base\.errors\.\w+: ")
"""Beginning of an error of ours, whose message says all."""
_LAST_LINES = 200
CAUSE_ELSEWHERE = ("See stack trace for root cause", "See root cause above")
"""Words of errors that only report the failure of another process, whose error is earlier."""


class Remedy(NamedTuple):
    """An option that fixes an error.

    Attributes:
        words: Part of vLLM's error that occurs in no other error.
        advice: Beginning of the line: the feature that vLLM lacks, and the option to give.
        source: File of vLLM that contains the words, relative to the folder of vLLM.
    """

    words: str
    advice: str
    source: str


REMEDIES = (
    # Where a processor has AMX, vLLM 0.32 chooses its AMX kernels for latents in every type.
    Remedy(
        "expect weight to be bfloat16, float16, int8",
        "vLLM's kernels for this processor do not take this model in its type: give --dtype "
        "bfloat16 or, with latents (MLA), --attention-backend CPU_MLA, which takes every type "
        "and is slower",
        "_C.abi3.so",
    ),
    Remedy(
        "CPU GDN attention requires BF16",
        "vLLM computes linear attention on a CPU in bfloat16 alone: give --dtype bfloat16",
        "model_executor/layers/mamba/ops/cpu/gdn_attention.py",
    ),
)


def last_error_in(log: Path) -> str:
    """Return the last error in a log, with the log's path, after its remedy if one is known."""
    with contextlib.suppress(OSError):
        if error := last_error(tail_of(log).splitlines()[-_LAST_LINES:]):
            advice = advice_for(error)
            return f"{advice} (vLLM: {error}; log: {log})" if advice else f"{error} (log: {log})"
    return f"see {log}"


def last_error(lines: Iterable[str]) -> str:
    """Return the last error that names its own cause, else the last one; empty for none."""
    errors = [found[1].strip() for line in lines if (found := _ERROR.search(line))]
    causes = [one for one in errors if not any(words in one for words in CAUSE_ELSEWHERE)]
    return _OWN_CLASS.sub("", (causes or errors or [""])[-1])


def advice_for(error: str) -> str:
    """Return the advice of the remedy for an error; empty if no remedy is known."""
    return next((one.advice for one in REMEDIES if one.words in error), "")
