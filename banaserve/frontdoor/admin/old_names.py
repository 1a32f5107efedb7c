"""Old names of fields of the admin API's JSON: those of the last release, kept for one more."""

from __future__ import annotations

from typing import Any

import msgspec

OLD_NAMES = {
    "max_microbatches": "most_parts",
    "blocker": "why_not",
    "migration_blocker": "cannot_migrate",
}
"""Old names, keyed by new names; to be removed in the next release."""


def renamed(body: bytes) -> bytes:
    """Return a request's JSON with new names for old ones, unless both are given.

    Raises:
        DecodeError: The body is no JSON.
    """
    given = msgspec.json.decode(body)
    if not isinstance(given, dict):
        return body
    new_names = {old: new for new, old in OLD_NAMES.items() if new not in given}
    return msgspec.json.encode({new_names.get(name, name): v for name, v in given.items()})


def with_old_names(value: object) -> Any:
    """Return a reply as plain values, with each renamed field under both names."""
    return _doubled(msgspec.to_builtins(value))


def _doubled(value: Any) -> Any:
    if isinstance(value, list):
        return [_doubled(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: _doubled(one) for name, one in value.items()}
    return found | {old: found[new] for new, old in OLD_NAMES.items() if new in found}
