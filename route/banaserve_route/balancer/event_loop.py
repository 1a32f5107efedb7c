"""Event loop of a process of a balancer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_until_complete(serving: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``serving``, run in a new event loop of this process."""
    # Objects allocated so far stay, and requests make no cycles, so searching for them can be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serving)
