"""Requests to send: entries of a dataset as prompts of the wanted lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve_bench.datasets import synthetic_datasets
from banaserve_bench.datasets.entries import DatasetEntry, read_entries
from banaserve_bench.datasets.files import data_folder, dataset_files, fetch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMED = ("alpaca", "azure", "longbench", "mooncake", "sharegpt")
MADE_UP = ("multi-turn", "random", "shared-prefix", *synthetic_datasets.PUBLISHED)
FROM_HUB = Path("hub")
_NUM_WORDS = 4096
_MARK = "\n[...]\n"
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLengths:
    """Dataset and lengths of the requests to send.

    Attributes:
        dataset: Name in ``NAMED`` or ``MADE_UP``, or a file.
        data: Folder or file of a named dataset, or ``hub``.
        prompt_tokens: Mean prompt tokens of made-up data: with ``shared-prefix`` after the prefix,
            with ``multi-turn`` of one question.
        output_tokens: Output tokens of every answer, whatever the data say; also the mean of
            ``random``.
        sessions: Number of chats in progress at once, for ``multi-turn``.
        max_prompt_tokens: Maximum prompt tokens; longer texts lose their middle, other prompts
            their end.
        max_output_tokens: Maximum output tokens; longer answers are cut.
        context_tokens: Context length that prompt and answer must fit into: the answer is cut to
            what the prompt leaves, but not below half of the context, and the prompt to the rest;
            None if not known.
        as_text: True if made-up prompts are sent as text, for servers that take no token ids.
    """

    dataset: str
    data: Path | None = None
    prompt_tokens: int = 256
    output_tokens: int | None = None
    range_fraction: float = 0.0
    prefix_tokens: int = 1000
    num_prefixes: int = 1
    sessions: int = 8
    trace_block_tokens: int = 512
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    context_tokens: int | None = None
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """A request to send.

    Attributes:
        prompt_tokens: Number of prompt tokens by the client's tokenizer; a server may add one of
            its own.
        at_s: Arrival on the trace's own time axis, in seconds; None if the data have none.
        is_cut: True if the prompt was longer than what is sent.
    """

    prompt: str | list[int]
    prompt_tokens: int
    output_tokens: int
    at_s: float | None
    source: str
    is_cut: bool


class Words:
    """Source of prompts of exact lengths, made of words that are one token each.

    Args:
        tokenizer: Tokenizer of the served model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model_path: str | Path) -> Self:
        """Return the words of the model in the folder ``model_path``.

        Raises:
            UserError: The folder has no ``tokenizer.json``, or it is none.
        """
        from tokenizers import Tokenizer

        file = Path(model_path) / "tokenizer.json"
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the tokenizers package raises bare Exception
            raise UserError(f"cannot read the tokenizer {file}: {error}") from error

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def tokens(self, count: int, key: str) -> list[int]:
        """Return ``count`` tokens; a smaller count with the same key gives a prefix of them."""
        return random.Random(key).choices(self._pool, k=count)

    @cached_property
    def _pool(self) -> list[int]:
        """Tokens of words with a leading space, which no tokenizer merges with their neighbours."""
        candidates = (
            token for token in range(self._tokenizer.get_vocab_size()) if self._is_word(token)
        )
        pool = list(islice(candidates, _NUM_WORDS))
        if len(pool) < 2:
            raise UserError("the tokenizer has no words of one token: give a data file with texts")
        return pool

    def _is_word(self, token: int) -> bool:
        text = self._tokenizer.id_to_token(token) or ""
        word = text.lstrip("Ġ▁")
        if len(word) < 3 or len(text) != len(word) + 1:
            return False
        return word.isascii() and word.isalpha() and word.islower()


