"""Policies of ``banaserve route`` in front of real engines in two regions, of which parts die.

Every client gets the tokens of one plain vLLM engine, whole and once. Random weights of SmolLM2's
shape, greedy, float32.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import small_model
from engine_regions import (
    HOMES,
    MOST_AT_ONCE,
    OTHER,
    SAMPLING,
    Balancers,
    Conversation,
    Engines,
    Load,
    Request,
    conversations,
    region_of,
)
from fork_server import ForkServer
from reference import reference_tokens
from server_run import Run
from waiting import until

pytestmark = pytest.mark.e2e

# Of this seed, both regions have sessions among the first conversations.
ALL = conversations(100, seed=263)
SHORT = ALL[:15]
DEFAULT = pytest.param("", id="default")
DEAD = {"replica": ("eu", ["e1"]), "balancer": ("us", []), "region": ("us", ["u0"])}
"""Region in which a part dies, and replicas that do; its balancer does unless a replica alone."""

Tokens = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def expected(fork_server: ForkServer) -> Tokens:
    """Tokens of one plain engine, by prompt."""
    prompts = [prompt for each in ALL for prompt in each]
    model = small_model.resolve().path_or_id
    found = reference_tokens(fork_server, model, prompts, {"greedy": SAMPLING})["greedy"]
    return dict(zip(map(tuple, prompts), found, strict=True))


@pytest.fixture(scope="module")
def engines(serve: Callable[..., Run]) -> Engines:
    return Engines(serve)


async def die(what: str, balancers: Balancers, engines: Engines, load: Load) -> None:
    """Kill a part while requests are on their way through it.

    It is stopped first: what is on its way cannot come through before the death.
    """
    region, replicas = DEAD[what]
    runs = [engines.runs.pop(name) for name in replicas]
    for run in runs:
        run.process.send_signal(signal.SIGSTOP)
    if what == "replica":
        await balancers.until(region, "outstanding", lambda now: now > 0, target=replicas[0])
    else:
        balancers.stop(region)
        await until(lambda: load.num_under_way[region] > 0)
        balancers.kill(region)
    for run in runs:
        os.killpg(run.process.pid, signal.SIGKILL)


@pytest.fixture
def check(engines: Engines, expected: Tokens, fork_server: ForkServer, tmp_path: Path):
    async def check(policy: str, what: str, asked: list[Conversation]) -> None:
        engines.start()
        region, _ = DEAD[what]
        # While all of a region is dead, nothing may serve what is bound to it.
        bound_to = OTHER[region] if what == "region" else "us"
        async with Balancers(policy, engines, fork_server, tmp_path) as balancers:
            before = engines.num_computed()
            load = Load(balancers.urls, asked, bound_to)
            requests = await load.run(region, partial(die, what, balancers, engines))
            await balancers.end()
        check_answers(requests, expected)
        given = Counter(answer.replica for one in requests for answer in one.answers)
        for name, count in engines.num_computed().items():
            # What was on its way through the dead part may be computed again, and nothing else.
            assert 0 <= count - before[name] - given[name] <= MOST_AT_ONCE, name
        check_failures(what, requests)
        check_places(what, requests, balancers.is_forwarding)

    return check


def check_answers(requests: list[Request], expected: Tokens) -> None:
    for request in requests:
        (answer,) = request.answers
        assert answer.tokens == expected[tuple(request.prompt)]
        assert answer.endings == ["length"]
        assert len(answer.origins) == 1
        assert request.bound_to in ("", region_of(answer.replica))


def check_failures(what: str, requests: list[Request]) -> None:
    """Clients notice the death of what they asked, and of what had begun to answer them alone."""
    region, _ = DEAD[what]
    num_cut = sum(kind == "cut" for one in requests for _, kind in one.failures)
    if what == "replica":
        assert {kind for one in requests for _, kind in one.failures} <= {"cut"}
        assert num_cut <= MOST_AT_ONCE
        return
    assert any(where == region for one in requests for where, _ in one.failures)
    assert num_cut <= len(HOMES)
    for request in requests:
        allowed = {(region, "cut"), (region, "refused"), (OTHER[region], "cut")}
        if request.bound_to == region:
            allowed.add((OTHER[region], "503"))  # until that balancer has adopted the replicas
        assert set(request.failures) <= allowed


def check_places(what: str, requests: list[Request], is_forwarding: bool) -> None:
    answers = [(one.bound_to, answer) for one in requests for answer in one.answers]
    elsewhere = [bound for bound, one in answers if region_of(one.replica) != one.asked]
    if what == "replica":
        assert bool(elsewhere) is is_forwarding
    elif what == "balancer":
        assert "us" in elsewhere


@pytest.mark.spine
@pytest.mark.parametrize("policy", ["skywalker", DEFAULT])
async def test_a_replica_dies_under_a_short_load(policy, check) -> None:
    await check(policy, "replica", SHORT)


@pytest.mark.parametrize("what", ["balancer", "replica", "region"])
@pytest.mark.parametrize("policy", ["skywalker", "gorgo_v1", "gorgo", "preble", DEFAULT])
async def test_nothing_is_lost_or_doubled_while_a_part_dies(policy, what, check) -> None:
    await check(policy, what, ALL)
