"""Figures of a run: goodput, latencies, and prompt tokens that were computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.sim.result import LatencyLimits
from banaserve_bench.results.statistics import percentile
from benchmarks.agents.sessions import TOKENS
from benchmarks.agents.turns import AgentTurn

UNITS = {
    "goodput": "turns/modelled s",
    "good_fraction": "fraction",
    "turns_per_s": "turns/modelled s",
    "ttft_p50": "modelled s",
    "ttft_mean": "modelled s",
    "ttft_p99": "modelled s",
    "tpot_mean": "modelled s",
    "last_answer_ttft_mean": "modelled s",
    "computed_fraction": "fraction",
    "repeated_fraction": "fraction",
    "repeated_tokens": "tokens",
    "hit_over_bound": "fraction",
}
COLUMNS = ("sent_s", "ttft_s", "tpot_s", "prompt_tokens", "cached_tokens", "is_last")
_BLOCK = 32
"""Size of a block of the engines' caches: vLLM's smallest on a CPU."""


class PromptWork(NamedTuple):
    """Prompt tokens of turns, in tokens of the engines.

    Attributes:
        known: Tokens of whole blocks that earlier requests had computed or were computing.
        repeated: Number of these that were computed again.
    """

    prompt: int
    computed: int
    known: int
    repeated: int


def prompt_work(turns: Sequence[AgentTurn]) -> PromptWork:
    """Return the prompt tokens of the turns that have ended, and how many were computed again.

    A prompt counts as being computed from the time at which it is sent, an answer as computed from
    its end. At least the last token of a prompt is computed in any case.
    """
    events = [(turn.record.sent_at_s, 0, turn) for turn in turns]
    events += [(turn.record.ended_at_s, 1, turn) for turn in turns if turn.record.ended_at_s]
    seen: set[int] = set()
    sums = PromptWork(0, 0, 0, 0)
    for _, is_end, turn in sorted(events, key=lambda event: event[:2]):
        if is_end:
            # The KV of the last token of an answer is never computed.
            seen.update(_chain([*turn.prompt, *turn.record.token_ids[:-1]]))
            continue
        keys = _chain(turn.prompt)
        if turn.record.ended_at_s:
            most = (len(turn.prompt) - 1) // _BLOCK
            known = _BLOCK * next((n for n, key in enumerate(keys) if key not in seen), most)
            known = min(known, _BLOCK * most)
            cached = turn.record.cached_tokens or 0
            one = (len(turn.prompt), len(turn.prompt) - cached, known, max(0, known - cached))
            sums = PromptWork(*(a + b for a, b in zip(sums, one, strict=True)))
        seen.update(keys)
    return sums


def _chain(tokens: Sequence[int]) -> list[int]:
    """Return a key of each whole block and all tokens before it."""
    keys, key = [], 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        key = hash((key, *tokens[end - _BLOCK : end]))
        keys.append(key)
    return keys


def figures_of(
    turns: Sequence[AgentTurn], warm_up_s: float, duration_s: float, limits: LatencyLimits
) -> dict[str, float]:
    """Return the figures of a run, named as ``UNITS``, in modelled seconds and model's tokens.

    Latencies and goodput are of the turns that were sent after the warm-up and have ended within
    the run; prompt tokens are of the whole run.

    Raises:
        UserError: No turn has ended.
    """
    start_s = min(turn.record.sent_at_s for turn in turns) + warm_up_s
    counted = [t for t in turns if t.record.sent_at_s >= start_s and t.record.ended_at_s]
    if not counted:
        raise UserError("no turn has ended after the warm-up: give a longer --duration")
    ttft = [turn.record.ttft_s or 0.0 for turn in counted]
    tpot = [_tpot_s(turn) for turn in counted]
    last = [one for one, turn in zip(ttft, counted, strict=True) if turn.is_last]
    pairs = zip(ttft, tpot, strict=True)
    num_good = sum(one <= limits.ttft_s and other <= limits.tpot_s for one, other in pairs)
    work, window_s = prompt_work(turns), duration_s - warm_up_s
    return {
        "goodput": num_good / window_s,
        "good_fraction": num_good / len(counted),
        "turns_per_s": len(counted) / window_s,
        "ttft_p50": percentile(ttft, 50),
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p99": percentile(ttft, 99),
        "tpot_mean": sum(tpot) / len(tpot),
        "last_answer_ttft_mean": sum(last) / len(last) if last else 0.0,
        "computed_fraction": work.computed / work.prompt,
        "repeated_fraction": work.repeated / work.computed,
        "repeated_tokens": float(TOKENS * work.repeated),
        "hit_over_bound": (work.prompt - work.computed) / max(1, work.known),
    }


def ended_turns(turns: Sequence[AgentTurn]) -> list[list[float]]:
    """Return a row of ``COLUMNS`` for each turn that has ended, in tokens of the engines."""
    start_s = min(turn.record.sent_at_s for turn in turns)
    return [
        [
            round(turn.record.sent_at_s - start_s, 2),
            round(turn.record.ttft_s or 0.0, 2),
            round(_tpot_s(turn), 4),
            len(turn.prompt),
            turn.record.cached_tokens or 0,
            int(turn.is_last),
        ]
        for turn in turns
        if turn.record.ended_at_s
    ]


def _tpot_s(turn: AgentTurn) -> float:
    """Return the seconds per token of the model after the first token of the engines."""
    record = turn.record
    rest_s = (record.ended_at_s or 0.0) - (record.first_token_at_s or 0.0)
    return rest_s / TOKENS / max(1, len(record.token_ids) - 1)


def equal_fraction(turns: Sequence[AgentTurn], others: Sequence[AgentTurn]) -> float:
    """Return the share of the same prompts, in two runs, that have the same answer."""
    known = {turn.record.id: turn for turn in others if turn.record.ended_at_s}
    pairs = [
        (turn.record.token_ids, known[turn.record.id].record.token_ids)
        for turn in turns
        if turn.record.ended_at_s
        and turn.record.id in known
        and turn.prompt == known[turn.record.id].prompt
    ]
    return sum(one == other for one, other in pairs) / max(1, len(pairs))
