"""Decode legs that begin together: who waits for whom, and how long at most."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.serving.requests.decode_batching import DecodeBatching

HERE: Any = SimpleNamespace(id="d0", coming=set())
THERE: Any = SimpleNamespace(id="d1", coming=set())
LONG_S = 600.0


async def test_nobody_waits_without_a_limit_or_without_others() -> None:
    off, on = DecodeBatching(), DecodeBatching(LONG_S)
    with on.coming(THERE):
        assert not off.waits(THERE)
        assert not on.waits(HERE)
        await off.wait_for_group(THERE)
        await on.wait_for_group(HERE)
        assert on.waits(THERE)
        assert len(THERE.coming) == 1
    assert not THERE.coming


async def test_a_group_begins_when_those_are_done_that_the_first_has_met() -> None:
    batching, stack = DecodeBatching(LONG_S), ExitStack()
    with batching.coming(HERE):
        first = asyncio.create_task(batching.wait_for_group(HERE))
        await asyncio.sleep(0)
        stack.enter_context(batching.coming(HERE))  # one that came later is not waited for
        second = asyncio.create_task(batching.wait_for_group(HERE))  # but goes along
        await asyncio.sleep(0)
        assert not first.done()
        assert not second.done()
    await asyncio.gather(first, second)
    third = asyncio.create_task(batching.wait_for_group(HERE))
    await asyncio.sleep(0)
    assert not third.done(), "it waits for the one that is still being computed"
    stack.close()
    await third
    assert not batching.waits(HERE)


async def test_a_group_waits_no_longer_than_the_limit() -> None:
    batching = DecodeBatching(0.01)
    with batching.coming(HERE):
        await batching.wait_for_group(HERE)
        await batching.wait_for_group(HERE)  # each group has its own time
    await batching.wait_for_group(HERE)


async def test_one_that_leaves_keeps_nobody() -> None:
    batching = DecodeBatching(LONG_S)
    with batching.coming(HERE):
        leaves = asyncio.create_task(batching.wait_for_group(HERE))
        stays = asyncio.create_task(batching.wait_for_group(HERE))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.sleep(0)
        assert leaves.cancelled()
        assert not stays.done()
    await stays
