"""Waiting for a prefix that is on its way: what ends the wait, and where the prefix ends then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from banaserve.engine.connector.scheduler_side import request_state
from banaserve.kvstore.leases import Lookup, Slot

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING
SLOTS = [Slot(i, 1, i + 1) for i in range(5)]
BEGAN_S = 100.0


class Board:
    """Says what a test has put on it, and counts how often it was asked."""

    def __init__(self, states: Sequence[Lookup]) -> None:
        self.states = list(states)
        self.asked = 0

    def __call__(self, slots: Sequence[Slot]) -> list[Lookup]:
        self.asked += 1
        return [self.states[slot.index] for slot in slots]


def waiting(num_ready: int) -> request_state.PendingPromotion:
    return request_state.PendingPromotion(SLOTS, num_ready, BEGAN_S, predicted_s=1.0)


@pytest.mark.parametrize(
    ("states", "readable", "outcome"),
    [
        ([HIT, HIT, HIT, HIT, HIT], 5, "ARRIVED"),
        ([HIT, HIT, PENDING, HIT, HIT], None, None),
        ([HIT, HIT, MISS, PENDING, HIT], 2, "FAILED"),
        ([HIT, HIT, HIT, HIT, MISS], 4, "FAILED"),
        # What comes after a failed block is not waited for, what comes before it is.
        ([HIT, HIT, PENDING, MISS, PENDING], None, None),
    ],
)
def test_a_look_at_the_board(
    states: list[Lookup], readable: int | None, outcome: str | None
) -> None:
    wait = waiting(2)
    assert wait.look(Board(states), BEGAN_S) == readable
    assert wait.outcome is (request_state.PromotionOutcome[outcome] if outcome else None)


def test_blocks_arrive_in_any_order() -> None:
    board = Board([HIT, PENDING, PENDING, PENDING, PENDING])
    wait = waiting(1)
    for index in (3, 1, 4):
        assert wait.look(board, BEGAN_S) is None
        board.states[index] = HIT
    assert wait.look(board, BEGAN_S) is None
    board.states[2] = HIT
    assert wait.look(board, BEGAN_S) == 5
    assert (wait.num_pending, wait.num_arrived) == (4, 4)


def test_what_was_settled_stays_settled() -> None:
    board = Board([HIT, HIT, MISS, HIT, HIT])
    wait = waiting(1)
    assert wait.look(board, BEGAN_S) == 2
    board.states[2] = HIT
    assert wait.look(board, BEGAN_S) == 2
    assert board.asked == 1
    assert wait.num_arrived == 1


@pytest.mark.parametrize(
    ("predicted_s", "compute_s", "wait_s"),
    [
        (0.0, 0.0, 0.25),
        (0.001, 0.0, 0.25),
        (0.5, 0.0, 2.0),
        (0.5, 1.0, 2.0),
        (0.5, 3.0, 3.0),
        (100.0, 0.0, 10.0),
        (0.1, 100.0, 10.0),
    ],
)
def test_patience_has_bounds(predicted_s: float, compute_s: float, wait_s: float) -> None:
    board = Board([HIT, HIT, HIT, PENDING, HIT])
    wait = request_state.PendingPromotion(SLOTS, 1, BEGAN_S, predicted_s, compute_s)
    assert wait.look(board, BEGAN_S + 0.999 * wait_s) is None
    assert wait.look(board, BEGAN_S + wait_s) == 3
    assert wait.outcome is request_state.PromotionOutcome.LATE
    assert wait.num_arrived == 2


def test_nothing_to_wait_for() -> None:
    wait = request_state.PendingPromotion([], 0, BEGAN_S, 0.0)
    assert wait.look(Board([]), BEGAN_S) == 0
    assert wait.outcome is request_state.PromotionOutcome.ARRIVED
