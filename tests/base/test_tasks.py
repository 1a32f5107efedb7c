"""End of background tasks."""

from __future__ import annotations

import asyncio

from banaserve.base.tasks import end_tasks


async def _clean_up(cleaned: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        cleaned.append("cleaned")


async def _fail() -> None:
    raise ValueError("of the task")


async def test_tasks_have_ended_on_return_whatever_their_end() -> None:
    cleaned: list[str] = []
    waiting, failing = asyncio.create_task(_clean_up(cleaned)), asyncio.create_task(_fail())
    await asyncio.sleep(0)
    await end_tasks(waiting, None, failing)
    assert cleaned == ["cleaned"]
    assert waiting.cancelled()
    assert isinstance(failing.exception(), ValueError)
    await end_tasks(waiting, failing)
    await end_tasks(None)
