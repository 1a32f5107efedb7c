"""Round trips between regions: built-in figures, or those of a file with measurements."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.text.records import unpacked

FIVE_REGIONS = ("us-east", "us-west", "europe", "asia", "south-america")

ROUND_TRIPS_MS: Mapping[tuple[str, str], float] = {
    ("us-east", "us-west"): 70.0,
    ("us-east", "europe"): 90.0,
    ("us-east", "asia"): 170.0,
    ("us-east", "south-america"): 115.0,
    ("us-west", "europe"): 145.0,
    ("us-west", "asia"): 100.0,
    ("us-west", "south-america"): 185.0,
    ("europe", "asia"): 225.0,
    ("europe", "south-america"): 205.0,
    ("asia", "south-america"): 280.0,
}
"""Round trips between regions of one cloud, rounded to 5 ms."""

MEASURED_AS: Mapping[str, str] = {
    "us-east": "aws:us-east-1",
    "us-west": "aws:us-west-2",
    "europe": "aws:eu-central-1",
    "asia": "aws:ap-northeast-1",
    "south-america": "aws:sa-east-1",
}
"""Names of the regions in files of measurements."""

_COLUMNS = ("src", "dst", "avg_rtt")


def read_round_trips(path: Path, regions: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the round trip between every two of ``regions`` in ms, the mean of both directions.

    The file is a table with the columns src, dst and avg_rtt (ms), packed with zstd if its name
    ends in ``.zst``.

    Args:
        path: File of the measurements.
        regions: Names of regions out of ``FIVE_REGIONS``.

    Raises:
        UserError: The file cannot be read, a column or a pair is missing, or a time is not a number
            above 0; the message names the file and the missing or invalid value.
    """
    for region in regions:
        check_known("region", region, FIVE_REGIONS)
    names = {MEASURED_AS[region]: region for region in regions}
    found: dict[tuple[str, str], list[float]] = {}
    try:
        lines = unpacked(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error.reason}") from error
    table = csv.DictReader(lines)
    for column in _COLUMNS:
        if column not in (table.fieldnames or ()):
            raise UserError(f"{path}, line 1: there is no column {column}")
    for row in table:
        one, other = names.get(row["src"]), names.get(row["dst"])
        if one is not None and other is not None and one != other:
            pair = (one, other) if one < other else (other, one)
            found.setdefault(pair, []).append(_milliseconds(path, table.line_num, row["avg_rtt"]))
    pairs = [(one, other) for one in regions for other in regions if one < other]
    for one, other in pairs:
        if (one, other) not in found:
            raise UserError(
                f"{path} has no round trip from {MEASURED_AS[one]} to {MEASURED_AS[other]}"
            )
    return {pair: sum(found[pair]) / len(found[pair]) for pair in pairs}


def _milliseconds(path: Path, number: int, told: str | None) -> float:
    try:
        value = float(told or "")
    except ValueError:
        value = 0.0
    if not (value > 0 and isfinite(value)):
        raise UserError(f"{path}, line {number}: avg_rtt is {told!r}: give milliseconds above 0")
    return value
