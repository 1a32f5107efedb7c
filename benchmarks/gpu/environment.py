"""First stage of the GPU report: whether the libraries load and the GPU computes.

``python -m benchmarks.gpu.environment``. Prints a line a fact and exits with 1 on the first one
that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version

from banaserve.base.errors import UserError
from benchmarks.gpu.device import NULL_GPU
from benchmarks.script import run_script

_TOLERANCE = 0.03
"""Difference of values of about one in bfloat16, which keeps 8 bits."""


def main(argv: Sequence[str]) -> int:
    """Print the facts; raise at the first one that is wrong."""
    import torch

    from banaserve.engine.compat.config import import_kernels

    packages = ("torch", "triton", "transformers", "vllm")
    print(", ".join(f"{name} {version(name)}" for name in packages), flush=True)
    import_kernels()
    device = torch.device("cuda", 0)
    draws = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 64, generator=draws).to(device, torch.bfloat16)
    product = hidden @ hidden.T
    torch.cuda.synchronize()
    print(f"torch multiplies on {torch.cuda.get_device_name(0)}", flush=True)
    ours = torch.empty_like(hidden)
    torch.ops._C.rms_norm(ours, hidden, torch.ones_like(hidden[0]), 1e-5)
    torch.cuda.synchronize()
    if os.environ.get(NULL_GPU):
        print("this GPU computes nothing: values are not compared")
    else:
        exact = hidden.double().cpu()
        _compare("a product of torch", product, exact @ exact.T, 20 * _TOLERANCE)
        norm = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        _compare("RMSNorm of vLLM", ours, norm, _TOLERANCE)
    _load_native()
    return 0


def _load_native() -> None:
    import importlib

    for name in ("_native", "_native_cuda"):
        try:
            importlib.import_module(f"banaserve.{name}")
        except ImportError as error:
            raise UserError(
                f"banaserve.{name} does not load: {error}: build it with BANASERVE_CUDA=1"
            ) from error
    print("banaserve's compiled parts load")


def _compare(what: str, found: object, wanted: object, tolerance: float) -> None:
    import torch

    assert isinstance(found, torch.Tensor)
    assert isinstance(wanted, torch.Tensor)
    difference = float((found.double().cpu() - wanted).abs().max())
    print(f"{what} is off by {difference:.2g}")
    if not difference <= tolerance:
        raise UserError(f"{what} is off by {difference:.2g}, more than {tolerance:g}")


if __name__ == "__main__":
    run_script(main)
