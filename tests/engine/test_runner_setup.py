"""Runners are changed in every process that has one, the workers' own among them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.deep


# What a worker's process does: import the extension by its name, then make the device.
WORKER = """
from types import SimpleNamespace

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import WorkerWrapperBase

from banaserve.engine.engine_args import WORKER_EXTENSION

own, tensors = CPUModelRunner._update_states, CPUModelRunner.initialize_kv_cache_tensors
resolve_obj_by_qualname(WORKER_EXTENSION)
before = CPUModelRunner._update_states is own
wrapper = SimpleNamespace(
    vllm_config=SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True),
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={"banaserve_migration": {}},
        use_v2_model_runner=False,
    ),
    worker=SimpleNamespace(init_device=lambda: None),
)
WorkerWrapperBase.init_device(wrapper)
once = CPUModelRunner._update_states
WorkerWrapperBase.init_device(wrapper)
moves = CPUModelRunner.initialize_kv_cache_tensors is not tensors
print(before, once is not own, CPUModelRunner._update_states is once, moves)
"""


@pytest.mark.room
def test_a_spawned_worker_takes_requests_that_bring_output() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", WORKER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True True True True"
