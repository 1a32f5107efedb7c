"""A loop that stands still is seen where it does."""

from __future__ import annotations

import threading

from banaserve.base.net.loop_watch import StallWitness
from observing import until


def test_the_place_of_a_stall_is_told_with_the_next_tick() -> None:
    witness = StallWitness(0.01)

    def stand_still() -> None:
        until(lambda: bool(witness._where), "it has been looked at")

    def is_told() -> bool:
        witness.tick()  # of what a busy machine has kept standing elsewhere
        stand_still()
        where = witness.tick()
        return " stand_still" in where and "test_stall_witness.py:" in where

    try:
        until(is_told, "the place is told")
    finally:
        witness.close()


def test_it_ends() -> None:
    before = threading.active_count()
    witness = StallWitness(0.01)
    witness.close()
    until(lambda: threading.active_count() <= before, "its thread has ended")
