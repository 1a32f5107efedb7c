"""Lengths of prompts and answers: measured distributions, and files that hold lengths.

The distributions are plain numbers, so that the simulator needs no data: quantiles of token counts
by SmolLM2's tokenizer, with linear interpolation between them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.base.text.records import read_records
from banaserve.sim.trace import length

_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

# Alpaca: a uniform draw of 9,225 of its 52,000 records, instruction and input without a template,
# and the reference answer. LongBench: 60 filled-in prompts of six of its tasks, and the first
# reference answer.
MEASURED: Mapping[str, tuple[int, ...]] = {
    "alpaca_prompt": (4, 7, 8, 10, 11, 13, 15, 17, 20, 24, 31, 41, 72, 316),
    "alpaca_output": (1, 4, 7, 11, 17, 26, 42, 60, 76, 95, 124, 157, 265, 921),
    "longbench_prompt": (
        *(1277, 2823, 4033, 5477, 6723, 9243, 11280),
        *(12539, 13589, 14579, 17347, 31267, 38423, 39028),
    ),
    "longbench_output": (1, 1, 2, 3, 4, 4, 5, 5, 5, 11, 36, 51, 88, 114),
}

DATASETS = ("alpaca", "longbench")

CHARACTERS_A_TOKEN = 4.2
"""Mean of English text, between Alpaca's 4.5 and LongBench's 4.1; for files that hold texts."""


def draw_measured(name: str, draws: random.Random) -> float:
    """Return a length of the distribution ``name`` of ``MEASURED``."""
    values = MEASURED[name]
    share = draws.random()
    place = next(i for i, upper in enumerate(_SHARES[1:]) if share <= upper)
    low, high = _SHARES[place], _SHARES[place + 1]
    return values[place] + (share - low) / (high - low) * (values[place + 1] - values[place])


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Return prompt and output tokens of every object of a file of JSON lines.

    The numbers are ``input_length`` and ``output_length``, or estimated from the characters of the
    texts ``instruction`` and ``input`` with ``output`` (Alpaca), or ``prompt`` with ``answers``
    (LongBench). Records whose prompt or answer is empty are left out.

    Raises:
        UserError: The file cannot be read, or a line has none of these keys; the message names line
            and key.
    """
    pairs = []
    for number, record in read_records(path):
        pair = _pair(path, number, record)
        if pair is not None:
            pairs.append(pair)
    if not pairs:
        raise UserError(f"{path} has no lengths")
    return pairs


def _pair(path: Path, number: int, record: Mapping[str, Any]) -> tuple[int, int] | None:
    if "input_length" in record:
        asked = length(path, number, record, "input_length")
        return asked, length(path, number, record, "output_length")
    prompt: Any
    if isinstance(instruction := record.get("instruction"), str):
        prompt = instruction + str(record.get("input") or "")
        answer = record.get("output")
    else:
        prompt, answer = record.get("prompt"), record.get("answers", record.get("answer"))
        answer = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise UserError(
            f"{path}, line {number}: no lengths: give input_length and output_length, "
            "instruction and output, or prompt and answers"
        )
    return (_tokens(prompt), _tokens(answer)) if prompt and answer else None


def _tokens(text: str) -> int:
    return ceil(len(text) / CHARACTERS_A_TOKEN)
