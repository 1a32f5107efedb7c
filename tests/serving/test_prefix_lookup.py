"""Lookups before routing: what stores of other machines are still asked about is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from banaserve.kvstore.leases import Lookup
from banaserve.serving.requests.prefix_lookup import num_known

_STATES = {"h": Lookup.HIT, "p": Lookup.PENDING, "a": Lookup.ASKED, "m": Lookup.MISS}


@pytest.mark.parametrize(
    ("answers", "expected", "num_looks"),
    [
        (["hhm"], 2, 1),
        (["hpm"], 2, 1),
        (["mha"], 0, 1),
        ([""], 0, 1),
        (["ha", "ha", "hh"], 2, 3),
        (["haa", "hha", "hhm"], 2, 3),
        (["haa", "hma"], 1, 2),
        (["hpa", "hha", "hhp"], 3, 3),
        (["ha"] * 100, 1, 21),  # nobody answers
    ],
)
def test_what_is_asked_elsewhere_is_waited_for_20_ms(
    answers: list[str], expected: int, num_looks: int
) -> None:
    said, time_s, looks = iter(answers), [0.0], [0]

    def look(said: Iterator[str] = said) -> list[Lookup]:
        looks[0] += 1
        return [_STATES[letter] for letter in next(said)]

    def sleep(seconds: float) -> None:
        time_s[0] += seconds * 1.0001

    assert num_known(look, lambda: time_s[0], sleep) == expected
    assert looks == [num_looks]
