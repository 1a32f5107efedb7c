"""Answers of an engine that a benchmark drives: lines of JSON on stdout."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO


def take_stdout() -> TextIO:
    """Reserve stdout for the answers; what vLLM prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def say(replies: TextIO, **what: Any) -> None:
    """Write an answer as a line of JSON."""
    replies.write(json.dumps(what) + "\n")
    replies.flush()
