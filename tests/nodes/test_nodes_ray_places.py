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
from waiting import turns


class Driver:
    """Driver of ``places`` whose orders are read, and answered, one by one."""

    def __init__(self, places: RayPlaces) -> None:
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers = asyncio.StreamReader()
        stdin = SimpleNamespace(write=self._said.put_nowait)
        driver: Any = SimpleNamespace(stdin=stdin, stdout=self._answers)
        places._driver = driver

    async def order(self) -> RayOrder:
        return msgspec.json.decode(await self._said.get(), type=RayOrder)

    def answer(self, one: RayAnswer) -> None:
        self._answers.feed_data(msgspec.json.encode(one) + b"\n")


def ray_places(folder: Path) -> RayPlaces:
    return RayPlaces("auto", "key", "server", [], InstanceNeed(), folder / "ray.log")


def test_an_order_that_was_abandoned_leaves_no_answer_to_the_next_one(tmp_path: Path) -> None:
    async def run() -> None:
        places = ray_places(tmp_path)
        driver = Driver(places)
        finding = asyncio.create_task(places.find(0))
        assert await driver.order() == RayOrder("find", 0)
        finding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finding
        driver.answer(RayAnswer([AgentPlace("10.0.0.1", 7000)]))
        driver.answer(RayAnswer())
        await places.drop(0)
        driver.answer(RayAnswer([AgentPlace("10.0.0.2", 7000)]))
        assert await places.find(1) == AgentPlace("10.0.0.2", 7000)

    asyncio.run(run())


def test_a_node_whose_addition_is_aborted_is_given_back(tmp_path: Path) -> None:
    async def run() -> None:
        places = ray_places(tmp_path)
        driver = Driver(places)
        adding = asyncio.create_task(places.add("10.0.0.2"))
        assert await driver.order() == RayOrder("add", address="10.0.0.2")
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        driver.answer(RayAnswer([AgentPlace("10.0.0.2", 7000)], [{"CPU": 1.0}], 3))
        driver.answer(RayAnswer())
        await turns(lambda: places._request.dropped == [3])
        assert await driver.order() == RayOrder("drop", 3)
        assert places._request.bundles == [{"CPU": 1.0}]  # the next agent has another number

    asyncio.run(run())
