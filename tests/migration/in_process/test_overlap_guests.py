"""Steps in parts over several guests, and beside guests that may not take their whole device."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("as_many_parts_as_can_be")]

ENGINE = "llama"
NUM_TOKENS = 16
PARTS = 4
STALL_S = 0.5
FRONT = {"type": "layers", "start": 0, "end": 2}
BACK = {"type": "layers", "start": 4, "end": 6}
PROMPTS = [[(7 * i + i * i) % 2000 + 5 for i in range(length)] for length in (300, 40, 9, 120)]


_salts = map(str, itertools.count())


def fresh(rig: Any, during: Any = None) -> Any:
    """Run with nothing cached."""
    return rig.run(PROMPTS, NUM_TOKENS, during, salt=f"guests {next(_salts)}")


@pytest.fixture(scope="module")
def expected(rig: Any) -> Any:
    return fresh(rig)


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    rig.do("overlap", PARTS)
    yield
    rig.reset()


def at_once(*ways: Generator[None, None, None]) -> Generator[None, None, None]:
    """One step of each in turn, until all have ended."""
    for _ in itertools.zip_longest(*ways):
        yield


def test_two_ranges_go_to_two_guests_at_the_same_time(rig: Any, expected: Any) -> None:
    one, other = rig.guest(), rig.guest()
    ways = rig.away(FRONT, one, gap=1), rig.away(BACK, other, gap=1)
    assert rig.agrees(fresh(rig, at_once(*ways)), expected)
    before = rig.do("status")
    assert {unit["guest_id"] for unit in before["units"]} == {one, other}
    assert rig.agrees(fresh(rig), expected)
    after = rig.do("status")
    assert after["overlap"]["steps_cut"] > before["overlap"]["steps_cut"]
    for guest in (one, other):
        assert after["guests"][guest]["round_trips"] > before["guests"][guest]["round_trips"]
    home = [rig.on(unit["unit_id"], gap=1) for unit in after["units"]]
    assert rig.agrees(fresh(rig, at_once(*home)), expected)
    assert rig.do("status")["units"] == []


def test_a_guest_of_a_chain_dies_and_the_other_serves_on(rig: Any, expected: Any) -> None:
    one, other = rig.guest(), rig.guest()
    rig.finish(rig.away(FRONT, one))
    rig.finish(rig.away(BACK, other))

    def kill() -> Generator[None, None, None]:
        yield
        rig.kill(one)
        yield

    assert rig.agrees(fresh(rig, kill()), expected)
    assert [unit["guest_id"] for unit in rig.do("status")["units"]] == [other]


def test_a_guest_that_may_take_a_part_of_its_device(rig: Any, expected: Any, let_pass: Any) -> None:
    """It stands still longer than a guest with a whole device might, and is not given up."""
    guest = rig.new_guest(STALL_S)
    rig.do("share", guest, 0.2)
    rig.finish(rig.away(BACK, guest))
    lost = rig.do("status")["guests_lost"]

    def change() -> Generator[None, None, None]:
        yield from let_pass(2)
        rig.do("share", guest, 0.9)
        yield from let_pass(2)
        rig.do("share", guest, 0.3)
        yield

    rig.num_runs(guest)
    assert rig.agrees(fresh(rig, change()), expected)
    assert rig.num_runs(guest) > 0
    status = rig.do("status")
    assert status["guests"][guest]["share"] == 0.3
    assert status["guests_lost"] == lost
    for wrong in (0.0, -1.0, 1.5):
        assert "above 0 and at most 1" in rig.ask("share", guest, wrong)["error"]
    assert "not attached" in rig.ask("share", "nobody", 0.5)["error"]
    assert rig.do("status")["guests"][guest]["share"] == 0.3
    assert rig.agrees(fresh(rig), expected), "afterwards"
