"""Programs of clients, whose next requests depend on the answers to the previous ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from banaserve_route.sim.replica import UNIT_BYTES


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """Request of a program, with the digests of its prompt's and its answer's blocks."""

    prompt: bytes
    output: bytes
    session: str


Program = Iterator[list[ProgramCall] | float]
"""Calls that are made at once, the next ones when all are answered; or a pause in seconds."""

MakeProgram = Callable[[Random, str], Program]


def blocks(rng: Random, mean_tokens: float, most_tokens: int = 512) -> bytes:
    """Return digests of blocks that occur nowhere else; lengths are exponential."""
    tokens = min(most_tokens, max(16.0, rng.expovariate(1 / mean_tokens)))
    return rng.randbytes(int(tokens / 16) * UNIT_BYTES)


def tree_of_thoughts(branches: int, depth: int = 4) -> MakeProgram:
    """Return trees as issued by SkyWalker's client: b, b^2, ... b^depth calls on one question.

    That is 30 requests for b = 2 and 340 for b = 4; the paper says 15 and 85. The prompts of all
    clients begin with the same 256 tokens; a question has 96 tokens, a stage 64, a thought 120 on
    average.
    """
    common = Random("common").randbytes(16 * UNIT_BYTES)
    stages = [Random(f"stage {number}").randbytes(4 * UNIT_BYTES) for number in range(depth)]

    def run(rng: Random, client: str) -> Program:
        number = 0
        while True:
            number += 1
            level = [common + rng.randbytes(6 * UNIT_BYTES)]
            for stage in stages:
                asks = [
                    ProgramCall(parent + stage, blocks(rng, 120), f"{client}/{number}")
                    for parent in level
                    for _ in range(branches)
                ]
                yield asks
                level = [ask.prompt + ask.output for ask in asks]

    return run


def chat(first_tokens: float, message_tokens: float, answer_tokens: float) -> MakeProgram:
    """Return conversations of two to ten turns; half of a user's begin with the user's own prefix.

    Args:
        first_tokens: Length of the prefix with which a conversation begins, in tokens.
    """

    def run(rng: Random, client: str) -> Program:
        own = rng.randbytes(int(first_tokens / 16) * UNIT_BYTES)
        while True:
            history = own if rng.random() < 0.5 else rng.randbytes(len(own))
            for _ in range(2 + int(rng.random() * 9)):
                history += blocks(rng, message_tokens, 8192)
                ask = ProgramCall(history, blocks(rng, answer_tokens), client)
                yield [ask]
                history += ask.output

    return run


def shared_prefixes(
    num_prefixes: int, prefix_tokens: int, own_tokens: float, answer_tokens: float, zipf: float
) -> MakeProgram:
    """Return a program of one request: a popular prefix and a part of its own, as with tools."""
    prefixes = [
        Random(f"prefix {number}").randbytes(prefix_tokens // 16 * UNIT_BYTES)
        for number in range(num_prefixes)
    ]
    weights = [1 / (rank + 1) ** zipf for rank in range(num_prefixes)]

    def run(rng: Random, client: str) -> Program:
        [number] = rng.choices(range(num_prefixes), weights)
        prompt = prefixes[number] + blocks(rng, own_tokens, 2048)
        yield [ProgramCall(prompt, blocks(rng, answer_tokens), f"prefix {number}")]

    return run
