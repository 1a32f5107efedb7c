"""Three regions of real processes under load, while their parts are killed and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from region_accounts import account, kill_and_bring_back
from region_clients import ClientLoad
from region_processes import REGIONS, World

pytestmark = [pytest.mark.e2e, pytest.mark.long]


async def test_nobody_is_lost_or_doubled_while_parts_of_three_regions_die(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        load = ClientLoad(world, dict.fromkeys(REGIONS, 6), seed=1, output_tokens=16)
        try:
            await kill_and_bring_back(world, load)
            await load.end()
        finally:
            load.cancel()
        found = account(world, load)

    assert (found.num_lost, found.num_doubled) == (0, 0)
    # What may not leave its region has not, while its balancer and while all of it was dead.
    assert found.num_bound
    assert found.num_strayed == 0
    # The faults were felt, and requests did cross from region to region.
    assert found.num_broken
    assert found.num_crossed
