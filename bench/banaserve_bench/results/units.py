"""Units of a suitable size for figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NO_VALUE = "-"
"""Cell of a table where there is no figure."""
_SCALES: dict[str, Sequence[tuple[float, str]]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "bytes")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "bytes")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "bytes/s")),
    "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "bytes/s")),
}


def scaled(values: Sequence[float], unit: str) -> tuple[float, str]:
    """Return a factor and the unit that it converts to, the same for all of ``values``.

    Seconds and bytes get a unit in which the largest value is at least one; other units stay.
    """
    largest = max((abs(value) for value in values), default=0.0)
    scales = _SCALES.get(unit, ())
    if not scales or largest == 0:
        return 1.0, unit
    for size, name in scales:
        if largest >= size:
            return 1 / size, name
    return 1 / scales[-1][0], scales[-1][1]
