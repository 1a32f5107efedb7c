"""Output that a request brings along to the engine where it goes on.

It travels in the request's sampling parameters, which the engine core and its workers both get. An
engine then holds the request as one that it has computed itself so far: penalties, ``min_tokens``,
stops, bad words, the grammar and the draws of a seed all stand where they stood.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

KEY = "banaserve_output"
"""In ``extra_args``; a client that names it is refused."""
_OURS = "banaserve_"
_TRANSFER = "kv_transfer_params"


class HasExtraArgs(Protocol):
    """What is read of vLLM's sampling parameters."""

    extra_args: dict[str, Any] | None


def with_output(extra_args: Mapping[str, Any] | None, tokens: Sequence[int]) -> dict[str, Any]:
    """``extra_args`` with the output so far."""
    return {**(extra_args or {}), KEY: list(tokens)}


def output_of(params: HasExtraArgs | None) -> Sequence[int]:
    """The output that a request brings along; empty where it begins."""
    found: Sequence[int] = ((params and params.extra_args) or {}).get(KEY, ())
    return found


def take_client_args(params: HasExtraArgs) -> None:
    """Leave in a client's parameters only what is a client's: legs get theirs from the server.

    What instances tell each other would let a client skip the cost gate, or count tokens as
    cached that are not. ``kv_transfer_params`` are taken out: they are for other connectors.

    Raises:
        ValueError: A name in them is one of ours.
    """
    extra = params.extra_args or {}
    transfer = extra.get(_TRANSFER)
    for place, given in (("vllm_xargs", extra), (_TRANSFER, transfer)):
        names = given if isinstance(given, Mapping) else ()
        for name in names:
            if str(name).startswith(_OURS):
                raise ValueError(f"{name} is no argument of a request: leave it out of {place}")
    if _TRANSFER in extra:
        params.extra_args = {k: v for k, v in extra.items() if k != _TRANSFER} or None


def logprob_rows(position: Mapping[int, Any], token_id: int) -> tuple[list[int], list[float], int]:
    """Log probabilities of one position as an engine puts them out, from those that clients get.

    Args:
        position: ``logprob`` and ``rank`` by token id: the sampled token's and the likeliest ones'.
        token_id: The sampled token.

    Returns:
        Token ids and their log probabilities, the sampled one first and then the likeliest in
        order, and the sampled token's rank. Where it is one of the likeliest it comes twice.
    """
    sampled = position[token_id]
    ranked = sorted((one.rank, token) for token, one in position.items())
    # Ranks of the likeliest are 1, 2, 3...; a sampled token that is none of them lies apart.
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
