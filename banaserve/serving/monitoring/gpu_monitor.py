"""GPU usage of an instance by NVML, if available: for people, in addition to our own counts.

The busy fraction is the share of time with any kernel running, so that an engine with one request
looks as busy as a full one; decisions rely on the steps that the worker measures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from banaserve.base.clock import Clock
from banaserve.engine.compat.front.nvml import NVML

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
"""Minimum time between two queries, in seconds.

NVML updates its values no more often, and a query takes up to a millisecond.
"""


class GpuUsage(NamedTuple):
    """Usage of all GPUs of an instance, both values in [0, 1].

    Attributes:
        busy_fraction: Mean share of time with a kernel running.
        memory_fraction: Share of memory in use, by any process.
    """

    busy_fraction: float
    memory_fraction: float


class GpuMeter:
    """Meter of some GPUs, at least one, which queries NVML at most twice a second."""

    def __init__(self, handles: Sequence[Any], clock: Clock, nvml: Any = NVML) -> None:
        self._handles = handles
        self._clock = clock
        self._nvml = nvml
        self._last: GpuUsage | None = None
        self._next_s = clock.now()

    @classmethod
    def open(cls, devices: str, clock: Clock, nvml: Any = NVML) -> Self | None:
        """Return a meter of ``devices``, as CUDA_VISIBLE_DEVICES names them.

        Returns None if there are no devices, or if NVML fails.
        """
        names = [name.strip() for name in devices.split(",") if name.strip()]
        if not names:
            return None
        try:
            nvml.nvmlInit()
            return cls([_handle(name, nvml) for name in names], clock, nvml)
        except nvml.NVMLError as error:
            logger.info("GPUs %s are not read: %s", devices, error)
            return None

    def read(self) -> GpuUsage | None:
        """Return the present usage of the GPUs; None from the first failure of NVML on."""
        now_s = self._clock.now()
        if self._handles and now_s >= self._next_s:
            self._next_s = now_s + _PERIOD_S
            try:
                busy = [self._nvml.nvmlDeviceGetUtilizationRates(one).gpu for one in self._handles]
                memory = [self._nvml.nvmlDeviceGetMemoryInfo(one) for one in self._handles]
                used, total = sum(one.used for one in memory), sum(one.total for one in memory)
                self._last = GpuUsage(sum(busy) / (100 * len(busy)), used / total)
            except self._nvml.NVMLError as error:
                logger.warning("an instance's GPUs are not read any more: %s", error)
                self._handles, self._last = (), None
        return self._last


def _handle(name: str, nvml: Any) -> Any:
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
