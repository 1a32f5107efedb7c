"""A model of SmolLM2's layers, heads and tokenizer whose steps cost next to nothing.

For tests of what happens around the model: who dies, what moves, which bytes come back. Its weights
are random, so a wrong block or a lost token shows in all that follows. Answers that mean something,
and tokens of real weights, are what ``test_equality.py`` and ``test_openai_client.py`` are for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from banaserve.base import models
from banaserve.base.models import miniature
from banaserve.base.models.miniature import Miniature

THINK_END = 12
"""Token that ends the reasoning of the model that ``thinking`` makes."""
_MARKS = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}
_TEMPLATE_END = "<|im_start|>assistant\n"

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


def thinking(folder: Path) -> tuple[str, ...]:
    """Options of ``banaserve serve`` for the same model as one whose answers begin with reasoning.

    Two tokens that nothing else uses are the marks that parsers of reasoning look for, and its chat
    template ends with the first, as DeepSeek R1's does. Its weights are those of the other.
    """
    model = resolve()
    for source in Path(model.path_or_id).iterdir():
        shutil.copy(source, folder / source.name)
    tokenizer, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    known = json.loads(tokenizer.read_text(encoding="utf-8"))
    for token in known["added_tokens"]:
        if mark := _MARKS.get(token["content"]):
            vocabulary = known["model"]["vocab"]
            vocabulary[mark] = vocabulary.pop(token["content"])
            # As those of real models: parsers look for the mark in the text, too.
            token |= {"content": mark, "special": False}
    tokenizer.write_text(json.dumps(known), encoding="utf-8")
    before, end, after = template.read_text(encoding="utf-8").rpartition(_TEMPLATE_END)
    template.write_text(f"{before}{end}<think>\n{after}", encoding="utf-8")
    return ("--model", str(folder), "--served-model-name", model.served_name)
