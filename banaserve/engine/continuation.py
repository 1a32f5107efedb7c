"""Output so far of a request that continues at another engine.

The output is sent in the request's sampling parameters, which reach the engine core and its
workers. The engine then treats the output as computed by itself: the states of penalties,
``min_tokens``, stops, bad words, the grammar and the seeded random draws are as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

KEY = "banaserve_output"
"""Key of the output in ``extra_args``; a request whose client sets it is rejected."""


def with_output(extra_args: Mapping[str, Any] | None, tokens: Sequence[int]) -> dict[str, Any]:
    """Return ``extra_args`` with the output so far added."""
    return {**(extra_args or {}), KEY: list(tokens)}


def output_of(params: Any) -> Sequence[int]:
    """Return the output so far in a request's sampling parameters; empty if the request is new."""
    found: Sequence[int] = ((params and params.extra_args) or {}).get(KEY, ())
    return found


def logprob_rows(position: Mapping[int, Any], token_id: int) -> tuple[list[int], list[float], int]:
    """Convert one position's log probabilities from the clients' form to the engines' form.

    Args:
        position: ``logprob`` and ``rank`` by token id, of the sampled and the likeliest tokens.

    Returns:
        Token ids and their log probabilities, the sampled token first and then the likeliest ones
        in order, and the sampled token's rank. A sampled token that is one of the likeliest appears
        twice.
    """
    sampled = position[token_id]
    ranked = sorted((one.rank, token) for token, one in position.items())
    # The likeliest have ranks 1, 2, 3...; a sampled token not among them has a higher rank.
    likeliest = [
        token
        for (rank, token), place in zip(ranked, itertools.count(1), strict=False)
        if rank == place
    ]
    return (
        [token_id, *likeliest],
        [sampled.logprob, *(position[token].logprob for token in likeliest)],
        sampled.rank,
    )
