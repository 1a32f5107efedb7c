"""A guest computes vLLM's operations with the kernels of its host."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from types import SimpleNamespace
from vllm.config.kernel import IrOpPriorityConfig
from vllm.ir import op
import vllm.kernels
from banaserve.engine.compat.config import adopt_kernels

assert op.IrOp.registry["rms_norm"].get_priority() == []
adopt_kernels(SimpleNamespace(
    kernel_config=SimpleNamespace(
        ir_op_priority=IrOpPriorityConfig.with_default(["native"])
    ),
    compilation_config=SimpleNamespace(ir_enable_torch_wrap=False),
))
print(op.IrOp.registry["rms_norm"].get_priority(), op._ENABLE_TORCH_WRAP)
"""


@pytest.mark.deep
def test_a_guest_takes_the_priorities_of_its_configuration() -> None:
    # They hold for a whole process, so not for the one that runs the tests.
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines()[-1] == "['native'] False"
