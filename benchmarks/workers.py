"""Processes for work on several cores."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from banaserve.bench.loadgen.servers import end_with_parent


def workers(jobs: int) -> ProcessPoolExecutor:
    """Returns so many processes, spawned since the parent may have threads.

    They end with it, also when it is killed: one that went on for minutes would disturb whatever is
    measured next.
    """
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent)
