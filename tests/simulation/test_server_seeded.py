"""A whole server from one seed: whatever dies, each request ends once and has its own tokens."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from depth import says_seed, seeds
from seeded_machine import run_virtually
from seeded_server import Server, run_seed

pytestmark = pytest.mark.deep

SEEDS = seeds(in_long=10_000, otherwise=40)
PARTS = 4
REGRESSIONS = (94, 150, 2053, 3184, 3459, 3839, 4593, 4886, 7498)
"""Of the server: an abort that counted as a death, the end of an engine told by a call, a deadline
and a drain of one slow reader, two restarts whose settings did not say what weights an engine had,
an answer given up for weights that all instances still had, a pool that could not shrink when its
guest was lost and did not later. Of the simulation: a hold of a dead engine, text given with an
abort."""


@pytest.fixture(autouse=True)
def _errors_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="banaserve")


def run(seed: int) -> Server:
    with says_seed(seed):
        return run_virtually(run_seed(seed))


@pytest.mark.parametrize("part", range(PARTS))
def test_each_request_ends_once_with_its_own_tokens_and_nothing_is_left(part: int) -> None:
    num_asked = num_whole = num_deaths = 0
    for seed in SEEDS[part::PARTS]:
        server = run(seed)
        num_asked += len(server.answers)
        num_whole += sum(answer.is_whole for answer in server.answers)
        num_deaths += server.machine.num_deaths
    if len(SEEDS) > 1:
        assert num_whole > 0.6 * num_asked
        assert num_deaths > 0.2 * num_asked


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_has_failed_once(seed: int) -> None:
    run(seed)


def test_a_seed_runs_the_same_way_again() -> None:
    first, second = (
        [(one.request.name, one.tokens, one.ended_s, str(one.error)) for one in run(7).answers]
        for _ in range(2)
    )
    assert first == second
