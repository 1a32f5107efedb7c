"""Accounts of every request to three regions, and the deaths that these must survive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from region_clients import ClientLoad
from region_processes import HOME_ONLY, REGIONS, World


@dataclass(frozen=True, slots=True)
class Account:
    """Account of the requests of one run.

    Attributes:
        num_lost: Requests without a whole answer, or with one that no replica has given.
        num_doubled: Requests answered twice, or computed again though nothing broke off.
        num_strayed: Requests served in a region where they may not be served.
        num_bound: Requests that may be served in one region alone.
        num_crossed: Requests of clients of one region that another region served.
        num_broken: Attempts that broke off, or were refused.
    """

    num_requests: int
    num_lost: int
    num_doubled: int
    num_strayed: int
    num_bound: int
    num_crossed: int
    num_broken: int


def account(world: World, load: ClientLoad) -> Account:
    """Return the account of a load that has ended."""
    told, served = load.told, world.served()
    everywhere = sum(served.values(), Counter[str]())
    elsewhere = {
        name: sum((served[other] for other in REGIONS if other != name), Counter[str]())
        for name in REGIONS
    }
    num_broken = sum(one.num_broken.total() for one in told)
    # An attempt that broke off may have been computed to its end.
    num_again = everywhere.total() - len(everywhere) - num_broken
    return Account(
        num_requests=len(told),
        num_lost=sum(not one.num_answers or one.name not in everywhere for one in told),
        num_doubled=sum(one.num_answers > 1 for one in told) + max(0, num_again),
        num_strayed=sum(not one.may_leave and one.name in elsewhere[HOME_ONLY] for one in told),
        num_bound=sum(not one.may_leave for one in told),
        num_crossed=sum(one.name in elsewhere[one.region] for one in told),
        num_broken=num_broken,
    )


async def kill_and_bring_back(world: World, load: ClientLoad) -> None:
    """Kill a replica, a balancer and a whole region under ``load``, each back before the next."""
    home = [world.balancers[HOME_ONLY], *world.replicas[HOME_ONLY]]
    await load.more(100)
    world.replicas["us"][0].kill()
    await load.more(100)
    await world.replicas["us"][0].start()
    world.balancers[HOME_ONLY].kill()
    # The nearest balancer must take over the replicas soon, or bound requests get no answer.
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


def _answers_that_stay(load: ClientLoad) -> int:
    return sum(one.num_answers for one in load.told if not one.may_leave)
