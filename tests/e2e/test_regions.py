"""Three regions of real processes under load, while their parts are killed and come back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from banaserve.bench.router_clients import Load
from banaserve.bench.router_regions import HOME_ONLY, REGIONS, Plan, World

pytestmark = [pytest.mark.e2e, pytest.mark.long]


async def test_nobody_is_lost_or_doubled_while_parts_of_three_regions_die(tmp_path: Path) -> None:
    async with World(Plan("skywalker"), tmp_path) as world:
        load = Load(world, dict.fromkeys(REGIONS, 6), seed=1, output_tokens=16)
        try:
            await _kill_and_bring_back(world, load)
            await load.end()
        finally:
            load.cancel()
        served = world.served()

    assert {one.num_answers for one in load.told} == {1}
    everywhere = sum(served.values(), Counter())
    assert set(everywhere) == {one.name for one in load.told}
    broken = sum(one.num_broken.total() for one in load.told)
    # Computed again is only what broke off before its client had all of it.
    assert everywhere.total() - len(load.told) <= broken
    # What may not leave its region has not, while its balancer and while all of it was dead.
    bound = {one.name for one in load.told if not one.may_leave}
    assert bound
    for name in REGIONS:
        assert name == HOME_ONLY or not bound & set(served[name])
    # The faults were felt, and requests did cross from region to region.
    assert broken
    assert any(one.region == HOME_ONLY for one in load.told if one.name not in served[HOME_ONLY])


async def _kill_and_bring_back(world: World, load: Load) -> None:
    home = [world.balancers[HOME_ONLY], *world.replicas[HOME_ONLY]]
    await load.more(100)
    world.replicas["us"][0].kill()
    await load.more(100)
    await world.replicas["us"][0].start()
    world.balancers[HOME_ONLY].kill()
    # Its nearest looks after its replicas before long, or those that may not leave get nothing.
    before = _answers_that_stay(load)
    await load.more(200)
    while _answers_that_stay(load) < before + 10:
        await load.more(10)
    await world.balancers[HOME_ONLY].start()
    await load.more(100)
    for process in home:
        process.kill()
    await load.more(100)
    for process in reversed(home):
        await process.start()
    before = _answers_that_stay(load)
    while _answers_that_stay(load) < before + 10:
        await load.more(10)


def _answers_that_stay(load: Load) -> int:
    return sum(one.num_answers for one in load.told if not one.may_leave)
