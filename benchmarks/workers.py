"""Processes for work on several cores."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from banaserve_bench.loadgen.servers import end_with_parent


def workers(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of ``jobs`` processes, spawned since the parent may have threads.

    The processes end with the parent, also when it is killed: one that went on for minutes would
    disturb the next measurement.
    """
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent)
