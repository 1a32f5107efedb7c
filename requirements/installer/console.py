"""Lines for the person who waits, and the error that ends in one line."""

from __future__ import annotations


class Problem(Exception):
    """A line that says what is wrong and what to do about it."""


def say(text: str) -> None:
    print(f"[install] {text}", flush=True)
