"""A loop that stands still is seen where it does."""

from __future__ import annotations

import threading

from banaserve.net.stall_witness import StallWitness
from observing import until


def test_the_place_of_a_stall_is_told_with_the_next_tick() -> None:
    witness = StallWitness(0.01)
    told: list[str] = []

    def stand_still() -> None:
        until(lambda: bool(witness._where), "it has been looked at")

    try:
        assert witness.tick() == ""
        stand_still()
        told.append(witness.tick())
    finally:
        witness.close()
    assert " stand_still" in told[0]
    assert "test_stall_witness.py:" in told[0]


def test_it_ends() -> None:
    before = threading.active_count()
    witness = StallWitness(0.01)
    witness.close()
    until(lambda: threading.active_count() <= before, "its thread has ended")
