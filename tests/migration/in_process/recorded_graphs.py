"""CUDA graphs on a CPU: the operators of a capture are recorded, and a replay runs them again.

vLLM's own code for breakable graphs, its dispatch and its padding run as on a GPU. As there, a
capture computes nothing: its floating-point results are NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = [1, 2, 4, 8, 16, 32]
_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
_STATE = "vllm.distributed.parallel_state"
_BREAKABLE = "vllm.compilation.breakable_cudagraph"


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        before = {_place(one) for one in _tensors((args, kwargs))}
        new = [one for one in _tensors(returned) if _place(one) not in before]
        self.calls.append((func, args, kwargs or {}, new))
        for tensor in new:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return returned


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph:
    """Stand-in for ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, new in self._recorder.calls:
            before = {_place(one) for one in _tensors((args, kwargs))}
            again = [one for one in _tensors(func(*args, **kwargs)) if _place(one) not in before]
            for tensor, values in zip(new, again, strict=True):
                tensor.copy_(values)


@contextlib.contextmanager
def recorded_graphs() -> Iterator[None]:
    """Let the engine that starts within, and as long as it lives, run steps of ``SIZES`` so."""
    from vllm import envs
    from vllm.compilation import breakable_cudagraph
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.layers.attention import attention
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    own: Callable[..., None] = CPUModelRunner.load_model

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> None:
        own(runner, *args, **kwargs)
        compilation = runner.vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        compilation.cudagraph_capture_sizes = list(SIZES)
        compilation.max_cudagraph_capture_size = SIZES[-1]
        runner.model = breakable_cudagraph.BreakableCUDAGraphWrapper(
            runner.model, runner.vllm_config, runtime_mode=CUDAGraphMode.PIECEWISE
        )

    # An engine keeps the environment of its process: the one before this, and this one's.
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        envs.disable_envs_cache()
        stack.callback(envs.disable_envs_cache)
        patch.setenv(_VARIABLE, "1")
        patch.setattr(type(current_platform), "_global_graph_pool", (0, 1))
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(f"{_STATE}.graph_capture", lambda device: contextlib.nullcontext())
        for name in (f"{_BREAKABLE}.weak_ref_tensor", f"{_BREAKABLE}.weak_ref_tensors",
                     "banaserve.engine.compat.runner.graphs.weak_ref_tensor"):  # fmt: skip
            patch.setattr(name, lambda tensor: tensor)
        attend = attention.unified_attention_with_output
        patch.setattr(
            attention,
            "unified_attention_with_output",
            breakable_cudagraph.eager_break_during_capture(attend),
        )
        patch.setattr(CPUModelRunner, "load_model", load_model)
        patch.setattr(CPUModelRunner, "get_model", GPUModelRunner.get_model)
        yield
