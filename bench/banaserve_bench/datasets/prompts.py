"""Prompts of a benchmark, from the user's data files or synthetic from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve_bench.datasets.entries import read_entries
from banaserve_bench.datasets.files import data_folder, dataset_files
from banaserve_bench.datasets.synthetic_prompts import write_prompt

Tokenize = Callable[[str], Sequence[int]]

KINDS = ("alpaca", "longbench", "synthetic")

_MARK = "\n[...]\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt within the requested lengths.

    Attributes:
        num_tokens: Number of tokens by the tokenizer that the prompt was chosen with.
        source: File and line, or the seed and number of a synthetic one.
        is_cut: True if the middle of the text was left out to fit.
    """

    text: str
    num_tokens: int
    source: str
    is_cut: bool = False


def prompts(
    kind: str,
    count: int,
    min_tokens: int,
    max_tokens: int,
    seed: int,
    tokenize: Tokenize,
    data: Path | None = None,
) -> list[Prompt]:
    """Return ``count`` different prompts of ``min_tokens`` to ``max_tokens`` tokens.

    Texts of other lengths are skipped, except that LongBench texts that are too long lose their
    middle, as LongBench itself does it, so that instruction and question stay. Their new length is
    drawn uniformly from the requested range. Equal arguments give equal prompts.

    Args:
        kind: alpaca, longbench or synthetic.
        data: Folder or file of the data; None for the one that BANASERVE_DATA names.

    Raises:
        UserError: Invalid lengths, no data, or too few texts of these lengths.
    """
    check_known("kind of prompts", kind, KINDS)
    if not 0 < min_tokens <= max_tokens:
        raise UserError(f"prompts of {min_tokens} to {max_tokens} tokens: no such lengths")
    draws = random.Random(f"{seed} {kind}")
    if kind == "synthetic":
        fitting = _synthetic(count, min_tokens, max_tokens, seed, draws, tokenize)
    else:
        texts = _texts(kind, data_folder(data), draws)
        may_cut = kind == "longbench"
        fitting = _fitting(texts, min_tokens, max_tokens, may_cut, draws, tokenize)
    found = list(islice(fitting, count))
    if len(found) < count:
        raise UserError(
            f"only {len(found)} {kind} prompts have {min_tokens} to {max_tokens} tokens: "
            f"ask for fewer than {count}, or for other lengths"
        )
    return found


def _texts(kind: str, folder: Path | None, draws: random.Random) -> Iterator[tuple[str, str]]:
    """Yield source and text of each prompt of a dataset once, in random order."""
    entries = [entry for file in dataset_files(kind, folder) for entry in read_entries(file)]
    different = {entry.text: entry.source for entry in entries if entry.text is not None}
    shuffled = [(source, text) for text, source in different.items()]
    draws.shuffle(shuffled)
    yield from shuffled


def _fitting(
    texts: Iterable[tuple[str, str]],
    min_tokens: int,
    max_tokens: int,
    may_cut: bool,
    draws: random.Random,
    tokenize: Tokenize,
) -> Iterator[Prompt]:
    for source, text in texts:
        num_tokens = len(tokenize(text))
        is_cut = may_cut and num_tokens > max_tokens
        if is_cut:
            text = without_middle(text, draws.randint(min_tokens, max_tokens), tokenize)
            num_tokens = len(tokenize(text))
        if min_tokens <= num_tokens <= max_tokens:
            yield Prompt(text, num_tokens, source, is_cut)


def without_middle(text: str, max_tokens: int, tokenize: Tokenize) -> str:
    """Return ``text`` with its middle left out, so that at most ``max_tokens`` remain.

    Both ends keep the same number of characters, less a broken word; one more would not fit.
    """
    num_tokens = len(tokenize(text))
    if num_tokens <= max_tokens:
        return text
    # At most twice the share that fits on average, so that no trial tokenizes a whole book.
    low, high = 0, min(len(text) // 2, len(text) * max_tokens // num_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenize(_ends(text, middle))) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return _ends(text, low)


def _ends(text: str, num_chars: int) -> str:
    head, tail = text[:num_chars], text[len(text) - num_chars :]
    head, space, _ = head.rpartition(" ")
    _, other_space, tail = tail.partition(" ")
    return head + _MARK + tail if space and other_space else _MARK


def _synthetic(
    count: int,
    min_tokens: int,
    max_tokens: int,
    seed: int,
    draws: random.Random,
    tokenize: Tokenize,
) -> Iterator[Prompt]:
    """Yield synthetic prompts; an attempt that misses the lengths is replaced by another one."""
    seen: set[str] = set()
    for attempt in range(count * 50):
        target_tokens = draws.randint(min_tokens, max_tokens)
        text = write_prompt(f"{seed} {attempt}", target_tokens, tokenize)
        num_tokens = len(tokenize(text))
        if min_tokens <= num_tokens <= max_tokens and text not in seen:
            seen.add(text)
            yield Prompt(text, num_tokens, f"synthetic:{seed}:{attempt}")
