"""Profile as the text of a TOML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isnan
from typing import Any

from banaserve.orchestrator.control.costs.profile import Profile

_MOST_CHARS = 400


def profile_text(profile: Profile, about: Sequence[str]) -> str:
    """Return the text of a file that ``load`` reads as ``profile``.

    Args:
        about: Lines of the comment above the profile.
    """
    small = {key: value for key, value in asdict(profile.decode_small).items() if "_s" in key}
    model = {key: value for key, value in asdict(profile.model).items() if value}
    sections = {
        "model": model,
        "prefill": asdict(profile.prefill),
        "decode.small": small,
        "memory": asdict(profile.memory),
        "link": asdict(profile.link),
        "error": asdict(profile.error) if profile.error else {},
    }
    lines = [f"# {_plain(line)}" for line in about]
    lines += ["", f"name = {_quoted(profile.name)}", f"source = {_quoted(profile.source)}"]
    for name, values in sections.items():
        lines += _section(name, values)
    return "\n".join([*lines, ""])


def _section(name: str, values: dict[str, Any]) -> Iterator[str]:
    if values:
        yield from ("", f"[{name}]")
    for key, value in values.items():
        if isinstance(value, int):
            yield f"{key} = {value}"
        elif not isnan(value):
            yield f"{key} = {value:.4g}"


def _quoted(text: str) -> str:
    """Return a TOML string of printable characters: a server may give any name to its model."""
    return json.dumps(_plain(text))


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isascii() and c.isprintable())[:_MOST_CHARS]
