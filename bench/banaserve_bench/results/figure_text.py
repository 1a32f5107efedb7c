"""Figures as text: justified digits, no exponents, units of a suitable size. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from banaserve_bench.results.statistics import mean_interval

NO_VALUE = "-"
"""Cell of a table where there is no figure."""
_SCALES: dict[str, Sequence[tuple[float, str]]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "bytes")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "bytes")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "bytes/s")),
    "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "bytes/s")),
}
_MOST_DIGITS = 6
_SMALLEST_PLAIN = 1e-6


def number(value: float, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits; whole numbers stay whole.

    Commas separate thousands. Only values below a millionth have an exponent.
    """
    if value == 0:
        return "0"
    if abs(value) < _SMALLEST_PLAIN:
        return f"{value:.2g}"
    if float(value).is_integer():
        return _plain(value, 0)
    shown = _plain(value, _place(value) - digits + 1)
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def row(values: Sequence[float]) -> list[str]:
    """Return values to be compared, all rounded to the same decimal place.

    The smallest value gets three digits, unless the largest would then have more than four.
    """
    sizes = [abs(value) for value in values if value]
    if not sizes or min(sizes) < _SMALLEST_PLAIN or all(float(v).is_integer() for v in values):
        return [number(value) for value in values]
    place = max(_place(min(sizes)) - 2, _place(max(sizes)) - 3)
    return [_plain(value, place) for value in values]


def interval_text(samples: Sequence[float], factor: float = 1.0) -> str:
    """Return a mean and half the width of its 95% interval; of one sample only its value.

    The half width has two digits, and the mean ends at the same decimal place: ``710 ± 180``.
    ``NO_VALUE`` stands for no samples.
    """
    values = [value * factor for value in samples]
    if len(values) < 2:
        return number(values[0]) if values else NO_VALUE
    low, mean, high = mean_interval(values)
    return with_half(mean, (high - low) / 2)


def with_half(mean: float, half: float) -> str:
    """Return ``mean ± half``, both to the decimal place of the half width's second digit."""
    if half == 0:
        return f"{number(mean)} ± 0"
    place = _place(half) - 1
    # 0.0996 is 0.10 with two digits.
    place = _place(round(half, -place)) - 1
    most = _place(mean) - _MOST_DIGITS + 1 if mean else place
    if place >= most:
        if max(abs(mean), half) < _SMALLEST_PLAIN:
            return f"{mean:.2g} ± {half:.2g}"
        return f"{_plain(mean, place)} ± {_plain(half, place)}"
    bound = _plain(10.0**most, most)
    shown = _plain(half, most)
    return (
        f"{_plain(mean, most)} ± {shown if float(shown.replace(',', '')) else f'less than {bound}'}"
    )


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


def _place(value: float) -> int:
    """Return the power of ten of the first digit."""
    return math.floor(math.log10(abs(value)))


def _plain(value: float, place: int) -> str:
    rounded = round(value, -place)
    shown = f"{rounded:,.{max(0, -place)}f}"
    return shown if float(shown.replace(",", "")) else shown.lstrip("-")
