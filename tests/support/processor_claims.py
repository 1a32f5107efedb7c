"""Other answers of torch's checks of the processor, by which vLLM chooses its kernels.

``BANASERVE_TEST_PROCESSOR`` holds them, with commas between: ``amx_tile=yes`` claims tiles that
this processor may lack, ``avx512=no,avx512_bf16=no`` lets vLLM load its kernels for AVX2, and
``amx_tile=yes@platforms/cpu.py`` answers so only to that file of vLLM. An instruction that the
processor does not have still ends the process that reaches it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

VARIABLE = "BANASERVE_TEST_PROCESSOR"
_ANSWERS = {"yes": True, "no": False}


class Claim(NamedTuple):
    """One answer.

    Attributes:
        check: The name of torch's check.
        answer: The answer.
        asker: The end of the path of the file that gets it; empty: every file does.
    """

    check: str
    answer: bool
    asker: str


def read(text: str) -> list[Claim]:
    """Claims of a value of ``VARIABLE``.

    Raises:
        ValueError: It is none.
    """
    claims = []
    for part in filter(None, text.split(",")):
        feature, _, rest = part.partition("=")
        answer, _, asker = rest.partition("@")
        if answer not in _ANSWERS:
            raise ValueError(f"{VARIABLE}: {part} is not NAME=yes, NAME=no or NAME=yes@FILE")
        claims.append(Claim(f"_is_{feature}_supported", _ANSWERS[answer], asker))
    return claims


def apply(env: Mapping[str, str] = os.environ) -> None:
    """Let torch answer so in this process and its forks; nothing without the variable.

    Raises:
        AttributeError: This torch has no such check.
    """
    claims = read(env.get(VARIABLE, ""))
    if not claims:
        return
    import torch.cpu

    for claim in claims:
        setattr(torch.cpu, claim.check, _answering(claim, getattr(torch.cpu, claim.check)))


def _answering(claim: Claim, check: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        asker = sys._getframe(1).f_code.co_filename
        return claim.answer if asker.endswith(claim.asker) else check()

    return answer
