"""Places of agents that Ray starts, with a double of the driver."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from banaserve.nodes.by_ray.places import RayAnswer, RayOrder, RayPlaces
from banaserve.nodes.places import AgentPlace
from banaserve.nodes.server.assignment import InstanceNeed


def test_an_order_that_was_abandoned_leaves_no_answer_to_the_next_one(tmp_path: Path) -> None:
    async def run() -> None:
        said: asyncio.Queue[bytes] = asyncio.Queue()
        answers = asyncio.StreamReader()

        def answer(one: RayAnswer) -> None:
            answers.feed_data(msgspec.json.encode(one) + b"\n")

        places = RayPlaces("auto", "key", "server", [], InstanceNeed(), tmp_path / "ray.log")
        driver: Any = SimpleNamespace(stdin=SimpleNamespace(write=said.put_nowait), stdout=answers)
        places._driver = driver
        finding = asyncio.create_task(places.find(0))
        assert msgspec.json.decode(await said.get(), type=RayOrder) == RayOrder("find", 0)
        finding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finding
        answer(RayAnswer([AgentPlace("10.0.0.1", 7000)]))
        answer(RayAnswer())
        await places.drop(0)
        answer(RayAnswer([AgentPlace("10.0.0.2", 7000)]))
        assert await places.find(1) == AgentPlace("10.0.0.2", 7000)

    asyncio.run(run())
