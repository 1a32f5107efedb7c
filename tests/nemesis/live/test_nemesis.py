"""Processes of a server die or stand still by turns under streams, and its disk fills up.

BANASERVE_NEMESIS_SEED chooses the order, BANASERVE_NEMESIS_S for how long: ``make test-nemesis``.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from banaserve.fail_points import VARIABLE
from depth import IS_LONG, chosen_seed
from faults import Disk, Nemesis, plan
from history import Asked, Fault, History, met, violations
from link import Link
from load import Load, ask
from router import Router
from server_run import Run
from service import Service
from streams import Kind

pytestmark = [pytest.mark.e2e, pytest.mark.early]

NAMES = ("p0", "d0")
OPTIONS = (
    *("--pd", "1:1", "--dtype", "float32", "--engine-stall-timeout", "5"),
    "--enable-prompt-tokens-details",
)
NUM_CLIENTS = 4
LONGEST_S = float(os.environ.get("BANASERVE_NEMESIS_S", "0"))
"""0: the first faults of the plan alone, each once."""
NUM_SHORT = 8 if IS_LONG else 3
READY_S = 120.0
_SLOW_MACHINE = 1.0 if LONGEST_S else 3.0


def seed() -> int:
    given = os.environ.get("BANASERVE_NEMESIS_SEED", "")
    return int(given) if given else (random.SystemRandom().randrange(10**6) if LONGEST_S else 1)


def kinds() -> dict[str, Kind]:
    draw = random.Random(chosen_seed(7))
    common = {"model": "smollm2-135m", "stream": True, "return_token_ids": True}
    common |= {"stream_options": {"include_usage": True}}
    length = {"max_tokens": 48, "ignore_eos": True}
    found = {}
    for number in range(6):
        prompt = [draw.randrange(100, 40000) for _ in range(draw.randrange(40, 400))]
        how = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
        body = {**common, **length, **how, "prompt": prompt}
        found[f"k{number}"] = Kind("/v1/completions", body)
    return found


@pytest.fixture(scope="module")
def fail_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fail_points")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, fail_points: Path) -> Iterator[Disk | None]:
    made = Disk(tmp_path_factory.mktemp("nemesis") / "disk", fail_points)
    yield made if made.is_there else None
    made.close()


@pytest.fixture(scope="module")
def service(
    serve: Callable[..., Run],
    disk: Disk | None,
    fail_points: Path,
    free_port: Callable[[], int],
) -> Iterator[Service]:
    tier = ("--kv-store-ssd", f"{disk.folder}/kv", "--kv-store-ssd-size", "64MiB") if disk else ()

    def start() -> Run:
        return serve(*OPTIONS, *tier, port=port, env=env)

    # With a variable of its own it would not be forked, and a short run has no slow disk.
    env = {VARIABLE: str(fail_points)} if LONGEST_S else {}
    port = free_port()
    made = Service(start(), start)
    yield made
    assert made.run.end() == 0


@pytest.fixture(scope="module")
def link(service: Service, free_port: Callable[[], int]) -> Iterator[Link | None]:
    """Between the server and what is in front of it in a long run."""
    if not LONGEST_S:
        yield None
        return
    made = Link(free_port(), service.run.port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def router(
    link: Link | None, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router | None]:
    """In front of the server in a long run."""
    if link is None:
        yield None
        return
    made = Router(free_port(), link.url, tmp_path_factory.mktemp("route"))
    yield made
    made.close()


async def answers(server: Run) -> dict[str, list[int]]:
    """The right tokens: of a run without faults."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as http:
        found = {}
        for name, kind in kinds().items():
            asked = Asked(name, name, 0.0)
            await ask(http, kind, asked)
            assert asked.has_answer, asked
            found[name] = asked.tokens
        return found


def test_faults_by_turns_break_no_promise(
    service: Service, disk: Disk | None, router: Router | None, link: Link | None
) -> None:
    chosen = seed()
    print(f"seed {chosen}: BANASERVE_NEMESIS_SEED={chosen}")
    expected = asyncio.run(answers(service.run))
    history = History()
    nemesis = Nemesis(service, NAMES, disk, router, link, chosen)
    load = Load(router.url if router else service.run.url, kinds(), history)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(load.run, NUM_CLIENTS)
        try:
            others = ["guest", *(["disk"] if disk else [])]
            others += ["route", "link", "server"] if router else []
            _torment(nemesis, history, chosen, tuple(others))
        finally:
            load.end()
            asking.result()
    faults = "\n".join(f"{one.name}: {_words(one)}" for one in history.faults)
    failed = [
        f"{one.id} ({met(one, history)}): {one.errors}" for one in history.requests if one.errors
    ]
    ends = f"{len(history.requests)} requests, {len(failed)} ended in an error"
    print("\n".join((faults, ends, *failed)))
    assert violations(history, expected, READY_S * _SLOW_MACHINE) == [], faults
    # Otherwise that nobody has found another's blocks would say nothing.
    assert any(one.cached_tokens for one in history.requests if not one.is_first)
    assert asyncio.run(answers(service.run)) == expected
    assert httpx.get(f"{service.run.url}/health").status_code == 200


def _words(fault: Fault) -> str:
    began_s = fault.over_s or fault.at_s
    return "never whole again" if fault.ready_s is None else f"{fault.ready_s - began_s:.1f} s"


def _torment(nemesis: Nemesis, history: History, chosen: int, others: tuple[str, ...]) -> None:
    until_s = time.monotonic() + LONGEST_S
    for number, choice in enumerate(plan(chosen, NAMES, others)):
        is_over = time.monotonic() > until_s if LONGEST_S else number >= NUM_SHORT
        if is_over:
            return
        _wait_for_answers(history, NUM_CLIENTS)
        fault = Fault(str(choice), time.monotonic(), cuts=choice.cuts, drains=choice.drains)
        history.faults.append(fault)
        if not nemesis.strike(choice):
            history.faults.remove(fault)
            continue
        # A server that ends is started again by the nemesis: that counts, too.
        fault.over_s = None if choice.target == "server" else time.monotonic()
        nemesis.wait_whole(2 * READY_S * _SLOW_MACHINE)
        fault.ready_s = time.monotonic()


def _wait_for_answers(history: History, num: int) -> None:
    """Let so many requests begin, so that the next fault meets streams under way."""
    wanted, waited = len(history.requests) + num, threading.Event()
    until_s = time.monotonic() + READY_S
    while len(history.requests) < wanted and time.monotonic() < until_s:
        waited.wait(0.05)
