"""Texts of clients and servers that are shown in a log or on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with only printable characters: no client may forge lines or move cursors."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
