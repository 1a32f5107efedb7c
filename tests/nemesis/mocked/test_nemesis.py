"""A short nemesis in every run: processes of a server with mock engines die or stand still.

``BANASERVE_TEST_SEED`` chooses the order; the long one, on real engines, is ``make test-nemesis``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from depth import IS_LONG, chosen_seed
from faults import Choice, Harm, Nemesis, plan
from mock_facts import MockOptions
from mock_run import MockRun
from service import Service
from trial import Trial, kinds

pytestmark = [pytest.mark.room, pytest.mark.early]

NAMES = ("p0", "d0")
STALL_S = 2.5
OPTIONS = ("--pd", "1:1", "--engine-stall-timeout", str(STALL_S), "--enable-prompt-tokens-details")
MOCKS = MockOptions(step_ms=5.0, patience=0.4)
NUM_OF_PLAN = 40 if IS_LONG else 3
READY_S = 60.0


@pytest.fixture(scope="module")
def service(serve: Callable[..., MockRun]) -> Iterator[Service]:
    made = Service(serve(*OPTIONS, mocks=MOCKS))
    yield made
    assert made.run.end() == 0


def test_faults_by_turns_break_no_promise(service: Service) -> None:
    seed = chosen_seed(1)
    print(f"seed {seed}: BANASERVE_TEST_SEED={seed}")
    # Clients talk to the server itself: it stands still, but does not end.
    faults = [*itertools.islice(plan(seed, NAMES, ()), NUM_OF_PLAN), Choice(Harm.PAUSE, "front")]
    nemesis = Nemesis(
        service, NAMES, None, None, None, seed, longest_stop_s=2.0, long_pause_s=2 * STALL_S
    )
    Trial(service, nemesis, kinds(80), READY_S).run(faults)
