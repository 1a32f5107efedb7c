"""Balancers of several regions: who gets what, who looks after whom, and what is never lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from banaserve_route.balancer.config import (
    BalancerSettings,
    HealthSettings,
    PeerSettings,
    PolicySettings,
    ReplicaSettings,
    TenantSettings,
)
from banaserve_route.balancer.targets import peers
from banaserve_route.balancer.targets.membership import failover_owner
from banaserve_route.policies.fleet import Fleet
from depth import chosen_seed
from ports import free_port
from waiting import thinks

ROUND_TRIP_MS = {("us", "asia"): 145.4, ("us", "eu"): 99.1, ("asia", "eu"): 222.5}
"""us-east-2, ap-northeast-1 and eu-central-1 of AWS, SkyWalker's regions; from
profiles/latency.csv of skyplane-project/skyplane (Apache-2.0)."""

KEY = "between-us"
HEALTH = HealthSettings(
    interval_s=0.05, report_interval_s=0.02, snapshot_interval_s=0.05, breaker_pause_s=0.05
)
IDLE = b"vllm:num_requests_waiting 0\n"
BUSY = b"vllm:num_requests_waiting 3\n"


class World:
    """Regions by name, each with a balancer and replicas, joined by links that delay."""

    def __init__(self, house, names, num_replicas=1, slower=0.0, behave=None, **settings):
        self.house, self.names = house, names
        self.num_replicas, self.slower, self.behave = num_replicas, slower, behave
        self.settings = settings
        self.ports = {name: free_port() for name in names}
        self.replicas, self.balancers, self.kills = {}, {}, {}
        self.logs = {name: [] for name in names}

    async def start(self):
        self.links = {
            (one, other): (
                await self.house.link(self.ports[other], self.slower * round_trip(one, other) / 2e3)
            ).url
            for one in self.names
            for other in self.names
            if one != other
        }
        for name in self.names:
            self.replicas[name] = [await self.replica() for _ in range(self.num_replicas)]
        for name in self.names:
            await self.start_balancer(name)
        await self.until_told()
        return self

    async def until_told(self):
        """Return when every balancer has heard of every living one."""
        await self.house.until(
            lambda: all(
                peer.state.replicas
                for one in self.balancers.values()
                for peer in one.registry._peers.values()
            )
        )

    async def replica(self, port=0):
        made = await self.house.replica(self.behave, port)
        made.metrics = IDLE
        return made

    async def start_balancer(self, name):
        told = BalancerSettings(
            region=name,
            policy=PolicySettings(name="skywalker"),
            replicas=tuple(ReplicaSettings(url=one.url) for one in self.replicas[name]),
            peers=tuple(
                PeerSettings(region=other, url=self.links[name, other])
                for other in self.names
                if other != name
            ),
            peer_key=KEY,
            health=HEALTH,
            **self.settings,
        )
        opened = await self.house.open(told, self.ports[name], self.logs[name])
        self.balancers[name], _, self.kills[name] = opened

    async def make_busy(self, *names, page=BUSY):
        for name in names:
            for one in self.replicas[name]:
                one.metrics = page
        pending = 3 if page == BUSY else 0
        views = [
            self.balancers[name].targets[one.id].view
            for name in names
            for one in self.replicas[name]
        ]
        others = [
            one.targets[f"region:{name}"].view
            for name in names
            for region, one in self.balancers.items()
            if region != name
        ]
        await self.house.until(
            lambda: (
                all(view.pending == pending for view in views)
                and all((view.num_available == 0) is (pending > 0) for view in others)
            )
        )

    async def ask(self, name, **kwargs):
        caller = await self.house.caller(self.ports[name])
        reply = await caller.ask(**kwargs)
        caller.hang_up()
        return reply


def round_trip(one, other):
    return ROUND_TRIP_MS.get((one, other)) or ROUND_TRIP_MS[other, one]


async def test_a_region_that_is_busy_pushes_on_and_only_then(house):
    world = await World(house, ("eu", "us")).start()
    assert (await world.ask("eu")).status == 200
    assert len(world.replicas["eu"][0].asked) == 1
    await world.make_busy("eu")
    reply = await world.ask("eu", body=b'{"prompt": "a"}', fields="X-Session-Id: s\r\n")
    assert reply.status == 200
    asked = world.replicas["us"][0].asked[0]
    assert asked.body == b'{"prompt": "a"}'
    assert not [name for name, _ in asked.fields if name.lower().startswith("x-banaserve")]
    assert world.balancers["eu"].queue.__len__() == 0


async def test_a_region_in_a_long_step_does_not_keep_all_requests(house):
    """Its page says that none waits until the step has ended, which is here never."""
    go_on = asyncio.Event()

    async def behave(asked):
        await go_on.wait()
        await asked.answer()

    world = await World(house, ("eu", "us"), behave=behave).start()
    replicas = [one for name in world.names for one in world.replicas[name]]
    for one in replicas:
        one.metrics = IDLE + b"vllm:iteration_tokens_total_count 1\n"
    reads = [one.num_reads for one in replicas]
    await house.until(
        lambda: all(one.num_reads > seen + 1 for one, seen in zip(replicas, reads, strict=True))
    )
    asked = [asyncio.create_task(world.ask("eu")) for _ in range(44)]
    await house.until(lambda: all(len(one.asked) == 16 for one in replicas))
    go_on.set()
    assert [(await one).status for one in asked] == [200] * 44


async def test_a_forwarded_request_waits_where_it_is_and_goes_no_further(house):
    world = await World(house, ("eu", "us", "asia")).start()
    await world.make_busy("us")
    waiting = asyncio.create_task(world.ask("us", fields=f"X-Banaserve-Peer: {KEY}\r\n"))
    await house.until(lambda: len(world.balancers["us"].queue) == 1)
    # One that comes from a client goes on to a region that is free.
    assert (await world.ask("us")).status == 200
    assert len(world.balancers["us"].queue) == 1
    await world.make_busy("us", page=IDLE)
    assert (await waiting).status == 200
    assert len(world.replicas["us"][0].asked) == 1


async def test_a_request_stays_where_it_may_be(house):
    world = await World(
        house,
        ("eu", "us"),
        tenants=(TenantSettings(key="home", regions=("eu",)), TenantSettings(key="any")),
    ).start()
    await world.make_busy("eu")
    home = asyncio.create_task(world.ask("eu", fields="Authorization: Bearer home\r\n"))
    narrowed = "Authorization: Bearer any\r\nX-Banaserve-Regions: eu, mars\r\n"
    asked = asyncio.create_task(world.ask("eu", fields=narrowed))
    await house.until(lambda: len(world.balancers["eu"].queue) == 2)
    # Nobody else has to wait for them.
    assert (await world.ask("eu", fields="Authorization: Bearer any\r\n")).status == 200
    assert len(world.replicas["us"][0].asked) == 1
    # A tenant cannot widen what it has been granted.
    widened = "Authorization: Bearer home\r\nX-Banaserve-Regions: us\r\n"
    assert (await world.ask("eu", fields=widened)).status == 503
    await world.make_busy("eu", page=IDLE)
    assert [(await one).status for one in (home, asked)] == [200, 200]
    assert len(world.replicas["us"][0].asked) == 1
    # And the other end does not take a peer's word against the request's own.
    forwarded = f"X-Banaserve-Peer: {KEY}\r\nX-Banaserve-Regions: eu\r\n"
    reply = await world.ask("us", fields=forwarded)
    assert (reply.status, len(world.replicas["us"][0].asked)) == (503, 1)
    assert "no replica here may serve" in reply.json["error"]["message"]


async def test_nobody_passes_for_a_peer(house):
    world = await World(house, ("eu", "us"), api_keys=("k",)).start()
    for key in ("wrong", "k", ""):
        reply = await world.ask("eu", fields=f"X-Banaserve-Peer: {key}\r\n")
        assert reply.status == 401
    caller = await house.caller(world.ports["eu"])
    await caller.send(
        b"GET /_banaserve/state HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer k\r\n\r\n"
    )
    assert (await caller.reply()).status == 404
    assert world.replicas["eu"][0].asked == []


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ((401, b""), "answers 401: is peer_key the same?"),
        ((200, b"garbage"), "makes no sense"),
        ((200, b'{"region": "us", "num_available": -1}'), "makes no sense"),
        ((200, b'{"region": "us", "queue_length": 1e400}'), "makes no sense"),
        ((200, b'{"region": "us", "protocol": 2}'), "speaks protocol 2, not 1"),
        ((200, b'{"region": "mars"}'), "says it is mars"),
        ((200, b'{"region": "us\\nall is well"}'), r"its region is 'us\nall is well'"),
        ((200, b'{"region": "us", "replicas": [{"url": "file:///", "id": ""}]}'), "no address"),
    ],
)
async def test_a_peer_that_makes_no_sense_is_named_once_and_gets_nothing(house, answer, complaint):
    async def behave(asked):
        await asked.answer(*answer)

    odd, well = await house.replica(behave), await house.replica()
    balancer = await house.balance(
        well,
        region="eu",
        policy=PolicySettings(name="skywalker"),
        peers=(PeerSettings(region="us", url=odd.url),),
        peer_key=KEY,
        health=HEALTH,
    )
    await house.until(lambda: len(odd.asked) > 3)
    assert not balancer.targets["region:us"].view.is_available
    assert sum(complaint in line for line in house.log) == 1
    assert (await house.ask()).status == 200


async def test_a_busy_region_pushes_to_where_the_prefix_is(house):
    world = await World(house, ("eu", "us", "asia")).start()
    prompt = b'{"prompt": "%b"}' % (b"what asia was asked before " * 40)
    assert (await world.ask("asia", body=prompt)).status == 200
    known = world.balancers["eu"].prefixes
    await house.until(lambda: known._theirs.target_bytes("region:asia") > 0)
    await world.make_busy("eu")
    for _ in range(4):
        assert (await world.ask("eu", body=prompt)).status == 200
    assert len(world.replicas["asia"][0].asked) == 5


async def test_prefixes_are_told_to_peers_alone(house):
    world = await World(house, ("eu", "us"), api_keys=("k",)).start()
    for fields, status in (
        ("Authorization: Bearer k", 404),
        ("X-Banaserve-Peer: wrong", 401),
        (f"X-Banaserve-Peer: {KEY}", 200),
    ):
        caller = await house.caller(world.ports["eu"])
        asked = f"GET /_banaserve/prefixes HTTP/1.1\r\nHost: b\r\n{fields}\r\n\r\n"
        await caller.send(asked.encode())
        assert (await caller.reply()).status == status


async def test_a_snapshot_that_makes_no_sense_is_named_once_and_the_peer_goes_on(house):
    async def behave(asked):
        page = b"garbage" if "prefixes" in asked.line else b'{"region": "us", "num_available": 1}'
        await asked.answer(200, page)

    odd, well = await house.replica(behave), await house.replica()
    balancer = await house.balance(
        well,
        region="eu",
        policy=PolicySettings(name="skywalker"),
        peers=(PeerSettings(region="us", url=odd.url),),
        peer_key=KEY,
        health=HEALTH,
    )
    await house.until(lambda: sum("prefixes" in one.line for one in odd.asked) > 3)
    assert sum("prefixes of peer" in line for line in house.log) == 1
    assert balancer.targets["region:us"].view.is_available


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        ({"a": 1.0}, "a"),
        ({"a": 2.0, "b": 1.0}, "b"),
        ({"b": 1.0, "a": 1.0}, "a"),
        ({"a": float("inf"), "b": 5.0}, "b"),
    ],
)
def test_the_nearest_looks_after_a_dead_region(distances, expected):
    assert failover_owner(distances) == expected


async def test_a_dead_balancer_s_replicas_go_to_the_nearest_and_come_back(house, monkeypatch):
    def least(fleet, target, milliseconds):
        view = fleet.get(target)
        view.round_trip_ms = min(view.round_trip_ms or milliseconds, milliseconds)

    monkeypatch.setattr(peers, "DEAD_AFTER_S", 0.2)
    # A stall of this process only adds to a distance.
    monkeypatch.setattr(Fleet, "measured_round_trip", least)
    world = await World(house, ("eu", "us", "asia"), slower=1.0).start()
    of_us, of_asia = (world.balancers[name].registry._peers for name in ("us", "asia"))
    least_of_asia_ms = round_trip("asia", "eu")
    await house.until(
        lambda: (
            max(of_us["eu"].distance_ms, of_asia["us"].state.distances_ms["eu"]) < least_of_asia_ms
        )
    )
    orphan = world.replicas["eu"][0].id
    world.kills["eu"]()
    await house.until(lambda: orphan in world.balancers["us"].targets)
    # It is still a replica of its own region.
    assert world.balancers["us"].targets[orphan].view.region == "eu"
    assert orphan not in world.balancers["asia"].targets
    reply = await world.ask("us", fields="X-Banaserve-Regions: eu\r\n")
    assert reply.status == 200
    assert len(world.replicas["eu"][0].asked) == 1
    await world.start_balancer("eu")
    await house.until(lambda: orphan not in world.balancers["us"].targets)
    assert (await world.ask("eu")).status == 200
    assert any("is returned to eu" in line for line in world.logs["us"])


class Load:
    """Clients of every region, which go to another balancer when theirs breaks off."""

    def __init__(self, world, num_clients):
        self.world = world
        self.answers, self.served = Counter(), Counter()
        self.num_broken = 0
        self.is_over = False
        self._number = 0
        self.tasks = [
            asyncio.create_task(self._client(name, random.Random(i)))
            for name in world.names
            for i in range(num_clients)
        ]

    async def _client(self, home, generator):
        while not self.is_over:
            self._number += 1
            asked = f"id-{self._number}-"
            order = [home, *(name for name in self.world.names if name != home)]
            attempt = 0
            while not await self._try(order[attempt % len(order)], asked):
                self.num_broken += 1
                attempt += 1
                await thinks(0.02 * generator.random())

    async def _try(self, name, asked):
        body = b'{"prompt": "%b"}' % asked.encode()
        try:
            reply = await self.world.ask(name, body=body)
        except (OSError, asyncio.IncompleteReadError):
            return False
        if not reply.is_whole or reply.status in (429, 502, 503):
            return False
        assert reply.status == 200, reply.body
        if b"server_error" in reply.body:
            return False
        assert reply.body == b"data: begin\n\ndata: %b\n\n" % asked.encode()
        self.answers[asked] += 1
        return True


async def test_nothing_is_lost_or_doubled_while_replicas_balancers_and_regions_die(
    house, monkeypatch
):
    monkeypatch.setattr(peers, "DEAD_AFTER_S", 0.2)
    generator = random.Random(chosen_seed(7))

    async def stream(asked):
        prompt = asked.body.split(b'"')[3].decode()
        await thinks(0.02 * generator.random())
        await asked.begin_stream()
        await asked.event("begin")
        await thinks(0.02 * generator.random())
        await asked.event(prompt)
        await asked.end_stream()
        if not asked.writer.transport.is_closing():
            load.served[prompt] += 1

    names = ("eu", "us", "asia")
    world = await World(house, names, num_replicas=2, slower=0.1, behave=stream).start()
    load = Load(world, num_clients=4)

    async def passes(num_answers=30):
        before = load.answers.total()
        await house.until(lambda: load.answers.total() >= before + num_answers)

    async def restart(name, places):
        for place in places:
            port = world.replicas[name][place].port
            world.replicas[name][place] = await world.replica(port)

    await passes()
    world.replicas["us"][0].stop()
    await passes()
    await restart("us", [0])
    world.kills["eu"]()
    orphans = {one.id for one in world.replicas["eu"]}
    # A stall of the loop adds more to a measured distance than the links do: either may be nearer.
    await house.until(
        lambda: any(orphans <= set(world.balancers[one].targets) for one in ("us", "asia"))
    )
    await passes()
    await world.start_balancer("eu")
    await passes()
    world.kills["asia"]()
    for one in world.replicas["asia"]:
        one.stop()
    await passes()
    await restart("asia", [0, 1])
    await world.start_balancer("asia")
    await house.until(lambda: world.balancers["asia"].metrics._answers[200] > 5)
    load.is_over = True
    await asyncio.wait_for(asyncio.gather(*load.tasks), 60)

    assert set(load.answers.values()) == {1}
    assert len(load.answers) == load._number
    assert set(load.answers) <= set(load.served)
    # Served again is only what was broken off before its client had all of it.
    assert load.served.total() - len(load.answers) <= load.num_broken
