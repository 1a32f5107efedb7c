"""Programs of clients, made up: conversations, and requests with a popular prefix."""

from __future__ import annotations

from random import Random

from banaserve_route.sim.programs import MakeProgram, Program, ProgramCall
from banaserve_route.sim.replica import UNIT_BYTES


def blocks(rng: Random, mean_tokens: float, most_tokens: int = 512) -> bytes:
    """Return digests of blocks that occur nowhere else; lengths are exponential."""
    tokens = min(most_tokens, max(16.0, rng.expovariate(1 / mean_tokens)))
    return rng.randbytes(int(tokens / 16) * UNIT_BYTES)


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
