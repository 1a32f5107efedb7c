"""Processes of a server die or stand still by turns under streams, and its disk fills up.

BANASERVE_NEMESIS_SEED chooses the order, BANASERVE_NEMESIS_S for how long: ``make test-nemesis``.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banaserve.base.platform.fail_points import VARIABLE
from depth import IS_LONG
from faults import Disk, Nemesis, plan
from link import Link
from router import Router
from server_run import Run
from service import Service
from trial import Trial, kinds

pytestmark = [pytest.mark.e2e, pytest.mark.early]

NAMES = ("p0", "d0")
OPTIONS = (
    *("--pd", "1:1", "--dtype", "float32", "--engine-stall-timeout", "5"),
    "--enable-prompt-tokens-details",
)
LONGEST_S = float(os.environ.get("BANASERVE_NEMESIS_S", "0"))
"""0: the first faults of the plan alone, each once."""
NUM_SHORT = 8 if IS_LONG else 3
READY_S = 120.0
_SLOW_MACHINE = 1.0 if LONGEST_S else 3.0


def seed() -> int:
    given = os.environ.get("BANASERVE_NEMESIS_SEED", "")
    return int(given) if given else (random.SystemRandom().randrange(10**6) if LONGEST_S else 1)


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


def test_faults_by_turns_break_no_promise(
    service: Service, disk: Disk | None, router: Router | None, link: Link | None
) -> None:
    chosen = seed()
    print(f"seed {chosen}: BANASERVE_NEMESIS_SEED={chosen}")
    others = ["guest", *(["disk"] if disk else [])]
    others += ["route", "link", "server"] if router else []
    faults = plan(chosen, NAMES, tuple(others))
    nemesis = Nemesis(service, NAMES, disk, router, link, chosen)
    trial = Trial(
        service, nemesis, kinds(48), READY_S * _SLOW_MACHINE, router.url if router else ""
    )
    if LONGEST_S:
        trial.run(faults, time.monotonic() + LONGEST_S)
    else:
        trial.run(itertools.islice(faults, NUM_SHORT))
