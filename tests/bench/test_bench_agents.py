"""Agent sessions for coarse engines, seats that run them, and what their records show."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from random import Random

import pytest
import zstandard

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.sim.result import LatencyLimits
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.plan.probe.profile_file import profile_text
from banaserve_route.sim.programs import ProgramCall
from banaserve_route.sim.replica import UNIT_BYTES
from benchmarks.agents.figures import UNITS, ended_turns, equal_fraction, figures_of, prompt_work
from benchmarks.agents.sessions import MAX_OUTPUT, TOKENS, PromptTokens, coarse, sessions
from benchmarks.agents.turns import AgentTurn, run_seats
from benchmarks.routers.loads import Steps

_LOGNORMAL = {"mu": 6.0, "sigma": 1.0, "max": 50_000.0}
_PARAMS = {
    "new_tokens_per_turn": _LOGNORMAL,
    "generation_length": _LOGNORMAL,
    "inter_turn_delay": {
        "agentic_fraction": 0.7,
        "agentic_delay": {"mu": 7.0, "sigma": 1.0},
        "human_delay": {"mu": 9.0, "sigma": 1.0},
    },
    "reset": {"base_probability": 0.05, "context_scaling": 1.5},
    "max_prompt_tokens": 200_000,
    "cache": {
        "layer1_tokens": 3200,
        "layer1_5_tokens": 1600,
        "layer2": _LOGNORMAL,
        "layer1_5_groups": {"num_groups": 3, "zipf_alpha": 0.6},
    },
}
_SPAN = {
    "name": "agent",
    "attributes": {"gen_ai.input.messages": "words " * 40, "gen_ai.output.text": "words " * 40},
}


@pytest.fixture
def data(tmp_path):
    """Data folder with a small manifest, and a graph of two calls at once."""
    folder = tmp_path / "agent"
    folder.mkdir()
    told = {"generation_params": _PARAMS}
    (folder / "coding_sessions_manifest.json").write_text(json.dumps(told))
    times = {"start_time": "2026-01-01T00:00:01.000000Z", "end_time": "2026-01-01T00:00:02.000000Z"}
    graph = {"spans": [_SPAN | times, _SPAN | times]}
    packed = zstandard.compress(json.dumps(graph).encode())
    (folder / "otel_fan.json.zst").write_bytes(packed)
    return tmp_path


def turn(
    name: str, prompt: list[int], sent_s: float, end_s: float | None, cached: int = 0, **more
) -> AgentTurn:
    record = RequestRecord(
        id=name,
        sent_at_s=sent_s,
        first_token_at_s=sent_s + 1.0,
        ended_at_s=end_s,
        cached_tokens=cached,
        token_ids=more.pop("answer", [1, 2]),
    )
    return AgentTurn(prompt, more.pop("is_last", False), record)


def numbered(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_coarse_profile_takes_the_time_of_all_tokens(tmp_path):
    fine = profiles.load("llama-3.1-8b-h100")
    text = profile_text(coarse(fine), ["coarse"])
    (tmp_path / "p.toml").write_text(text)
    slow, fast = StepCosts(profiles.load(str(tmp_path / "p.toml"))), StepCosts(fine)
    tokens, context, batch = 40, 500, 3
    one, _ = slow.mixed_s(tokens, tokens**2, batch, context)
    # The same as TOKENS steps, of which each has as many prompt tokens.
    each, _ = fast.mixed_s(tokens, TOKENS * tokens**2, batch, TOKENS * context)
    assert one == pytest.approx(TOKENS * each, rel=1e-3)
    assert slow.fetch_token_s == pytest.approx(TOKENS * fast.fetch_token_s, rel=1e-3)
    assert coarse(fine).memory.kv_tokens == fine.memory.kv_tokens // TOKENS


def test_sessions_of_a_seed_are_the_same_and_fit_the_context(data):
    some, again, others = (list(islice(sessions(data, seed, 500), 30)) for seed in (1, 1, 2))
    assert some == again != others
    calls = [step for steps in some for step in steps if isinstance(step, list)]
    assert {len(step) for step in calls} == {1, 2}, "turns, and calls of subagents at once"
    assert max(len(c.prompt + c.output) for step in calls for c in step) <= 500 * UNIT_BYTES
    assert max(len(c.output) for step in calls for c in step) == MAX_OUTPUT * UNIT_BYTES
    assert all(len(c.prompt) for step in calls for c in step)


def test_an_answer_is_in_the_prompts_that_follow():
    tokens, draws = PromptTokens(3), Random(0)
    prompt, output, new = (draws.randbytes(4 * UNIT_BYTES) for _ in range(3))
    first = tokens.of(prompt)
    assert first == PromptTokens(3).of(prompt) != PromptTokens(4).of(prompt)
    tokens.answered(output, [7, 8, 9, 10])
    assert tokens.of(prompt + output + new) == [*first, 7, 8, 9, 10, *tokens.of(new)]


def test_prompt_tokens_that_were_computed_again():
    shared, own = numbered(64), numbered(32, 1000)
    turns = [
        turn("a", shared, 0.0, 9.0, answer=own[:33]),
        turn("b", shared + own, 1.0, 5.0, cached=32),  # a computes 64 of them, 32 were waited for
        turn("c", [*shared, *own, 1], 2.0, None),  # cut off, but b had computed it before
        turn("d", [*shared, *own, 2], 10.0, 11.0, cached=96),
    ]
    work = prompt_work(turns)
    assert (work.prompt, work.computed) == (64 + 96 + 97, 64 + 64 + 1)
    assert (work.known, work.repeated) == (0 + 64 + 96, 32)


def test_the_last_token_of_a_prompt_is_always_computed():
    same = [turn("a", numbered(64), 0.0, 2.0), turn("b", numbered(64), 3.0, 4.0, cached=32)]
    assert prompt_work(same).repeated == 0


def test_an_answers_last_token_is_not_known():
    first = turn("a", numbered(32), 0.0, 2.0, answer=numbered(32, 32))
    second = turn("b", numbered(96), 3.0, 4.0, cached=32)
    assert prompt_work([first, second]).known == 32
    longer = turn("a", numbered(32), 0.0, 2.0, answer=numbered(33, 32))
    assert prompt_work([longer, second]).known == 64


def test_figures_count_turns_after_the_warm_up_within_both_limits():
    answer = numbered(11)
    times = [(0.0, 2.0), (10.0, 27.0), (12.0, 45.0), (14.0, None), (16.0, 18.0)]
    turns = [turn(str(n), numbered(40), *both, answer=answer) for n, both in enumerate(times)]
    turns[-1].record.first_token_at_s = 17.5
    found = figures_of(turns, 10.0, 50.0, LatencyLimits(ttft_s=1.2, tpot_s=0.15))
    assert found.keys() == UNITS.keys()
    assert found["turns_per_s"] == pytest.approx(3 / 40)
    assert found["goodput"] == pytest.approx(1 / 40), "one was late to begin, one too slow"
    assert ended_turns(turns)[1] == [10.0, 1.0, pytest.approx(1.6 / TOKENS), 40, 0, 0]
    assert len(ended_turns(turns)) == 4
    assert found["tpot_mean"] == pytest.approx((1.6 + 3.2 + 0.05) / TOKENS / 3)


def test_answers_are_compared_where_prompts_are_equal():
    ours = [turn("a", [1], 0.0, 1.0), turn("b", [2], 0.0, 1.0), turn("c", [3], 0.0, 1.0)]
    theirs = [
        turn("a", [1], 0.0, 1.0),
        turn("b", [9], 0.0, 1.0, answer=[5]),
        turn("c", [3], 0.0, 1.0, answer=[5]),
    ]
    assert equal_fraction(ours, theirs) == 0.5


class _VirtualClient:
    """Client of a server that answers after a second of virtual time, or refuses.

    Attributes:
        clock: The client itself: its time passes with the loop's turns.
    """

    def __init__(self, *, error: str | None = None) -> None:
        self.clock = self
        self.error = error
        self.sent: list[tuple[float, list[int], str]] = []
        self._now_s = 0.0
        self._wakes: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        wake = asyncio.get_running_loop().create_future()
        self._wakes.append((self._now_s + seconds, len(self._wakes), wake))
        await wake

    async def advance(self) -> None:
        """Let the earliest sleepers wake, one after the other, for as long as there are any."""
        while True:
            for _ in range(8):
                await asyncio.sleep(0)
            left = [wake for wake in self._wakes if not wake[2].done()]
            if not left:
                return
            self._now_s, _, future = min(left, key=lambda wake: wake[:2])
            future.set_result(None)

    async def send_into(self, call, record):
        self.sent.append((self._now_s, call.prompt, call.extra["user"]))
        await self.sleep(1.0)
        record.error = self.error
        record.token_ids = numbered(call.max_tokens, 5)
        record.ended_at_s = self._now_s
        return record


def _session(name: str, pause_s: float) -> Steps:
    draws = Random(name)
    first = ProgramCall(draws.randbytes(4 * UNIT_BYTES), draws.randbytes(2 * UNIT_BYTES), name)
    second = ProgramCall(
        first.prompt + first.output + draws.randbytes(UNIT_BYTES), first.output[:UNIT_BYTES], name
    )
    return [[first], pause_s, [second, second], pause_s]


async def _seats(client, duration_s: float) -> list[AgentTurn]:
    made = (_session(f"s{n}", 2.0) for n in range(1000))
    running = asyncio.create_task(run_seats(client, made, 0, 2, duration_s))
    waking = asyncio.create_task(client.advance())
    await asyncio.wait([running, waking], return_when=asyncio.FIRST_COMPLETED)
    waking.cancel()
    return await running


def test_seats_run_sessions_one_after_the_other_until_the_end():
    client = _VirtualClient()
    turns = asyncio.run(_seats(client, 9.5))
    seat = [sent for sent in client.sent if sent[2] in ("s0", "s2", "s4")]
    assert [at_s for at_s, _, _ in seat] == [0.0, 3.0, 3.0, 4.0, 7.0, 7.0, 8.0]
    assert seat[1][1][4:6] == [5, 6], "the answer is in the next prompt"
    assert [one.is_last for one in turns if one.record.id.startswith("0.0.")] == [False, True, True]
    cut = [one for one in turns if one.record.ended_at_s is None]
    assert all(one.record.sent_at_s > 8.5 for one in cut)


def test_a_request_that_fails_ends_the_run():
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(_seats(_VirtualClient(error="gone"), 9.5))
    assert caught.group_contains(UserError, match="gone")
