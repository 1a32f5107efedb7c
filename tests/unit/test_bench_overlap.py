"""What ``bench overlap`` is asked, and how it counts."""

from __future__ import annotations

import random

import pytest

from banaserve.bench import overlap
from banaserve.errors import UserError


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--layers", "30"], "between 1 and 29"),
        (["--layers", "5", "0"], "between 1 and 29"),
        (["--runs", "0"], "above 0"),
        (["--requests", "0"], "above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        overlap._parse(argv)


def test_loads_are_of_the_size_that_is_asked() -> None:
    given = overlap._parse(["--requests", "3", "--prompt-tokens", "50", "--batches", "1", "8"])
    loads = overlap._loads(given)
    assert [load.name for load in loads] == ["prefill", "ttft", "decode_1", "decode_8"]
    assert [load.num_requests for load in loads] == [3, 1, 1, 8]
    prompts = overlap._prompts(random.Random(0), loads[0])
    assert [len(prompt) for prompt in prompts] == [50, 50, 50]
    assert prompts == overlap._prompts(random.Random(0), loads[0]), "seeded"


def test_gains_are_ratios_within_a_round() -> None:
    loads = [overlap._Load("ttft", "ttft_gain", 1, 10, 1), overlap._Load("d", "d_gain", 1, 1, 1)]
    home = overlap._Times({"ttft": [2.0, 4.0], "d": [1.0, 1.0]}, {}, {})
    times = overlap._Times(
        {"ttft": [1.0, 4.0], "d": [2.0, 0.5]}, {}, {"ttft": [1.0, 0.0], "d": [1.0, 1.0]}
    )
    samples = overlap._samples("layers_15.overlap", loads, home, times)
    assert samples["layers_15.overlap.ttft_gain"] == ([2.0, 1.0], "ratio")
    assert samples["layers_15.overlap.d_gain"] == ([0.5, 2.0], "ratio")
    assert samples["layers_15.overlap.equal_answers"] == ([1.0, 0.0], "fraction")
