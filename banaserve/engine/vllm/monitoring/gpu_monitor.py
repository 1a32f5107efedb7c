"""GPU figures of an instance by NVML, where there is NVML: for people, beside our own counts.

The busy fraction is the share of time with any kernel running, so that an engine with one request
looks as busy as a full one; decisions count on the steps that the worker measures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from banaserve.clock import Clock
from banaserve.engine.vllm.compat.nvml import NVML

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
"""NVML's own figures are no newer, and asking takes up to a millisecond."""


class GpuUsage(NamedTuple):
    """Of all GPUs of an instance, both in [0, 1].

    Attributes:
        busy_fraction: Mean share of time with a kernel running.
        memory_fraction: Memory in use, by whomever.
    """

    busy_fraction: float
    memory_fraction: float


class GpuMeter:
    """Asks NVML about some GPUs, twice a second at most.

    Args:
        handles: NVML's, at least one.
        nvml: The bindings.
    """

    def __init__(self, handles: Sequence[Any], clock: Clock, nvml: Any = NVML) -> None:
        self._handles = handles
        self._clock = clock
        self._nvml = nvml
        self._last: GpuUsage | None = None
        self._next_s = clock.now()

    @classmethod
    def open(cls, devices: str, clock: Clock, nvml: Any = NVML) -> Self | None:
        """Returns a meter of ``devices``, or None where there is no GPU or NVML knows none of it.

        Args:
            devices: As in CUDA_VISIBLE_DEVICES: numbers or UUIDs; empty for none.
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
        """What the GPUs do at present; None from the moment on at which NVML cannot say."""
        now_s = self._clock.now()
        if self._handles and now_s >= self._next_s:
            self._next_s = now_s + _PERIOD_S
            try:
                self._last = self._ask()
            except self._nvml.NVMLError as error:
                logger.warning("an instance's GPUs are not read any more: %s", error)
                self._handles, self._last = (), None
        return self._last

    def _ask(self) -> GpuUsage:
        busy = [self._nvml.nvmlDeviceGetUtilizationRates(one).gpu for one in self._handles]
        memory = [self._nvml.nvmlDeviceGetMemoryInfo(one) for one in self._handles]
        used, total = sum(one.used for one in memory), sum(one.total for one in memory)
        return GpuUsage(sum(busy) / (100 * len(busy)), used / total)


def _handle(name: str, nvml: Any) -> Any:
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