class Dataset:
    """A dataset that is read once and gives each seed its own requests.

    Raises:
        UserError: An unknown name, no data, or data with wrong fields.
    """

    def __init__(self, wanted: WantedLengths, words: Words) -> None:
        self._wanted = wanted
        self._words = words
        name = wanted.dataset
        self._files = None if name in MADE_UP else _files(wanted)
        kind = name if name in NAMED else None
        self._entries = [e for file in self._files or () for e in read_entries(file, kind)]
        if self.has_times:  # a log may be in the order of the ends
            self._entries.sort(key=lambda entry: entry.at_s or 0.0)

    @property
    def has_times(self) -> bool:
        """True if there are entries and all of them have an arrival time."""
        return bool(self._entries) and all(entry.at_s is not None for entry in self._entries)

    def items(self, count: int, seed: str, place: int) -> list[Item]:
        """Return ``count`` requests; equal arguments give equal requests.

        Made-up prompts share nothing with those of another ``seed``, which may be in caches
        already. Traces are in the order of their arrivals: the cell at ``place`` gets the
        ``place``-th section of ``count`` requests, or the first one if the trace ends before.
        """
        entries = islice(self._chosen(count, seed, place), count)
        return [self._item(entry, seed, number) for number, entry in enumerate(entries)]

    def _chosen(self, count: int, seed: str, place: int) -> Iterable[DatasetEntry]:
        draws = random.Random(f"{seed} {self._wanted.dataset}")
        if self._files is None:
            return self._made_up(draws)
        if self.has_times:
            if count > len(self._entries):
                raise UserError(f"the trace has {len(self._entries)} requests, {count} are asked")
            first = place * count
            if first + count > len(self._entries):
                first = 0
            return self._entries[first : first + count]
        return _drawn(self._entries, draws)

    def _made_up(self, draws: random.Random) -> Iterator[DatasetEntry]:
        wanted = self._wanted
        output = wanted.output_tokens or 64
        if wanted.dataset == "random":
            return synthetic_datasets.random_lengths(
                wanted.prompt_tokens, output, wanted.range_fraction, draws
            )
        if wanted.dataset == "shared-prefix":
            return synthetic_datasets.shared_prefix(
                wanted.prefix_tokens, wanted.num_prefixes, wanted.prompt_tokens, output, draws
            )
        if wanted.dataset == "multi-turn":
            return synthetic_datasets.multi_turn(
                wanted.prompt_tokens, output, wanted.sessions, draws
            )
        return synthetic_datasets.published_lengths(wanted.dataset, draws)

    def _item(self, entry: DatasetEntry, seed: str, number: int) -> Item:
        text = entry.text
        asked = entry.prompt_tokens or 1 if text is None else self._words.count(text)
        output = self._output_tokens(entry, asked)
        room = self._room(output)
        length = asked if room is None else min(asked, room)
        is_cut = length < asked
        sent: str | list[int]
        if text is None:
            prompt = self._tokens(entry, length, f"{seed} {number}", seed)
            sent = self._words.text(prompt) if self._wanted.as_text else prompt
        elif is_cut:
            sent = without_middle(text, length, self._words.encode)
            length = self._words.count(sent)
        else:
            sent = text
        return Item(sent, length, output, entry.at_s, entry.source, is_cut)

    def _tokens(self, entry: DatasetEntry, length: int, own: str, seed: str) -> list[int]:
        block = self._wanted.trace_block_tokens
        found: list[int] = []
        if entry.block_ids:
            if len(entry.block_ids) < length // block:
                raise UserError(
                    f"{entry.source}: {len(entry.block_ids)} hash_ids for {length} tokens are too "
                    f"few for blocks of {block}: give the trace's own with --trace-block-tokens"
                )
            for one in entry.block_ids[: -(-length // block)]:
                found += self._words.tokens(block, f"block {one}")
            # Some traces leave the partial last block without an id.
            return (found + self._words.tokens(block, own))[:length]
        shared = min(entry.shared_tokens, length)
        found = self._words.tokens(shared, f"{seed} {entry.shared_by}") if shared else []
        return found + self._words.tokens(length - shared, own)

    def _output_tokens(self, entry: DatasetEntry, prompt_tokens: int) -> int:
        wanted = self._wanted
        if wanted.output_tokens is not None and wanted.dataset != "random":
            count = wanted.output_tokens
        elif entry.output_tokens is not None:
            count = entry.output_tokens
        elif entry.output_text is not None:
            count = self._words.count(entry.output_text)
        else:
            raise UserError(
                f"{entry.source}: no output, output_length or max_gen says how long the answer "
                "is: give --output-tokens"
            )
        if wanted.max_output_tokens is not None:
            count = min(count, wanted.max_output_tokens)
        if wanted.context_tokens is not None:
            left = wanted.context_tokens - prompt_tokens - 1
            count = min(count, max(left, wanted.context_tokens // 2))
        return max(1, count)

    def _room(self, output: int) -> int | None:
        """Return the maximum number of tokens of a prompt; None without a limit."""
        wanted = self._wanted
        limits = []
        if wanted.max_prompt_tokens is not None:
            limits.append(wanted.max_prompt_tokens)
        if wanted.context_tokens is not None:
            # One token is left for what a server puts before a text.
            limits.append(max(1, wanted.context_tokens - output - 1))
        return min(limits) if limits else None


def _files(wanted: WantedLengths) -> list[Path]:
    if wanted.dataset in NAMED and wanted.data == FROM_HUB:
        return [fetch(wanted.dataset)]
    if wanted.dataset in NAMED:
        return dataset_files(wanted.dataset, data_folder(wanted.data))
    path = Path(wanted.dataset)
    if not path.is_file():
        check_known("dataset, and no file", wanted.dataset, (*NAMED, *MADE_UP))
    return [path]


def _drawn(entries: Sequence[DatasetEntry], draws: random.Random) -> Iterator[DatasetEntry]:
    """Yield all entries in random order, endlessly, each time in a new order."""
    while True:
        yield from draws.sample(entries, len(entries))


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
