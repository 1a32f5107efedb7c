"""Agent sessions as tokens of a coarse model, each of which stands for a block of the generator.

The sessions are the coding sessions of ``benchmarks/routers/loads.py``; some of them wait between
two turns for a graph of its calls, which are those of subagents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from banaserve.orchestrator.control.costs.profile import DecodeSection, MemorySection, Profile
from banaserve_route.sim.programs import ProgramCall
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES
from benchmarks.routers.cells import MAX_OUTPUT_TOKENS
from benchmarks.routers.loads import LoadSession, Steps, agents, graphs

TOKENS = BLOCK_TOKENS
"""Tokens of the modelled model for which one token of the engines stands."""
MAX_OUTPUT = MAX_OUTPUT_TOKENS // TOKENS
SUBAGENTS_FRACTION = 0.44
"""Share of sessions with subagents, as AgentX reports it: here one graph of calls in a session."""
_TOKEN_IDS = range(500, 40_000)
_ENDLESS = 1 << 62
_LAYERS = 34


def coarse(profile: Profile) -> Profile:
    """Return the profile of engines of which one token stands for ``TOKENS`` of the model.

    A session then takes as long as with all of its tokens. One step stands for ``TOKENS`` steps,
    each with a whole batch: so the largest number of tokens of a step stays as it is. The model's
    layers are shared out to ``_LAYERS``, so that the miniature has two: a processor's work for long
    contexts grows with its layers.
    """
    prefill, decode = profile.prefill, profile.decode_small
    if profile.decode_large is not None:
        raise ValueError("a profile with two decode sections")
    times = TOKENS
    shape = profile.model
    model = replace(
        shape,
        num_layers=_LAYERS,
        layer_weights=shape.num_layers * shape.layer_weights // _LAYERS,
        layer_kv_bytes=times * shape.token_bytes // _LAYERS,
        max_context_tokens=shape.max_context_tokens // times,
    )
    return Profile(
        f"{profile.name}-by-{times}",
        f"{profile.source}; a token stands for {times}",
        model,
        replace(
            prefill,
            fixed_s=times * prefill.fixed_s,
            token_s=times * prefill.token_s,
            pair_s=times**2 * prefill.pair_s,
        ),
        DecodeSection(
            times * decode.fixed_s, times**2 * decode.context_token_s, times * decode.request_s
        ),
        None,
        MemorySection(profile.memory.kv_tokens // times, profile.memory.block_tokens),
        profile.link,
    )


def sessions(data: Path, seed: int, context_tokens: int) -> Iterator[Steps]:
    """Yield the sessions of ``seed`` without end; each ends before a call exceeds the context.

    Args:
        context_tokens: Context length of the engines, in their tokens.
    """
    draws = Random(f"{seed}/sessions")
    coding = agents(data, Random(f"{seed}/agents"), _ENDLESS)
    subagents = graphs(data, Random(f"{seed}/graphs"), _ENDLESS)
    for session in coding:
        steps = list(_fitting(session, context_tokens))
        if draws.random() < SUBAGENTS_FRACTION:
            place = 2 * draws.randrange(len(steps) // 2 + 1)  # after a pause
            steps[place:place] = [*next(subagents).steps, 0.0]
        if steps:
            yield steps


def _fitting(session: LoadSession, context_tokens: int) -> Iterator[list[ProgramCall] | float]:
    for step in session.steps:
        if isinstance(step, list):
            step = [replace(call, output=call.output[: MAX_OUTPUT * UNIT_BYTES]) for call in step]
            longest = max(len(call.prompt) + len(call.output) for call in step)
            if longest > context_tokens * UNIT_BYTES:
                return
        yield step


@dataclass
class PromptTokens:
    """Tokens of prompts of one seed; an answer that was given is in the prompts that follow it."""

    seed: int

    def __post_init__(self) -> None:
        self._of_units: dict[bytes, int] = {}

    def of(self, units: bytes) -> list[int]:
        """Return the tokens of a prompt, one for each unit."""
        return [self._one(unit) for unit in _units(units)]

    def answered(self, output: bytes, token_ids: list[int]) -> None:
        """Note that the tokens of an answer have replaced its units."""
        self._of_units.update(zip(_units(output), token_ids, strict=False))

    def _one(self, unit: bytes) -> int:
        if (found := self._of_units.get(unit)) is None:
            found = Random(f"{self.seed} {unit.hex()}").choice(_TOKEN_IDS)
            self._of_units[unit] = found
        return found


def _units(text: bytes) -> Iterator[bytes]:
    return (text[at : at + UNIT_BYTES] for at in range(0, len(text), UNIT_BYTES))
