"""A model of SmolLM2's layers, heads and tokenizer whose steps cost next to nothing.

For tests of what happens around the model: who dies, what moves, which bytes come back. Its weights
are random, so a wrong block or a lost token shows in all that follows. Answers that mean something,
and tokens of real weights, are what ``test_equality.py`` and ``test_openai_client.py`` are for.
"""

from __future__ import annotations

from banaserve import models
from banaserve.models import miniature
from banaserve.models.miniature import Miniature

_SHAPE = Miniature(
    num_layers=30,
    num_heads=3,
    num_kv_heads=3,
    max_context_tokens=8192,
    hidden_size=96,
    head_size=64,
)
"""Blocks are as large as SmolLM2's in float32."""


def resolve() -> models.ResolvedModel:
    """Make it where that has not been done; it has the name of the model that it stands for."""
    return miniature.resolve(_SHAPE, models.PACKAGED, None, print)


def options() -> tuple[str, ...]:
    """Of ``banaserve serve``."""
    model = resolve()
    return ("--model", model.path_or_id, "--served-model-name", model.served_name)
