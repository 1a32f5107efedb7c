"""Kinds of requests: every way to sample and to shape an answer that a stream may be asked in."""

from __future__ import annotations

from typing import Any

from streams import Kind

MODEL = "smollm2-135m"
OUTPUT_TOKENS = 40

FLAVOURS = {
    "type": "array",
    "items": {"enum": ["vanilla", "chocolate", "raspberry"]},
    "minItems": 6,
    "maxItems": 6,
}
SEEDED = {"temperature": 0.9, "seed": 7}
GREEDY = {"temperature": 0.0}
LENGTH = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
BY_ONE_ENGINE: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, **LENGTH},
    "seeded": {**SEEDED, **LENGTH},
    "top_k_and_p": {**SEEDED, **LENGTH, "top_k": 30, "top_p": 0.8, "min_p": 0.001},
    "penalties": {
        **SEEDED,
        **LENGTH,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "min_tokens": {**GREEDY, "max_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS - 4},
    "bad_words": {**GREEDY, **LENGTH, "repetition_penalty": 1.2, "bad_words": ["the", "er"]},
    "logprobs": {**GREEDY, **LENGTH, "logprobs": 3},
    "regex": {**SEEDED, "max_tokens": 60, "structured_outputs": {"regex": "(ab|cd|e){30}"}},
    "three": {**SEEDED, **LENGTH, "n": 3},
}
"""What is asked of one plain engine, too, by the names of vLLM's sampling parameters."""

TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"flavours": FLAVOURS},
            "required": ["flavours"],
            "additionalProperties": False,
        },
    },
}


def made_kinds(prompt: list[int], text: str) -> dict[str, Kind]:
    common = {"model": MODEL, "stream": True, "return_token_ids": True}
    chat = {**common, **GREEDY, "messages": [{"role": "user", "content": text}]}
    completion = {**common, "prompt": prompt}
    found = {
        name: Kind("/v1/completions", {**completion, **asked})
        for name, asked in BY_ONE_ENGINE.items()
    }
    grammar = {"json": FLAVOURS}
    named = {"type": "function", "function": {"name": "order"}}
    more: dict[str, dict[str, Any]] = {
        "unseeded": {**completion, **LENGTH, "temperature": 0.8},
        "json": {**completion, **GREEDY, "max_tokens": 120, "structured_outputs": grammar},
        "stop": {**completion, **GREEDY, **LENGTH, "max_tokens": 60, "stop": ["never to be seen"]},
        "chat": {**chat, **LENGTH, "temperature": 0.7, "seed": 3},
        "tool": {**chat, "max_tokens": 120, "tools": [TOOL], "tool_choice": named},
    }
    for name, body in more.items():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        found[name] = Kind(path, body)
    return found
