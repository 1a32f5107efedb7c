"""Traces and files of lengths: both formats read, bad lines named."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve.contracts.trace_events import RequestSummary
from banaserve.sim.trace import Arrival, cut, read_trace, requests_of
from banaserve_bench.simulation.lengths import (
    MEASURED,
    draw_measured,
    read_lengths,
    token_counter,
)
from depth import chosen_seed

GOOD = '{"t": 0, "input_length": 1, "output_length": 1}\n'
HEADING = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADING + "2023-11-16 18:15:46.6805900,374,44\n"


def test_json_lines_in_either_unit_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 4000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1000, "input_length": 5000, "output_length": 9, "hash_ids": "[]"}\n'
        "\n"
        '{"t": 2.0, "input_length": 7, "output_length": 8}\n'
    )
    rows = read_trace(path)
    assert rows == [
        Arrival(0.0, 5000, 9),
        Arrival(1.0, 7, 8),
        Arrival(3.0, 600, 5, (1, 2)),
    ]
    requests = list(requests_of(rows, speed=2.0, max_tokens=2048))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.hash_ids) for r in requests] == [
        (0.0, 2039, 9, ()),
        (0.5, 7, 8, ()),
        (1.5, 600, 5, (1, 2)),
    ]
    assert len(read_trace(path, limit=2)) == 2


def test_azures_table(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    lines = AZURE + "2023-11-16 18:15:50.9951690,396,109\n"
    path.write_text(lines.replace("\n", "\r\n"), encoding="utf-8-sig")  # as Windows writes it
    first, second = read_trace(path)
    assert first == Arrival(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert second[1:] == (396, 109, ())


def test_azures_table_with_an_offset_from_utc(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(
        HEADING + "2024-05-10 00:00:00+00:00,2,5\n2024-05-10 00:00:00.250000+00:00,3,6\n"
    )
    assert read_trace(path) == [Arrival(0.0, 2, 5), Arrival(0.25, 3, 6)]


LOG = (
    '{"time": "2026-11-28T12:00:02Z", "usage": {"prompt_tokens": 50, "completion_tokens": 0}}',
    '{"time": "2026-11-28T12:00:01Z", "usage": {"prompt_tokens": 30, "completion_tokens": 4}}',
    '{"time": "2026-11-28T12:00:00Z", "usage": {"prompt_tokens": 10, "completion_tokens": 3}}',
)
FRONT_DOOR = [
    f'{{"arrived_at_s": {at_s}, "prompt_tokens": {prompt}, "output_tokens": {output}, {end}}}'
    for at_s, prompt, output, end in (
        (1795867201.0, 30, 4, '"end": "stop"'),
        (1795867202.0, 50, 9, '"end": ""'),
        (1795867200.0, 10, 3, '"end": "stop"'),
        (1795867202.0, 50, 0, '"end": "error"'),
    )
]
TABLE = (
    "ts,model,prompt_tokens,completion_tokens",
    "1795867201.0,m,30,4",
    "1795867202.0,m,50,0",
    "1795867200.0,m,10,3",
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.jsonl", "\n".join(LOG)),
        # What `banaserve trace --json` prints.
        ("requests.json", f"[{','.join(FRONT_DOOR)}]"),
        ("requests.jsonl", "\n".join(FRONT_DOOR)),
        ("log.csv", "\n".join(TABLE)),
        ("log.csv", "\n".join(TABLE).replace(".0,", "000,")),
        ("log.jsonl", "\n".join(LOG).replace('"time"', '"timestamp"')),
    ],
)
def test_logs_with_token_counts_without_what_failed(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    for limit in (None, 2):
        assert read_trace(path, limit) == [Arrival(0.0, 10, 3), Arrival(1.0, 30, 4)]
    assert read_lengths(path) == [(30, 4), (10, 3)]


def test_a_log_of_the_front_door_is_what_its_command_prints(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    requests = [
        RequestSummary("r1", 1795867200.0, 12, 0, 7, ["p0", "d0"], 0.1, 0.5, "length"),
        RequestSummary("r2", 1795867200.5, 13, 0, 2, ["p0"], 0.1, 0.5, ""),
    ]
    path.write_bytes(msgspec.json.encode(requests))
    assert read_trace(path) == [Arrival(0.0, 12, 7)]


def test_conversations_are_counted_by_estimate_or_by_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "ShareGPT.json"
    path.write_text(
        """[
        {"id": "1", "conversations": [{"from": "system", "value": "Be kind."},
            {"from": "human", "value": "What is the time now?"},
            {"from": "gpt", "value": "It is late already."},
            {"from": "human", "value": "How late?"}]},
        {"id": "2", "conversations": [{"from": "gpt", "value": "Nothing was asked."}]}]"""
    )
    assert read_lengths(path) == [(5, 5)]
    assert read_lengths(path, lambda text: len(text.split())) == [(5, 4)]
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        token_counter(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [(10, 5, (10, 5)), (100, 10, (22, 10)), (5, 100, (1, 31)), (100, 100, (1, 31))],
)
def test_what_is_too_long_is_cut(prompt: int, output: int, expected: tuple[int, int]) -> None:
    assert cut(prompt, output, 32) == expected
    assert cut(prompt, output, None) == (prompt, output)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", GOOD + "{\n", "line 2: not a JSON object"),
        ("t.jsonl", GOOD + "[]\n", "line 2: not a JSON object"),
        ("t.jsonl", GOOD + '{"input_length": 1, "output_length": 1}', "line 2: no arrival time"),
        ("t.jsonl", GOOD + '{"t": -1, "input_length": 1}', "line 2: no arrival time in t"),
        ("t.jsonl", GOOD + f'{{"t": {"9" * 400}, "input_length": 1}}', "line 2: no arrival time"),
        ("t.jsonl", GOOD + '{"ts": "1795867201000000000"}', "or a date): ts is 1.795867201e+18"),
        ("t.jsonl", GOOD + '{"t": NaN, "input_length": 1}', "line 2: not a JSON object"),
        ("t.jsonl", GOOD + '{"t": 1, "output_length": 1}', "line 2: input_length is None"),
        (
            "t.jsonl",
            GOOD + '{"t": 1, "input_length": 1, "output_length": 0}',
            "line 2: output_length is 0",
        ),
        (
            "t.jsonl",
            '{"t": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}',
            "line 1: hash_ids is no list",
        ),
        (
            "t.jsonl",
            '{"t": 1, "input_length": 1, "output_length": 1, "hash_ids": "[1"}',
            "line 1: hash_ids is no list",
        ),
        ("t.jsonl", "\n", "holds no request"),
        ("t.csv", "TIMESTAMP,ContextTokens\n", "line 1: there is no column GeneratedTokens"),
        ("t.csv", HEADING, "holds no request"),
        ("t.csv", "time,model\n1,m\n", "line 1: there are no columns of lengths: give t (s)"),
        ("t.csv", "prompt_tokens,completion_tokens\n1,1\n", "line 2: no arrival time"),
        ("t.csv", "t,prompt_tokens,completion_tokens\nnan,1,1\n", "line 2: no arrival time"),
        ("t.json", f"[{GOOD.strip()}, 3]", "is not a list of JSON objects"),
        ("t.json", f'[{GOOD.strip()}, {{"t": 1}}]', "object 2: no lengths: give t (s)"),
        ("t.jsonl", '{"time": "now", "prompt_tokens": 1, "completion_tokens": 1}', "time is 'now'"),
        ("t.csv", AZURE + "yesterday,1,1\n", "line 3: TIMESTAMP is 'yesterday'"),
        ("t.csv", AZURE + "2023-11-16 18:15:47,many,1\n", "line 3: ContextTokens is 'many'"),
        ("t.csv", AZURE + "2023-11-16 18:15:47,1,0\n", "line 3: GeneratedTokens is 0"),
        ("t.csv", AZURE + "2023-11-16 18:15:47,1\n", "line 3: GeneratedTokens is ''"),
        ("t.jsonl.zst", GOOD, "not a zstd file"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as failure:
        read_trace(path)
    assert words in str(failure.value)
    assert str(path) in str(failure.value)


def test_lengths_of_traces_and_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"input_length": 3, "output_length": 4}\n'
        '{"instruction": "What is the time now?", "input": "", "output": "Late already."}\n'
        '{"instruction": "Say nothing.", "output": ""}\n'
        '{"prompt": "Who was it, of all people?", "answers": ["Bob Dylan", "Bob"]}\n'
    )
    assert read_lengths(path) == [(3, 4), (5, 4), (7, 3)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"}', "line 1: no lengths: give input_length"),
        ('{"conversations": "hello"}', "line 1: conversations is no list"),
        ('{"input_length": 3}', "line 1: output_length is None"),
        ('{"instruction": "Say nothing.", "output": ""}', "has no lengths"),
    ],
)
def test_a_file_without_lengths_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(line)
    with pytest.raises(UserError) as failure:
        read_lengths(path)
    assert words in str(failure.value)


@pytest.mark.parametrize(
    ("name", "mean"),
    [("alpaca_prompt", 18.3), ("alpaca_output", 57.6), ("longbench_prompt", 11640)],
)
def test_measured_lengths_have_their_mean_and_range(name: str, mean: float) -> None:
    draws = random.Random(chosen_seed(1))
    values = [draw_measured(name, draws) for _ in range(20_000)]
    assert MEASURED[name][0] <= min(values)
    assert max(values) <= MEASURED[name][-1]
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.1)
