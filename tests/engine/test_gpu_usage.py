"""What NVML says of an instance's GPUs, and what a report says where there is no NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.base.types import InstanceId
from banaserve.engine.compat.front.nvml import NVML
from banaserve.serving.monitoring.gpu_monitor import GpuMeter
from banaserve.serving.monitoring.reports import ReportBoard


class Clock:
    now_s = 10.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Library:
    """NVML over GPUs that are told; the names and the error are those of the real one."""

    NVMLError = NVML.NVMLError

    def __init__(self, busy: dict[str, int]) -> None:
        self.busy = busy
        self.num_asked = 0
        self.is_lost = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.nvmlDeviceGetHandleByUUID(str(index))

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.busy:
            raise NVML.NVMLError(NVML.NVML_ERROR_NOT_FOUND)
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self.num_asked += 1
        if self.is_lost:
            raise NVML.NVMLError(NVML.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(gpu=self.busy[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=20 if handle == "2" else 60, total=80)


def test_the_gpus_of_an_instance_together() -> None:
    clock, library = Clock(), Library({"2": 90, "GPU-7": 50})
    meter = GpuMeter.open("2, GPU-7", clock, library)
    assert meter is not None
    assert meter.read() == pytest.approx((0.7, 0.5))
    library.busy["2"] = 10
    assert meter.read() == pytest.approx((0.7, 0.5))  # a moment later nobody is asked
    assert library.num_asked == 2
    clock.now_s += 1.0
    assert meter.read() == pytest.approx((0.3, 0.5))
    board = ReportBoard(InstanceId("p0"), clock, 2048, meter)
    board.answered(idle=True)
    assert board.last is not None
    assert (board.last.gpu_busy_fraction, board.last.gpu_memory_fraction) == (0.3, 0.5)


def test_a_gpu_that_is_lost_is_left_out_from_then_on() -> None:
    clock, library = Clock(), Library({"0": 90})
    meter = GpuMeter.open("0", clock, library)
    assert meter is not None
    library.is_lost = True
    assert meter.read() is None
    clock.now_s += 1.0
    library.is_lost = False
    assert meter.read() is None


@pytest.mark.parametrize("devices", ["", "5", "GPU-none"])
def test_without_a_gpu_that_nvml_knows_there_is_no_meter(devices: str) -> None:
    assert GpuMeter.open(devices, Clock(), Library({"0": 1})) is None


def test_without_nvml_the_report_says_nothing_of_gpus() -> None:
    try:
        NVML.nvmlInit()
    except NVML.NVMLError:
        assert GpuMeter.open("0", Clock()) is None
    board = ReportBoard(InstanceId("p0"), Clock(), 2048, None)
    board.answered(idle=True)
    assert board.last is not None
    assert board.last.gpu_busy_fraction is None
    assert board.last.busy_fraction == 0.0
