"""Lengths of prompts and answers: measured distributions, and files that hold lengths.

The distributions are plain numbers, so that the simulator needs no data: quantiles of token counts
by SmolLM2's tokenizer, with linear interpolation between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.sim.trace import has_lengths, lengths, trace_records

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

CountTokens = Callable[[str], int]
CHARACTERS_A_TOKEN = 4.2
"""Mean of English text, between Alpaca's 4.5 and LongBench's 4.1; for files that hold texts."""


def draw_measured(name: str, draws: random.Random) -> float:
    """Return a length of the distribution ``name`` of ``MEASURED``."""
    values = MEASURED[name]
    share = draws.random()
    place = next(i for i, upper in enumerate(_SHARES[1:]) if share <= upper)
    low, high = _SHARES[place], _SHARES[place + 1]
    return values[place] + (share - low) / (high - low) * (values[place + 1] - values[place])


def read_lengths(path: Path, count: CountTokens | None = None) -> list[tuple[int, int]]:
    """Return prompt and output tokens of every object of JSON lines, a JSON list or a table.

    The numbers are those of a trace (``sim/trace.py``), or are counted in the texts ``instruction``
    and ``input`` with ``output`` (Alpaca), ``prompt`` with ``answers`` (LongBench), or the first
    question of ``conversations`` and its answer (ShareGPT). Objects whose prompt or answer is empty
    are left out.

    Args:
        count: Function that counts the tokens of a text; None for ``CHARACTERS_A_TOKEN``.

    Raises:
        UserError: The file cannot be read, or an object has none of these keys; the message names
            place and key.
    """
    count = count or _estimated
    pairs = []
    for where, record in trace_records(path):
        if has_lengths(record):
            pairs.append(lengths(where, record))
        elif all(texts := _texts(where, record)):
            prompt, answer = texts
            pairs.append((max(1, count(prompt)), max(1, count(answer))))
    if not pairs:
        raise UserError(f"{path} has no lengths")
    return pairs


def token_counter(folder: Path) -> CountTokens:
    """Return a function that counts tokens with the tokenizer of a model's folder.

    Raises:
        UserError: The folder has no ``tokenizer.json``, or it is none.
    """
    from tokenizers import Tokenizer

    file = folder if folder.is_file() else folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        # The package has no exception class of its own.
        raise UserError(f"cannot read the tokenizer {file}: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _texts(where: str, record: Mapping[str, Any]) -> tuple[str, str]:
    """Return prompt and answer of an object; each may be empty."""
    prompt: Any
    if (turns := record.get("conversations")) is not None:
        return first_turns(where, turns)
    if isinstance(instruction := record.get("instruction"), str):
        prompt = instruction + str(record.get("input") or "")
        answer = record.get("output")
    else:
        prompt, answer = record.get("prompt"), record.get("answers", record.get("answer"))
        answer = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise UserError(
            f"{where}: no lengths: give input_length and output_length, prompt_tokens and "
            "completion_tokens, conversations, instruction and output, or prompt and answers"
        )
    return prompt, answer


def first_turns(where: str, turns: Any) -> tuple[str, str]:
    """Return the first question of a conversation and the turn after it; "" for what is missing.

    Raises:
        UserError: ``turns`` is no list of turns.
    """
    try:
        values = [(turn["from"], turn["value"]) for turn in turns]
    except (TypeError, KeyError, IndexError):
        values = [(None, None)]
    if not all(isinstance(value, str) for _, value in values):
        raise UserError(f'{where}: conversations is no list of {{"from": ..., "value": text}}')
    asked = next((n for n, (by, _) in enumerate(values) if by in ("human", "user")), len(values))
    first_two = [*(value for _, value in values[asked : asked + 2]), "", ""]
    return first_two[0], first_two[1]


def _estimated(text: str) -> int:
    return ceil(len(text) / CHARACTERS_A_TOKEN)
