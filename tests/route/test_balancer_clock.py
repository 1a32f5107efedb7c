"""A clock that jumps: the time of day, and a machine that was asleep."""

from __future__ import annotations

import asyncio
import os
import time
from itertools import count, cycle
from time import monotonic
from types import SimpleNamespace

import msgspec
import pytest

from banaserve_route.balancer import server
from banaserve_route.balancer.config import (
    BalancerSettings,
    HealthSettings,
    LimitSettings,
    PeerSettings,
    ReplicaSettings,
)
from banaserve_route.balancer.relays import processes, supervisor
from banaserve_route.balancer.relays.link import RelayLink
from banaserve_route.balancer.relays.messages import TO_BALANCER, RelayAlive
from banaserve_route.balancer.targets import peers
from waiting import lasts, until

DAY_S = 86_400.0


async def test_the_time_of_day_may_jump(house, monkeypatch, tmp_path):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer(200, asked.body)

    path, replica = tmp_path / "decisions.jsonl", await house.replica(hold)
    balancer = await house.balance(
        replica, limits=LimitSettings(max_outstanding=1), decision_log=str(path)
    )
    began_s, jumps = time.time(), cycle((DAY_S, -DAY_S, 0.0, 400 * DAY_S))
    monkeypatch.setattr(time, "time", lambda: began_s + next(jumps))
    asked = [asyncio.create_task(house.ask(body=b"%d" % number)) for number in range(3)]
    await house.until(lambda: len(balancer.queue) == 2)
    go_on.set()
    assert [(await one).status for one in asked] == [200] * 3
    assert len(replica.asked) == 3
    for observer in balancer.observers:
        observer.close()
    balancer.observers.clear()
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    told = [line["attempts"][-1] for line in lines]
    kinds = ("waited_ms", "first_byte_ms", "ended_ms")
    assert all(0 <= one[kind] < DAY_S for one in told for kind in kinds)


async def test_who_was_asleep_takes_nobody_for_dead(house, monkeypatch):
    monkeypatch.setattr(peers, "DEAD_AFTER_S", 0.2)
    replica = await house.replica()
    servers = (ReplicaSettings(url=replica.url),)
    _, port, kill = await house.open(BalancerSettings(region="us", peer_key="k", replicas=servers))
    balancer = await house.balance(
        await house.replica(),
        region="eu",
        peer_key="k",
        peers=(PeerSettings(region="us", url=f"http://127.0.0.1:{port}"),),
        health=HealthSettings(interval_s=0.05, report_interval_s=0.02),
    )
    us = balancer.registry._peers["us"]
    await house.until(lambda: us.state.replicas)
    assert not us.is_dead(monotonic() + DAY_S)
    kill()
    await house.until(lambda: us.is_dead(monotonic()))


async def test_no_relay_is_taken_for_hung_since_its_observer_has_stood_still(monkeypatch):
    monkeypatch.setattr(processes, "BEAT_S", 0.05)
    link = RelayLink(balancer=None, on_ready=lambda: None)
    watch = asyncio.create_task(processes._hangs(link))
    for _ in range(2):
        link.data_received(TO_BALANCER.encode(RelayAlive()))
        await until(lambda: not link.was_heard)
        lasts(2 * processes.MAX_SILENT_BEATS * processes.BEAT_S)
    assert not watch.done()
    assert await watch


@pytest.mark.parametrize(
    ("num_silent", "hangs"), [(processes.START_BEATS - 1, False), (processes.START_BEATS, True)]
)
def test_the_process_that_decides_has_a_minute_to_begin(monkeypatch, num_silent, hangs):
    heard, beats = os.pipe()
    waits = count()

    def select(reading, *_):
        number = next(waits) - num_silent
        if number == 0:
            os.write(beats, b".")
        elif number == 1:
            os.close(beats)
        return (reading if number >= 0 else [], [], [])

    monkeypatch.setattr(supervisor.select, "select", select)
    assert supervisor._hangs(heard) is hangs
    os.close(heard)


async def test_who_waits_for_replicas_shows_that_it_runs():
    heard, beats = os.pipe()
    signals, to_signals = os.pipe()
    discovery = SimpleNamespace(look=lambda: asyncio.sleep(0), settings=BalancerSettings())
    waiting = SimpleNamespace(start=asyncio.Event().wait)
    supervision = supervisor.Supervision(signals, -1, beats)
    serving = server.serve(lambda _: waiting, discovery, [], lambda: None, None, supervision)
    task = asyncio.create_task(serving)
    has_beat = asyncio.Event()
    asyncio.get_running_loop().add_reader(heard, has_beat.set)
    await until(has_beat.is_set)
    task.cancel()
    for each in (heard, signals):
        asyncio.get_running_loop().remove_reader(each)
    for each in (heard, beats, signals, to_signals):
        os.close(each)
