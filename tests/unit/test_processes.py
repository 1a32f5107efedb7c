"""Work in threads that an event loop does not wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from banaserve.processes import in_daemon_thread


def test_a_loop_closes_though_the_work_never_ends() -> None:
    never = threading.Event()

    async def give_up() -> None:
        working = in_daemon_thread(never.wait)
        await asyncio.sleep(0)
        working.cancel()

    asyncio.run(give_up())
    never.set()


async def test_it_hands_over_the_result_or_the_error() -> None:
    assert await in_daemon_thread(lambda: 7) == 7

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_daemon_thread(fails)
