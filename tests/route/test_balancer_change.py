"""Settings that change while a balancer serves, and looks that meet what nobody foresaw."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec import structs

from banaserve.base.errors import UserError
from banaserve_route.balancer.config import (
    HealthSettings,
    LimitSettings,
    PeerSettings,
    PolicySettings,
    ReplicaSettings,
)
from banaserve_route.balancer.targets import health as prober_module
from banaserve_route.policies.fleet import Report
from banaserve_route.policies.gorgo.tuner import START
from counters import counted

HEALTH = HealthSettings(interval_s=0.02, report_interval_s=0.02, breaker_pause_s=0.05)
PROMPT = b'{"prompt": "%b"}' % (b"the same long beginning " * 20)


async def test_other_limits_forget_no_prefix_and_no_count(house):
    one, two = await house.replica(), await house.replica()
    balancer = await house.balance(one, two, policy=PolicySettings(name="skywalker"), health=HEALTH)
    assert (await house.ask(body=PROMPT)).status == 200
    tree, views = balancer.fleet.policy.tree, [target.view for target in balancer.targets.values()]
    known = tree.match(PROMPT[11:-1])
    assert known
    limits = LimitSettings(max_outstanding=7, connect_timeout_s=1.5)
    health = structs.replace(HEALTH, timeout_s=0.7, breaker_failures=9)
    balancer.change(
        structs.replace(balancer.settings, limits=limits, health=health, replica_key="secret")
    )
    assert tree.match(PROMPT[11:-1]) == known
    assert [target.view for target in balancer.targets.values()] == views
    for target in balancer.targets.values():
        assert target.pool.connect_timeout_s == 1.5
        assert b"Authorization: Bearer secret\r\n" in target.fields
    served = next(each for each in (one, two) if each.asked)
    for _ in range(3):
        assert (await house.ask(body=PROMPT)).status == 200
    assert len(served.asked) == 4
    assert served.asked[-1].field("authorization") == "Bearer secret"


async def test_counters_may_be_stale_for_comparison(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    busiest = {}
    for staleness_s in (0.0, 1e6):
        go_on.clear()
        replicas = [await house.replica(hold) for _ in range(2)]
        told = PolicySettings(name="least_requests", seed=2, staleness_s=staleness_s)
        await house.balance(*replicas, policy=told, health=HEALTH)
        asked = [asyncio.create_task(house.ask()) for _ in range(8)]
        await house.until(lambda: sum(len(one.asked) for one in replicas) == 8)  # noqa: B023
        busiest[staleness_s] = max(len(one.asked) for one in replicas)
        go_on.set()
        assert [(await one).status for one in asked] == [200] * 8
    # Equals are drawn while nothing is seen of what was sent; live counts alternate.
    assert busiest[0.0] == 4 < busiest[1e6]


async def test_weights_are_taken_back_while_serving_and_held(house):
    told = PolicySettings(name="gorgo", preset="as-coded")
    balancer = await house.balance(await house.replica(), policy=told, health=HEALTH)
    policy = balancer.fleet.policy

    async def tried(num_requests):
        seen = set()
        for _ in range(num_requests):
            assert (await house.ask(body=PROMPT)).status == 200
            seen.add(policy.weights)
        return seen

    assert len(await tried(200)) > 1
    for is_held in (True, False):
        held = structs.replace(told, hold_safe=is_held)
        balancer.change(structs.replace(balancer.settings, policy=held))
        assert policy.weights == START
        assert (await tried(200) == {START}) is is_held
    with pytest.raises(UserError, match="policy cannot change while serving"):
        balancer.change(structs.replace(balancer.settings, policy=PolicySettings()))


async def test_limits_that_change_hold(house):
    replica = await house.replica()
    balancer = await house.balance(replica, health=HEALTH)
    [target] = balancer.targets.values()
    target.view.outstanding = 3
    assert not target.is_full
    limits = LimitSettings(max_outstanding=3)
    balancer.change(structs.replace(balancer.settings, limits=limits))
    assert target.is_full
    target.view.outstanding = 0
    slow = structs.replace(HEALTH, interval_s=0.01)
    balancer.change(structs.replace(balancer.settings, health=slow))
    replica.health = 503
    await house.until(lambda: not target.is_healthy)


async def test_a_replica_that_is_told_anew_keeps_its_cache_unless_it_is_elsewhere(house):
    one, two = await house.replica(), await house.replica()
    told = ReplicaSettings(url=one.url, id="a")
    balancer = await house.balance(told, policy=PolicySettings(name="skywalker"), health=HEALTH)
    assert (await house.ask(body=PROMPT)).status == 200
    tree = balancer.fleet.policy.tree

    def change(**more):
        replicas = (structs.replace(told, **more),)
        balancer.change(structs.replace(balancer.settings, replicas=replicas))

    change(models=("m",), max_prompt_tokens=5000, key="own")
    assert tree.target_bytes("a") > 0
    assert balancer.targets["a"].view.models == {"m"}
    assert balancer.targets["a"].view.max_prompt_tokens == 5000
    change(url=two.url)
    assert tree.target_bytes("a") == 0
    assert (await house.ask(body=PROMPT)).status == 200
    assert len(two.asked) == 1


async def test_metrics_name_a_replica_until_it_is_gone(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    stays, goes = await house.replica(), await house.replica(hold)
    balancer = await house.balance(stays, goes, health=HEALTH)
    pending = [asyncio.create_task(house.ask()) for _ in range(2)]
    await house.until(lambda: stays.asked and goes.asked)
    stays.health = 503
    await house.until(lambda: not balancer.targets[stays.id].is_healthy)
    replicas = tuple(one for one in balancer.settings.replicas if one.url == stays.url)
    balancer.change(structs.replace(balancer.settings, replicas=replicas))
    go_on.set()
    assert [(await one).status for one in pending] == [200, 200]
    await house.until(lambda: not balancer._under_way)
    assert counted(balancer, "decisions", target=stays.id, reason="turn") == 1
    assert goes.id.encode() not in balancer.metrics.page()


@pytest.mark.parametrize("peers", [(), (PeerSettings(region="us", url="http://127.0.0.1:9"),)])
async def test_models_of_replicas_that_serve_different_ones_are_listed_together(house, peers):
    one, two = await house.replica(), await house.replica()
    told = ReplicaSettings(url=one.url, id="a", models=("m", "n"))
    other = ReplicaSettings(url=two.url, id="b", models=("l",))
    balancer = await house.balance(
        told, other, health=HEALTH, policy=PolicySettings(), peers=peers, peer_key="k"
    )
    answer = await house.ask("/v1/models", method="GET")
    assert answer.status == 200
    assert [model["id"] for model in json.loads(answer.body)["data"]] == ["l", "m", "n"]
    assert not one.asked
    assert not two.asked
    # With the same models, or of any model, a replica tells more than their names.
    for models in (("m", "n"), ()):
        replicas = (told, structs.replace(other, models=models))
        balancer.change(structs.replace(balancer.settings, replicas=replicas))
        assert (await house.ask("/v1/models", method="GET")).status == 200
    assert len(one.asked) + len(two.asked) == 2


@pytest.mark.parametrize("name", ["fetch", "read_report"])
async def test_a_look_goes_on_after_what_nobody_foresaw(house, monkeypatch, name):
    replica = await house.replica()
    replica.metrics = b"vllm:num_requests_waiting 0\n"
    balancer = await house.balance(replica, policy=PolicySettings(name="skywalker"), health=HEALTH)
    [target] = balancer.targets.values()
    whole = getattr(prober_module, name)

    def broken(*_args, **_more):
        raise RuntimeError("a surprise")

    monkeypatch.setattr(prober_module, name, broken)
    await house.until(lambda: any("a surprise" in line for line in house.log))
    monkeypatch.setattr(prober_module, name, whole)
    replica.metrics = b"vllm:num_requests_waiting 4\n"
    await house.until(lambda: target.view.pending == 4)
    replica.health = 500
    await house.until(lambda: not target.is_healthy)
    # The same surprise again and again is one line a task.
    assert sum("a surprise" in line for line in house.log) <= 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_lines_of_a_page_that_are_read_say_all_of_its_load(engine):
    names = {
        "vllm": ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"),
        "sglang": ("num_queue_reqs", "num_running_reqs", "token_usage"),
    }[engine]
    page = "# HELP of a gauge\n" + "".join(
        f'{engine}:{name}{{model_name="m"}} {value}\n{engine}:{name}_other 9\n'
        for name, value in zip(names, ("3.0", "5.0", "0.25"), strict=True)
    )
    page += 'vllm:iteration_tokens_total_count{engine="0"} 44.0\n'
    lines = prober_module.load_lines(page.encode())
    assert prober_module.read_report(lines, 1.0) == Report(1.0, 3, 5, 0.25)
    assert prober_module.count_steps(lines) == 44


def steps_page(num_steps, pending=0):
    return (
        b'vllm:num_requests_waiting{engine="0"} %d.0\n'
        b'vllm:iteration_tokens_total_count{engine="0"} %d.0\n' % (pending, num_steps)
    )


async def test_a_report_is_as_old_as_the_step_that_it_is_of(house):
    replica = await house.replica()
    replica.metrics = steps_page(7)
    balancer = await house.balance(replica, policy=PolicySettings(name="skywalker"), health=HEALTH)
    [target] = balancer.targets.values()
    view = target.view
    await house.until(lambda: view.reported_at_s is not None)
    first_s = view.reported_at_s
    assert (await house.ask(body=PROMPT)).status == 200
    reads = replica.num_reads
    await house.until(lambda: replica.num_reads >= reads + 3)
    # No step has ended: the page cannot include the request.
    assert (view.reported_at_s, view.sent_since_report) == (first_s, 1)
    replica.metrics = steps_page(8, pending=2)
    await house.until(lambda: view.pending == 2)
    # This step may have begun before the request came.
    assert (view.reported_at_s, view.sent_since_report) == (first_s, 1)
    replica.metrics = steps_page(9)
    await house.until(lambda: view.pending == 0)
    assert view.reported_at_s > first_s
    assert view.sent_since_report == 0


async def test_a_step_without_output_is_reported_though_it_is_not_counted(house):
    replica = await house.replica()
    replica.metrics = steps_page(7, pending=3)
    balancer = await house.balance(replica, policy=PolicySettings(name="skywalker"), health=HEALTH)
    [target] = balancer.targets.values()
    await house.until(lambda: target.view.pending == 3)
    replica.metrics = steps_page(7)  # all requests have been aborted
    await house.until(lambda: target.view.pending == 0)


async def test_a_peer_that_brings_a_surprise_is_looked_at_again(house, monkeypatch):
    async def behave(asked):
        await asked.answer(200, b'{"region": "us", "num_available": 1}')

    peer, own = await house.replica(behave), await house.replica()
    balancer = await house.balance(
        own,
        region="eu",
        policy=PolicySettings(name="skywalker"),
        peers=(PeerSettings(region="us", url=peer.url),),
        peer_key="k",
        health=HEALTH,
    )
    prober = balancer.registry._peers["us"]
    monkeypatch.setattr(prober, "_take", lambda *_: 1 / 0)
    await house.until(lambda: any("ZeroDivisionError" in line for line in house.log))
    monkeypatch.undo()
    view = balancer.targets["region:us"].view
    before = view.reported_at_s
    await house.until(lambda: view.reported_at_s != before)
