"""Waiting for a process that need not be this one's child."""

from __future__ import annotations

import asyncio
import os


async def wait_ended(pid: int) -> None:
    """Return when process ``pid`` has ended; at once if there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, note)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
