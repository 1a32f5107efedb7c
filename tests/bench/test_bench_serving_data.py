"""Requests for ``bench serving``: formats of files, lengths as asked, stand-ins, prefixes."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from banaserve.base.errors import UserError
from banaserve_bench.datasets import synthetic_datasets
from banaserve_bench.datasets.entries import read_entries
from banaserve_bench.datasets.items import Dataset, Item, WantedLengths, Words
from depth import chosen_seed

BESIDE_CHECKOUT = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def words() -> Words:
    letters = "abcdefgh"
    known = [f"{a}{b}{c}" for a in letters for b in letters for c in letters]
    vocabulary = {"[UNK]": 0, **{f"Ġ{word}": n for n, word in enumerate(known, start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Words(tokenizer)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def items(
    words: Words, count: int = 4, seed: object = 0, place: int = 0, **wanted: Any
) -> list[Item]:
    return Dataset(WantedLengths(**wanted), words).items(count, str(seed), place)


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        (
            {"input_length": 7, "output_length": 2, "timestamp": 1500, "hash_ids": [3, 4]},
            {"prompt_tokens": 7, "output_tokens": 2, "at_s": 1.5, "block_ids": (3, 4)},
        ),
        ({"input_length": 7, "output_length": 2, "t": 3}, {"prompt_tokens": 7, "at_s": 3}),
        (
            {"input_length": 7, "output_length": 2, "timestamp": 1795867201},
            {"at_s": 1795867201.0},
        ),
        ({"input_length": 7, "output_length": 2}, {"prompt_tokens": 7, "at_s": None}),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
            {"text": "Hi", "output_text": "Ho"},
        ),
        (
            {"conversations": [{"from": by, "value": by} for by in ("gpt", "user", "gpt")]},
            {"text": "user", "output_text": "gpt"},
        ),
        ({"instruction": "Do", "input": "it", "output": "ok"}, {"text": "Do\n\nit"}),
        ({"prompt": "Read", "max_gen": 32}, {"text": "Read", "output_tokens": 32}),
        ({"text": "Read", "output_length": 5}, {"text": "Read", "output_tokens": 5}),
    ],
)
def test_formats(tmp_path: Path, row: object, entry: dict[str, object]) -> None:
    for path in (jsonl(tmp_path / "a.jsonl", row), tmp_path / "a.json"):
        if path.suffix == ".json":
            path.write_text(json.dumps([row]))
        [found] = read_entries(path)
        assert found.source == f"{path.name}:1"
        assert {name: getattr(found, name) for name in entry} == entry


def test_conversations_without_a_question_or_an_answer_are_left_out(tmp_path: Path) -> None:
    turns = [{"from": by, "value": by} for by in ("gpt", "human", "gpt")]
    rows = [{"conversations": some} for some in ([], turns[:1], turns[:2], turns)]
    [found] = read_entries(jsonl(tmp_path / "a.jsonl", *rows))
    assert (found.source, found.text, found.output_text) == ("a.jsonl:4", "human", "gpt")


def test_azure_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:08.2799600,396,109\n"
    )
    first, second = read_entries(path)
    assert (first.prompt_tokens, first.output_tokens) == (374, 44)
    assert second.at_s is not None
    assert first.at_s is not None
    assert second.at_s - first.at_s == pytest.approx(4.3)


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("2024-05-10 00:00:00+00:00", "2024-05-10 00:00:00.009930+00:00", 0.00993),
        ("2024-03-10 06:59:59.5", "2024-03-10 07:00:00.5", 1.0),
        ("2024-03-10 01:59:59.5", "2024-03-10 03:00:00", 3600.5),
    ],
)
def test_azure_csv_is_in_utc_wherever_it_is_read(
    tmp_path: Path, first: str, second: str, seconds: float
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},3,4\n{second},3,4\n")
    times_s = [entry.at_s or 0.0 for entry in read_entries(path)]
    assert times_s[1] - times_s[0] == pytest.approx(seconds, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "kind", "words_of_error"),
    [
        ("a.jsonl", '{"input_length": 1}', None, "line 1: the field output_length is None"),
        ("a.jsonl", '{"input_length": -1, "output_length": 1}', None, "input_length is -1"),
        ("a.jsonl", '{"input_length": 1.5, "output_length": 1}', None, "input_length is 1.5"),
        (
            "a.jsonl",
            '{"input_length": 1, "output_length": 1, "t": "x"}',
            None,
            "line 1: t is 'x': give a date",
        ),
        (
            "a.jsonl",
            f'{{"input_length": 1, "output_length": 1, "t": {"9" * 400}}}',
            None,
            "line 1: no arrival time in t (s), timestamp (ms)",
        ),
        (
            "a.jsonl",
            '{"input_length": 1, "output_length": 1, "hash_ids": "1"}',
            None,
            "hash_ids is not a list",
        ),
        ("a.jsonl", '{"prompt": "x"}', "alpaca", "line 1: the field instruction is missing"),
        ("a.jsonl", '{"prompt": "x", "output": 3}', None, "the field output is not a text"),
        ("a.jsonl", '{"prompt": "x", "max_gen": "3"}', None, "the field max_gen is '3'"),
        ("a.jsonl", '{"conversations": "x"}', None, "conversations is no list"),
        ("a.jsonl", '{"conversations": []}', None, "holds no requests"),
        ("a.jsonl", '{"answer": "x"}', None, "line 1: none of the fields"),
        ("a.jsonl", '{"prompt": 3}', None, "line 1: the field prompt is not a text"),
        ("a.jsonl", "", None, "holds no requests"),
        ("a.json", '[{"answer": "x"}]', None, "object 1: none of the fields"),
        ("a.json", '{"prompt": "x"}', None, "not a list of JSON objects"),
        ("a.csv", "TIMESTAMP,ContextTokens\n", None, "no column GeneratedTokens"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n",
            None,
            "line 2: TIMESTAMP is 'noon'",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n",
            None,
            "line 2: ContextTokens is 'x'",
        ),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, name: str, text: str, kind: str | None, words_of_error: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_entries(path, kind)
    assert words_of_error in str(caught.value)
    assert str(path) in str(caught.value)


def test_texts_are_drawn_by_seed_and_again_when_they_run_out(tmp_path: Path, words: Words) -> None:
    rows = [{"prompt": f"word {n}", "output": "one two"} for n in range(3)]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    found = items(words, 6, dataset=str(path))
    assert sorted(str(item.prompt) for item in found[:3]) == ["word 0", "word 1", "word 2"]
    assert {(item.prompt_tokens, item.output_tokens) for item in found} == {(2, 2)}
    assert found == items(words, 6, dataset=str(path))
    orders = {tuple(i.source for i in items(words, 3, n, dataset=str(path))) for n in range(8)}
    assert len(orders) > 1


def test_answers_without_a_length(tmp_path: Path, words: Words) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "word"})
    with pytest.raises(UserError, match=r"a.jsonl:1: no output.*--output-tokens"):
        items(words, 1, dataset=str(path))
    [item] = items(words, 1, dataset=str(path), output_tokens=5)
    assert item.output_tokens == 5


def test_traces_have_the_order_of_their_arrivals_and_their_prefixes(
    tmp_path: Path, words: Words
) -> None:
    rows = [
        {"timestamp": n * 1000, "input_length": 20, "output_length": n, "hash_ids": [0, n]}
        for n in (1, 5, 3, 2, 4, 6)
    ]
    path = jsonl(tmp_path / "trace.jsonl", *rows)
    first = items(words, 3, dataset=str(path), trace_block_tokens=12)
    second = items(words, 3, place=1, dataset=str(path), trace_block_tokens=12)
    times = [(item.at_s, item.output_tokens) for item in first + second]
    assert times == [(n, n) for n in range(1, 7)]
    prompts = [item.prompt for item in first + second]
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 1
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 6
    with pytest.raises(UserError, match="--trace-block-tokens"):
        items(words, 1, dataset=str(path), trace_block_tokens=4)
    with pytest.raises(UserError, match="the trace has 6 requests, 7 are asked"):
        items(words, 7, dataset=str(path))


def test_what_is_too_long_is_cut(tmp_path: Path, words: Words) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "begin " + "x " * 100 + "end", "max_gen": 8})
    [item] = items(words, 1, dataset=str(path), context_tokens=40)
    assert item.is_cut
    assert item.prompt_tokens + item.output_tokens < 40
    assert isinstance(item.prompt, str)
    assert item.prompt.startswith("begin")
    assert item.prompt.endswith("end")
    [made] = items(words, 1, dataset="random", prompt_tokens=50, max_prompt_tokens=10)
    assert (made.prompt_tokens, made.is_cut) == (10, True)
    [short] = items(words, 1, dataset="random", output_tokens=90, max_output_tokens=7)
    assert (short.output_tokens, short.is_cut) == (7, False)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"cannot read the tokenizer {tmp_path}/tokenizer.json"):
        Words.of(tmp_path)


def test_made_up_prompts_as_text_have_the_length_too(words: Words) -> None:
    for item in items(words, dataset="random", prompt_tokens=30, range_fraction=0.5, as_text=True):
        assert isinstance(item.prompt, str)
        assert words.count(item.prompt) == item.prompt_tokens
        assert 15 <= item.prompt_tokens <= 45


def test_shared_prefix(words: Words) -> None:
    found = items(words, dataset="shared-prefix", prefix_tokens=50, prompt_tokens=10)
    assert len({tuple(item.prompt[:50]) for item in found}) == 1
    assert len({tuple(item.prompt[50:]) for item in found}) == len(found)
    several = items(words, 40, dataset="shared-prefix", prefix_tokens=50, num_prefixes=3)
    assert len({tuple(item.prompt[:50]) for item in several}) == 3
    other = items(words, 1, seed=1, dataset="shared-prefix", prefix_tokens=50)
    assert other[0].prompt[:50] != found[0].prompt[:50]


def test_turns_of_a_chat_begin_with_the_turn_before(words: Words) -> None:
    found = items(words, 32, dataset="multi-turn", prompt_tokens=20, output_tokens=6)
    first, second = found[0], found[8]
    assert (first.source, second.source) == ("multi-turn:0:0", "multi-turn:0:1")
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert len(second.prompt) >= len(first.prompt) + 6 + 10
    assert found[1].prompt[: len(first.prompt)] != first.prompt


@pytest.mark.parametrize("kind", synthetic_datasets.PUBLISHED)
def test_stand_ins_have_the_published_quantiles(kind: str) -> None:
    drawn = list(
        islice(synthetic_datasets.published_lengths(kind, random.Random(chosen_seed(1))), 4000)
    )
    lengths = synthetic_datasets._LENGTHS[kind]
    for name, table in (("prompt_tokens", lengths.prompt), ("output_tokens", lengths.output)):
        values = sorted(getattr(entry, name) for entry in drawn)
        assert table[0] <= values[0]
        assert values[-1] <= table[-1]
        for share, published in ((0.25, table[2]), (0.5, table[3]), (0.9, table[5])):
            # Three in a hundred more or fewer of the draws lie below it.
            low, high = values[int(4000 * (share - 0.03))], values[int(4000 * (share + 0.03))]
            assert low <= published <= high


def test_an_unknown_dataset(words: Words) -> None:
    with pytest.raises(UserError, match="did you mean alpaca-like"):
        items(words, 1, dataset="alpaca-lik")


@pytest.mark.skipif(not BESIDE_CHECKOUT.is_dir(), reason="no data beside the checkout")
@pytest.mark.parametrize("kind", ["alpaca", "azure", "mooncake", "sharegpt"])
def test_published_data(words: Words, kind: str) -> None:
    block = {"sharegpt": 16}.get(kind, 512)
    found = items(
        words, 20, dataset=kind, data=BESIDE_CHECKOUT, trace_block_tokens=block, context_tokens=4096
    )
    assert len(found) == 20
    assert all(item.prompt_tokens + item.output_tokens < 4096 for item in found)


def test_without_a_hub(words: Words, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="give its path with --data, or use sharegpt-like"):
        items(words, 1, dataset="sharegpt", data=Path("hub"))
    with pytest.raises(UserError, match="unknown dataset on the hub: mooncake"):
        items(words, 1, dataset="mooncake", data=Path("hub"))
