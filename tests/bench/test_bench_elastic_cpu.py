"""What the comparison with plain vLLM servers sends, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys

import psutil
import pytest

from banaserve_bench.loadgen.client import CompletionCall, RequestRecord
from benchmarks.elastic_cpu import loads
from benchmarks.elastic_cpu.figures import OURS, SYSTEMS, LoadSample, Work, figures
from benchmarks.elastic_cpu.loads import LOADS, ChatLoad, Conversation, arrivals_s, conversations
from benchmarks.elastic_cpu.systems import SystemUnderTest, alone
from waiting import eventually


class NumberedWords:
    """Words of one token each, as text and as tokens."""

    def tokens(self, count: int, key: str) -> list[int]:
        return random.Random(key).choices(range(100_000), k=count)

    def text(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


WORDS = NumberedWords()


def sample(requests_per_s: float, ttft_s: float, cpu_s: float, *tokens: int) -> LoadSample:
    work = Work(8 * cpu_s, 64.0)
    return LoadSample(requests_per_s, ttft_s, 4 * ttft_s, cpu_s, [list(tokens)], work)


def test_each_metric_counts_against_its_better_peer() -> None:
    samples = {
        ("chats", "banaserve"): [sample(2.0, 0.5, 1.0, 1, 2), sample(4.0, 0.5, 2.0, 1, 2)],
        ("chats", "round-robin"): [sample(1.0, 0.4, 1.5, 1, 2), sample(2.0, 0.4, 3.0, 1, 2)],
        ("chats", "prefix-affinity"): [sample(2.5, 0.6, 0.5, 1, 2), sample(5.0, 0.6, 1.0, 1, 3)],
    }
    found = figures(samples)
    assert found["chats.requests_ratio.round-robin"][0] == pytest.approx([2, 2])
    assert found["chats.requests_ratio.prefix-affinity"][0] == pytest.approx([0.8, 0.8])
    assert found["chats.ttft_ratio.round-robin"][0] == pytest.approx([0.8, 0.8])
    assert found["chats.ttft_ratio.prefix-affinity"][0] == pytest.approx([1.2, 1.2])
    assert found["chats.cpu_seconds_ratio.round-robin"][0] == pytest.approx([1.5, 1.5])
    assert found["cpu_ratio_min"][0] == pytest.approx([0.8])
    assert found["chats.cpu_seconds_ratio.prefix-affinity"][0] == pytest.approx([0.5, 0.5])
    assert found["cpu_seconds_ratio_min"][0] == pytest.approx([0.5])
    assert found["chats.banaserve.latency"][0] == pytest.approx([2, 2])
    assert found["chats.banaserve.steps_per_request"][0] == pytest.approx([8, 16])
    assert found["chats.banaserve.cached_per_request"][0] == pytest.approx([64, 64])
    assert found["equal_answers_fraction"][0] == pytest.approx([3 / 4])


def test_the_least_is_over_all_loads() -> None:
    good, bad = [sample(1.0, 1.0, 1.0, 7)], [sample(0.5, 1.0, 1.0, 7)]
    samples = {("chats", name): good for name in SYSTEMS}
    samples |= {("nothing-shared", name): bad if name == OURS else good for name in SYSTEMS}
    found = figures(samples)
    assert found["cpu_ratio_min"][0] == pytest.approx([0.5])
    assert found["chats.requests_ratio.round-robin"][0] == pytest.approx([1])


@pytest.mark.parametrize("name", LOADS)
def test_equal_keys_give_equal_requests_and_others_share_nothing(name: str) -> None:
    load = LOADS[name]
    one = conversations(load, 6, "a", WORDS)  # type: ignore[arg-type]
    assert one == conversations(load, 6, "a", WORDS)  # type: ignore[arg-type]
    other = conversations(load, 6, "b", WORDS)  # type: ignore[arg-type]
    starts = {c.questions[0].split()[0] for c in one}
    assert starts.isdisjoint(c.questions[0].split()[0] for c in other)
    assert all(len(c.questions) == load.turns for c in one)


def test_prompts_of_one_prefix_share_it_and_no_more() -> None:
    load = LOADS["shared-prefixes"]
    made = conversations(load, 12, "a", WORDS)  # type: ignore[arg-type]
    prompts = [one.questions[0].split() for one in made]
    prefixes = {tuple(words[: load.prefix_tokens]) for words in prompts}
    assert 1 < len(prefixes) <= load.num_prefixes
    assert len({tuple(words[: load.prefix_tokens + 8]) for words in prompts}) == len(prompts)


def test_a_short_run_has_a_ninth_of_each_and_never_none() -> None:
    load = ChatLoad(0, 0, 8, 4, 3, 27, 1).shortened()
    assert (load.closed, load.open, load.turns) == (3, 1, 3)


def test_arrivals_begin_at_once_and_keep_the_rate() -> None:
    at_s = arrivals_s(2001, 4.0, "a")
    assert at_s[0] == 0.0
    assert at_s == sorted(at_s)
    assert at_s[-1] == pytest.approx(500, rel=0.1)


class AnsweringClient:
    """Answers each call with its number; fails where the prompt says so."""

    def __init__(self) -> None:
        self.calls: list[CompletionCall] = []
        self.num_under_way = self.most_under_way = 0

    async def send(self, call: CompletionCall) -> RequestRecord:
        self.calls.append(call)
        number = len(self.calls)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        await asyncio.sleep(0)
        self.num_under_way -= 1
        asked = call.prompt or call.messages[-1]["content"]
        error = "no" if asked == "fail" else None
        return RequestRecord(id=call.id, sent_at_s=0.0, text=f"answer {number}", error=error)


def test_a_turn_holds_what_was_said_before() -> None:
    client = AnsweringClient()
    chat = Conversation("c", ("one", "two"), 4)
    records = asyncio.run(loads.hold(client, chat))  # type: ignore[arg-type]
    assert [record.error for record in records] == [None, None]
    assert client.calls[1].messages == (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "two"},
    )
    alone = Conversation("d", ("one",), 4)
    asyncio.run(loads.hold(client, alone))  # type: ignore[arg-type]
    assert (client.calls[2].prompt, client.calls[2].messages) == ("one", ())


def test_a_failure_ends_its_conversation() -> None:
    client = AnsweringClient()
    records = asyncio.run(loads.hold(client, Conversation("c", ("one", "fail", "three"), 4)))  # type: ignore[arg-type]
    assert [record.error for record in records] == [None, "no"]


def test_so_many_are_kept_under_way_and_records_keep_their_order() -> None:
    client = AnsweringClient()
    what = [Conversation(str(number), ("one", "two"), 4) for number in range(7)]
    records = asyncio.run(loads.closed(client, what, 3))  # type: ignore[arg-type]
    assert client.most_under_way == 3
    assert [record.id for record in records] == [f"{n} {turn}" for n in range(7) for turn in (0, 1)]


class Sleeping:
    """A server of one process, with one that it shares with another."""

    def __init__(self, *processes: psutil.Process) -> None:
        self._processes = list(processes)

    def processes(self) -> list[psutil.Process]:
        return self._processes


def test_who_is_not_measured_is_stopped_and_goes_on() -> None:
    command = [sys.executable, "-c", "input()"]
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(4):
            popen = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(popen.kill)
            found.append(psutil.Process(popen.pid))
        ours, first, second, shared = found
        systems = [
            SystemUnderTest("ours", Sleeping(ours)),  # type: ignore[arg-type]
            SystemUnderTest("first", Sleeping(first, shared)),  # type: ignore[arg-type]
            SystemUnderTest("second", Sleeping(second, shared)),  # type: ignore[arg-type]
        ]

        def stopped() -> list[bool]:
            return [one.status() == psutil.STATUS_STOPPED for one in found]

        for which, expected in enumerate(
            ([False, True, True, True], [True, False, True, False], [True, True, False, False])
        ):
            with alone(systems[which], systems):
                eventually(lambda wanted=expected: stopped() == wanted)
            eventually(lambda: not any(stopped()))
