"""Declaration of the store's numbers: the kind and the meaning of each, for readers and metrics."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_type_hints


class Measure(NamedTuple):
    """Annotation of a field that is exported as a metric of the field's name."""

    kind: Literal["counter", "gauge"]
    meaning: str


def counter(meaning: str) -> Measure:
    """Declare a number that only grows, from 0 at the start of the daemon."""
    return Measure("counter", meaning)


def gauge(meaning: str) -> Measure:
    """Declare a number as it is now."""
    return Measure("gauge", meaning)


def measures_of(kind: type) -> dict[str, Measure]:
    """Return the declared fields of a class by their names; other fields are left out."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: note
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Measure)
    }
