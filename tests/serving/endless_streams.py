"""Streams that last until the server ends, and how they end then."""

from __future__ import annotations

from typing import Any

import openai

from server_run import Run

MODEL = "smollm2-135m"


def endless_stream(run: Run) -> openai.Stream[Any]:
    return run.client().completions.create(
        model=MODEL,
        prompt="Once upon a time there was a town by the sea where every house was painted blue,"
        " and one day a stranger came there and painted his house red.",
        max_tokens=8000,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def how_it_ends(stream: openai.Stream[Any]) -> str:
    """``error`` where the server said so in an event of the stream."""
    try:
        for _ in stream:
            pass
    except openai.APIError:
        return "error"
    return "end"
