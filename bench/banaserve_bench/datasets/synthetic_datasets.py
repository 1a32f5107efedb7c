"""Synthetic requests with the length distributions of published data.

Only the lengths follow the originals: they are drawn independently of each other between these
quantiles (linear in the logarithm); texts are random words. Results therefore allow no statement
about quality, or about anything that depends on which prompt has which answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from banaserve_bench.datasets.entries import DatasetEntry

_SHARES = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.99, 1.0)


class _Lengths(NamedTuple):
    """Numbers of tokens at the quantiles ``_SHARES``."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


_LENGTHS = {
    # 9,229 records drawn from Alpaca's 52,002, tokens of SmolLM2.
    "alpaca-like": _Lengths(
        (4, 8, 11, 15, 22, 31, 72, 316),
        (1, 7, 14, 42, 86, 124, 266, 921),
    ),
    # 60 prompts of six LongBench tasks with their templates, tokens of SmolLM2; the outputs are
    # the tasks' own limits.
    "longbench-like": _Lengths(
        (1277, 4033, 5915, 11281, 14054, 17347, 38424, 39028),
        (32, 32, 32, 32, 128, 128, 512, 512),
    ),
    # Mooncake's conversation trace: 12,031 requests.
    "mooncake-like": _Lengths(
        (891, 964, 2307, 6909, 15367, 27367, 85400, 126195),
        (1, 24, 157, 350, 472, 597, 1119, 2000),
    ),
    # Azure's conversation trace of 2023: 19,366 requests.
    "azure-like": _Lengths(
        (2, 207, 396, 1020, 1189, 2735, 4142, 14050),
        (7, 54, 85, 129, 395, 424, 601, 1000),
    ),
    # 300 requests derived from ShareGPT for LLMServingSim, tokens of Qwen3.
    "sharegpt-like": _Lengths(
        (257, 356, 472, 729, 1125, 1452, 2768, 4570),
        (512, 533, 566, 638, 769, 785, 1001, 1224),
    ),
}
_TURNS = 4


def random_lengths(
    prompt_tokens: int, output_tokens: int, range_fraction: float, draws: random.Random
) -> Iterator[DatasetEntry]:
    """Yield entries whose lengths are uniform within ``range_fraction`` of the given lengths."""

    def around(tokens: int) -> int:
        reach = int(tokens * range_fraction)
        return max(1, draws.randint(tokens - reach, tokens + reach))

    while True:
        yield DatasetEntry(
            source="random",
            prompt_tokens=around(prompt_tokens),
            output_tokens=around(output_tokens),
        )


def published_lengths(kind: str, draws: random.Random) -> Iterator[DatasetEntry]:
    """Yield entries with the length distributions of ``kind``, one of ``PUBLISHED``."""
    lengths = _LENGTHS[kind]
    while True:
        yield DatasetEntry(
            source=kind,
            prompt_tokens=quantile(lengths.prompt, draws.random()),
            output_tokens=quantile(lengths.output, draws.random()),
        )


def shared_prefix(
    prefix_tokens: int,
    num_prefixes: int,
    prompt_tokens: int,
    output_tokens: int,
    draws: random.Random,
) -> Iterator[DatasetEntry]:
    """Yield entries that begin with one of ``num_prefixes`` system prompts, drawn uniformly."""
    for entry in random_lengths(prompt_tokens, output_tokens, 0.5, draws):
        assert entry.prompt_tokens is not None
        yield DatasetEntry(
            source="shared-prefix",
            prompt_tokens=prefix_tokens + entry.prompt_tokens,
            output_tokens=entry.output_tokens,
            shared_tokens=prefix_tokens,
            shared_by=f"prefix {draws.randrange(num_prefixes)}",
        )


def multi_turn(
    prompt_tokens: int, output_tokens: int, sessions_at_once: int, draws: random.Random
) -> Iterator[DatasetEntry]:
    """Yield turns of chats of four turns each, ``sessions_at_once`` chats at a time.

    Each prompt is the chat so far plus one question. Earlier answers in a prompt are made up too,
    so that every system gets the same prompts whatever it has answered.
    """
    first = 0
    while True:
        questions = [
            [
                max(1, draws.randint(prompt_tokens // 2, prompt_tokens * 3 // 2))
                for _ in range(_TURNS)
            ]
            for _ in range(sessions_at_once)
        ]
        chats = [list(accumulate(lengths)) for lengths in questions]
        for turn in range(_TURNS):
            for number, asked in enumerate(chats):
                length = asked[turn] + turn * output_tokens
                yield DatasetEntry(
                    source=f"multi-turn:{first + number}:{turn}",
                    prompt_tokens=length,
                    output_tokens=output_tokens,
                    shared_tokens=length,
                    shared_by=f"chat {first + number}",
                )
        first += sessions_at_once


def quantile(values: Sequence[int], share: float) -> int:
    """Return the length at quantile ``share`` in [0, 1], interpolated between tabulated lengths."""
    for (low, high), (small, large) in zip(pairwise(_SHARES), pairwise(values), strict=True):
        if share <= high:
            part = (share - low) / (high - low)
            return round(math.exp(math.log(small) * (1 - part) + math.log(large) * part))
    return values[-1]


PUBLISHED = tuple(_LENGTHS)
