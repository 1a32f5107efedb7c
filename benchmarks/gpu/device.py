"""Facts of this machine: GPU, driver, torch and vLLM, and whether the report can run on them."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec

from banaserve.base.errors import UserError
from benchmarks.location import environment

NULL_GPU = "BANASERVE_NULL_GPU"
"""Variable that says that the GPU computes nothing: values are then not compared."""
_TIMEOUT_S = 120.0
_LEAST_BYTES = {"tiny": 4 << 30, "tiny-moe": 4 << 30, "1b": 16 << 30, "8b": 50 << 30}
"""Free GPU memory for two instances and a guest beside each other, by the size of the model."""
_PROBE = """
import ctypes, importlib.util, json
facts = {}
try:
    import torch
except ImportError:
    torch = None
if torch is not None:
    facts["torch"] = torch.__version__
    facts["torch_cuda"] = torch.version.cuda or ""
try:
    driver = ctypes.CDLL("libcuda.so.1")
    found = ctypes.c_int()
    if driver.cuInit(0) == 0 and driver.cuDriverGetVersion(ctypes.byref(found)) == 0:
        facts["driver_cuda"] = f"{found.value // 1000}.{found.value % 1000 // 10}"
except OSError:
    pass
if torch is not None and torch.version.cuda and torch.cuda.is_available():
    facts["gpu"] = torch.cuda.get_device_name(0)
    facts["architecture"] = int("".join(map(str, torch.cuda.get_device_capability(0))))
    facts["free_bytes"] = torch.cuda.mem_get_info(0)[0]
if importlib.util.find_spec("vllm") is not None:
    import vllm
    facts["vllm"] = vllm.__version__
    facts["vllm_library"] = importlib.util.find_spec("vllm._C_stable_libtorch") is not None
print(json.dumps(facts))
"""


class DeviceFacts(msgspec.Struct, frozen=True):
    """Facts of this machine, read by a process that has ended.

    Attributes:
        torch_cuda: CUDA version that torch was built for; empty for none.
        driver_cuda: Newest CUDA version that the driver runs; empty without a driver.
        architecture: Compute capability times ten.
        vllm: Version of vLLM; empty if it is not installed.
        vllm_library: True if vLLM was built for GPUs.
    """

    torch: str = ""
    torch_cuda: str = ""
    driver_cuda: str = ""
    gpu: str = ""
    architecture: int = 0
    free_bytes: int = 0
    vllm: str = ""
    vllm_library: bool = False

    @property
    def words(self) -> str:
        return (
            f"{self.gpu} ({self.free_bytes / 2**30:.0f} GiB free, driver for CUDA "
            f"{self.driver_cuda}), torch {self.torch}, vLLM {self.vllm}"
        )


def read_facts() -> DeviceFacts:
    """Return the facts of this machine.

    Raises:
        UserError: torch or vLLM cannot be imported.
    """
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment()
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"torch and vLLM are not imported within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"torch or vLLM cannot be imported: {last[0]}")
    return msgspec.convert(json.loads(done.stdout.strip().splitlines()[-1]), DeviceFacts)


def check(facts: DeviceFacts, size: str, kit_gpus: tuple[int, ...]) -> None:
    """Refuse a machine on which the report cannot run.

    Args:
        size: Size of the random weights.
        kit_gpus: Architectures that the kit has code for; empty without a kit.

    Raises:
        UserError: The machine is refused; the message says what to do.
    """
    if not facts.torch:
        raise UserError("torch is not installed for this Python: name another in GPU_PYTHON")
    if not facts.torch_cuda:
        raise UserError(
            f"torch {facts.torch} is built without CUDA: name a Python with torch for CUDA in "
            "GPU_PYTHON"
        )
    if not facts.driver_cuda:
        raise UserError("no NVIDIA driver is seen here: `nvidia-smi` has to name a GPU")
    if int(facts.driver_cuda.split(".")[0]) < int(facts.torch_cuda.split(".")[0]):
        raise UserError(
            f"the driver runs CUDA {facts.driver_cuda} at most and torch {facts.torch} needs "
            f"{facts.torch_cuda}: install a newer driver, or torch for an older CUDA"
        )
    if not facts.gpu:
        raise UserError("torch sees no GPU: is CUDA_VISIBLE_DEVICES empty?")
    if not facts.vllm:
        raise UserError("vLLM is not installed: bring a kit along (`make gpu-kit`), or install it")
    if not facts.vllm_library:
        raise UserError(
            f"vLLM {facts.vllm} is built for CPUs, so nothing would run on the {facts.gpu}: name "
            "another Python in GPU_PYTHON"
        )
    if kit_gpus and facts.architecture not in kit_gpus:
        built = " and ".join(map(str, kit_gpus))
        raise UserError(
            f"the kit has code for architecture {built} and the {facts.gpu} is "
            f"{facts.architecture}: build it with `make gpu-kit ARGS='--gpu {facts.architecture}'`"
        )
    if facts.free_bytes < (needed := _LEAST_BYTES[size]):
        raise UserError(
            f"two engines of --size {size} need {needed >> 30} GiB and the {facts.gpu} has "
            f"{facts.free_bytes / 2**30:.1f} GiB free: end what uses it, or choose --size tiny"
        )
