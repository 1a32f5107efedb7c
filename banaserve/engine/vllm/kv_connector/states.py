"""States of sequences in the store: their names, and where a prompt is cut so that there are some.

A state is what Mamba or linear attention keeps of all tokens up to one. It cannot be taken back, so
a prefix can be gone on from only where a state was saved: at ends of blocks at which a step of the
engine ended, and at the end of a prompt that is handed over. Pure.
"""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 32


def state_keys(prefix: bytes, num_groups: int) -> list[bytes]:
    """Names of the states behind a prefix, one for each group of layers that keep any.

    Args:
        prefix: Key of the block that ends it; it stands for all tokens before it.
    """
    return [
        hashlib.blake2b(prefix, digest_size=_DIGEST_BYTES, person=b"state %d" % group).digest()
        for group in range(num_groups)
    ]


def block_ends(num_tokens: int, block_size: int) -> list[int]:
    """Ends of blocks before the last of ``num_tokens`` tokens, the latest first."""
    last = (num_tokens - 1) // block_size
    return [end * block_size for end in range(last, 0, -1)]


def chunk_end(start: int, end: int, prompt_end: int, block_size: int) -> int:
    """Where a step stops within a prompt: at the end of a block where it can, and at the last one.

    Who asks for the same prompt again goes on from that one, for the last token is always computed.

    Args:
        start: Tokens computed before the step.
        end: How far the step could get; more than ``start``.
        prompt_end: Of the prompt, or of output that is computed again.

    Returns:
        More than ``start``, at most ``end``.
    """
    if start >= prompt_end:
        return end
    last = (prompt_end - 1) // block_size * block_size
    if start < last < end:
        return last
    aligned = end // block_size * block_size
    return aligned if end < prompt_end and aligned > start else end
