"""States of sequences in the store: their keys, and where a prompt is cut so that they are saved.

A state is what Mamba or linear attention keeps of all tokens up to one. It cannot be rolled back,
so a request can continue a prefix only where a state was saved: at ends of blocks at which a step
of the engine ended, and at the end of a prompt that is handed over. Pure.
"""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 32


def state_keys(prefix: bytes, num_groups: int) -> list[bytes]:
    """Return the keys of the states after a prefix, one for each group of layers with states.

    Args:
        prefix: Key of the prefix's last block, which identifies all tokens up to its end.
    """
    return [
        hashlib.blake2b(prefix, digest_size=_DIGEST_BYTES, person=b"state %d" % group).digest()
        for group in range(num_groups)
    ]


def block_ends(num_tokens: int, block_size: int) -> list[int]:
    """Return the ends of blocks before the last of ``num_tokens`` tokens, the latest first."""
    last = (num_tokens - 1) // block_size
    return [end * block_size for end in range(last, 0, -1)]


def chunk_end(start: int, end: int, prompt_end: int, block_size: int) -> int:
    """Return where a step stops within a prompt: at a block's end if possible, and at the last one.

    A later request with the same prompt continues from the last block's end, since the last token
    is always computed.

    Args:
        start: Number of tokens computed before the step.
        end: Number of tokens that the step could reach; more than ``start``.
        prompt_end: End of the prompt, or of output that is computed again, in tokens.

    Returns:
        Number of tokens, more than ``start`` and at most ``end``.
    """
    if start >= prompt_end:
        return end
    last = (prompt_end - 1) // block_size * block_size
    if start < last < end:
        return last
    aligned = end // block_size * block_size
    return aligned if end < prompt_end and aligned > start else end
