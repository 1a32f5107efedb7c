"""Plugin for random numbers: a failure says its seeds, no test goes on with another's numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator

import pytest

from depth import SEEDS_OF_TEST


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin the generators that all code of a process shares anew."""
    SEEDS_OF_TEST.clear()
    random.seed(0)
    # What is not imported yet begins from a seed of its own when it is: nothing draws by it before.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    report = yield
    params = getattr(getattr(item, "callspec", None), "params", {})
    seeds = [*SEEDS_OF_TEST, *([params["seed"]] if "seed" in params else [])]
    if report.failed and seeds:
        told = "\n".join(f"seed {one}: BANASERVE_TEST_SEED={one}" for one in dict.fromkeys(seeds))
        report.sections.append(("seeds", told))
    return report
