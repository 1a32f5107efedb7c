"""What a soak calls growth, and what not."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from depth import chosen_seed
from resources import grown, looked_at, slopes

MIB = 1 << 20


def seen(name: str, value_at) -> dict[str, list[tuple[float, float]]]:
    return {name: [(5.0 * n, value_at(n)) for n in range(400)]}


@pytest.mark.parametrize(
    ("name", "value_at", "is_growth"),
    [
        ("front bytes", lambda n: 300 * MIB + n * MIB // 4, True),
        ("front bytes", lambda n: (300 + 100 * (n < 100)) * MIB, False),
        ("front bytes", lambda n: 300 * MIB + n * 1000, False),
        ("p0 bytes", lambda n: (20 if n % 50 < 5 else 900) * MIB, False),
        ("front descriptors", lambda n: 60 + n // 10, True),
        ("front descriptors", lambda n: 60 + n % 7, False),
        ("front threads", lambda n: 30 + n // 20, True),
        ("metric series", lambda n: 1000 + n, True),
        ("metric series", lambda n: min(1000, 10 * n), False),
        ("run folder log_bytes", lambda n: n % 90 * 10_000, False),
        ("run folder log_bytes", lambda n: n * 10_000, True),
    ],
)
def test_what_is_growth(name, value_at, is_growth) -> None:
    assert bool(grown(seen(name, value_at))) == is_growth


def test_noise_is_none() -> None:
    draw = random.Random(chosen_seed(3))
    assert grown(seen("d0 bytes", lambda _: draw.gauss(800, 80) * MIB)) == []


def test_slopes_are_an_hour() -> None:
    (line,) = slopes(seen("front threads", lambda n: 10 + n / 100))
    assert line.split()[-3:] == ["+7", "an", "hour"]


def test_this_process_holds_something(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name, size in (("front.log", 5), ("p0.log", 90), ("p0.log.1", 120), ("d0.log", 250)):
        (tmp_path / "run" / name).write_bytes(bytes(size))
    pids = {"front": os.getpid(), "parent": 0}
    found = looked_at(pids, tmp_path / "run", tmp_path, "http://127.0.0.1:9", 100)
    assert found["front bytes"] > MIB
    assert found["front descriptors"] > 2
    assert found["front threads"] >= 1
    assert (found["run folder log_bytes"], found["temporary files"]) == (200 + 210 + 250, 5)
    assert "parent bytes" not in found
    assert "metric series" not in found
