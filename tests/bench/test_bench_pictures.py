"""Pictures of README: of the committed figures, losses and all, and small enough to load."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.report.plots import style
from banaserve_bench.results import result
from benchmarks import pictures
from benchmarks.pictures import FIGURES, CellPair, cells_of, headline, sentences

ROOT = Path(__file__).resolve().parents[2]
RECORD = result.read(pictures.SOURCE)
SPACE = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 300_000


def words(document: str) -> list[str]:
    return [
        "".join(one.itertext()) for one in ElementTree.fromstring(document).iter(f"{SPACE}text")
    ]


def test_every_cell_and_every_loss_is_in_it() -> None:
    drawn = headline(RECORD)
    told = words(drawn)
    cells = cells_of(RECORD)
    assert len(cells) == len(RECORD.raw["outcomes"]) > 1
    for cell in cells:
        assert cell in told
    losses = sum(one.gain(cells[cell][one.key]) < 0 for cell in cells for one in FIGURES)
    assert losses == sum("✗" in one for one in told) > 0
    assert any("MODELLED" in one for one in told)
    assert not re.search('(fill|stroke)="#', drawn)
    for colour in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn.replace(style(), ""))):
        assert f'[style*="fill: {colour}"]' in style()


@pytest.mark.parametrize(
    ("place", "ours", "theirs", "gain"),
    [
        (0, 0.5, 0.4, 0.25),
        (0, 0.3, 0.4, -0.25),
        # Less is better where it is time.
        (2, 0.3, 0.4, 0.25),
        (2, 0.5, 0.4, -0.25),
        # Half a percent is nothing.
        (0, 0.998, 1.0, 0.0),
        (2, 1.004, 1.0, 0.0),
    ],
)
def test_gain_and_loss(place: int, ours: float, theirs: float, gain: float) -> None:
    assert FIGURES[place].gain(CellPair(ours, theirs)) == pytest.approx(gain)


def test_the_words_beside_it_name_losses() -> None:
    even = CellPair(1.0, 1.0)
    cells = {
        "a": {"goodput": CellPair(0.6, 0.5), "tokens_per_s": CellPair(9, 10), "ttft_mean_s": even},
        "b": {"goodput": even, "tokens_per_s": even, "ttft_mean_s": CellPair(3, 2)},
    }
    assert sentences(cells) == [
        "Requests in time: 1.00 to 1.20 times; behind in none.",
        "Output tokens/s: 0.90 to 1.00 times; behind in a 0.90.",
        "Mean time to first token: 1.00 to 1.50 times; behind in b 1.50.",
    ]


def test_another_result_is_refused() -> None:
    with pytest.raises(UserError, match="not of pacing"):
        cells_of(result.read(pictures.SOURCE.with_name("pacing.json")))
