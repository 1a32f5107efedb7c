"""Bounds the share of its device that a guest computes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from banaserve.errors import MigrationError


class DeviceShare:
    """Lets work begin only as often as keeps it within a fraction of the time.

    After c seconds of work the next one begins c / fraction after this one did at the earliest, so
    in any time t a guest computes for ``fraction * t`` and one piece of work more at most. Rest
    that passes while nothing is asked for counts; what is not used is not kept for later.

    Args:
        now_s: Wall time.
        used_s: Processor time so far of all that computes, in seconds of the whole device.
        sleep: Blocks for so many seconds.

    Attributes:
        fraction: In (0, 1]; 1: as it comes.
        busy_s: Processor time of all work.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        used_s: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fraction = 1.0
        self.busy_s = 0.0
        self._now_s = now_s
        self._used_s = used_s or _device_seconds
        self._sleep = sleep
        self._due_s = 0.0

    def bound(self, fraction: float) -> None:
        """Take at most so much of the device from here on.

        Raises:
            MigrationError: Out of range.
        """
        if not 0.0 < fraction <= 1.0:
            raise MigrationError(f"a guest's share is above 0 and at most 1, not {fraction:g}")
        self.fraction = fraction
        self._due_s = 0.0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around one piece of work: waits until it may begin."""
        self._rest()
        began_s, used_s = self._now_s(), self._used_s()
        try:
            yield
        finally:
            took_s = self._used_s() - used_s
            self.busy_s += took_s
            self._due_s = began_s + took_s / self.fraction

    def _rest(self) -> None:
        if self.fraction < 1.0 and (left_s := self._due_s - self._now_s()) > 0:
            self._sleep(left_s)


def _device_seconds() -> float:
    return time.process_time() / torch.get_num_threads()
