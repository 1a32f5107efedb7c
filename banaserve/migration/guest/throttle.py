"""Limits on a guest's computing: a share of its device, and a low priority for building units."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from banaserve.base.errors import MigrationError
from banaserve.transport.interface import Transport
from banaserve.transport.memory import PAGE_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STEP = 5
_LOWEST = 19
# torch splits work among its threads in parts of this many elements.
_PARALLEL_ELEMENTS = 32768


class ComputeThrottle:
    """Throttle that delays work so that it takes at most a fraction of the time.

    After work of c seconds the next work begins at the earliest c / fraction after this one began,
    so in any time t a guest computes for at most ``fraction * t`` plus one piece of work. Idle time
    between two requests counts as rest; unused time is not saved for later.

    Args:
        used_s: Function that returns the processor time of this process so far, in seconds of the
            whole device.

    Attributes:
        fraction: Maximum fraction of the time, in (0, 1]; 1 does not delay work.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        used_s: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fraction = 1.0
        self._now_s = now_s
        self._used_s = used_s or self._device_seconds
        self._sleep = sleep
        self._due_s = 0.0

    def bound(self, fraction: float) -> None:
        """Set the maximum fraction of the device, from now on.

        Raises:
            MigrationError: The fraction is out of range.
        """
        if not 0.0 < fraction <= 1.0:
            raise MigrationError(f"a guest's share is above 0 and at most 1, not {fraction:g}")
        self.fraction = fraction
        self._due_s = 0.0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Wait until one piece of work may begin, and measure the work in this context."""
        self._rest()
        began_s, used_s = self._now_s(), self._used_s()
        try:
            yield
        finally:
            self._due_s = began_s + (self._used_s() - used_s) / self.fraction

    def _rest(self) -> None:
        if self.fraction < 1.0 and (left_s := self._due_s - self._now_s()) > 0:
            self._sleep(left_s)

    def _device_seconds(self) -> float:
        if not torch.cuda.is_initialized():
            return time.process_time() / torch.get_num_threads()
        if self.fraction < 1.0:
            torch.cuda.current_stream().synchronize()  # work has been queued, not done
        return time.perf_counter()


def run_low_priority(work: Callable[[], T]) -> T:
    """Run ``work`` at a low priority and return its result; blocks.

    Linux keeps a priority for each thread and does not allow raising it again, so the thread ends
    with the work. Threads that ``work`` starts inherit the low priority and may outlive the work,
    see ``start_threads``. Only for processes whose other threads have nothing to do meanwhile: a
    thread that waits for the GIL also waits for the low-priority thread to get a core.

    Raises:
        Exception: Any exception of ``work``.
    """
    with ThreadPoolExecutor(1, "giving-way", _give_way) as executor:
        return executor.submit(work).result()


def start_threads(transport: Transport) -> None:
    """Start the threads that serve later at this thread's priority, before low-priority work.

    A transport starts the thread that answers peers with its first offer. Intel's OpenMP lends
    the threads of one caller to the next caller, unless that one has its own already.
    """
    transport.offer(PAGE_BYTES, 0).close()
    torch.zeros(torch.get_num_threads() * _PARALLEL_ELEMENTS).add_(1)


def _give_way() -> None:
    thread = threading.get_native_id()
    try:
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, before + _STEP))
    except OSError as refused:
        logger.warning("what should give way to engines does not: %s", refused)
