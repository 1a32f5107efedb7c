"""vLLM's breakable CUDA graphs: steps captured in segments, with eager breaks between them.

The graphs hold the model uncompiled. vLLM itself breaks them at each attention; this module adds
breaks, and lets graphs be captured while the engine serves.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from vllm.compilation import monitor
from vllm.compilation.breakable_cudagraph import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    is_breakable_cudagraph_enabled,
)
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.utils.torch_utils import weak_ref_tensor

from banaserve.engine.compat.runner.hooks import Call, wrap_call


def are_breakable() -> bool:
    """Return whether engines with this environment capture graphs of the uncompiled model."""
    return bool(is_breakable_cudagraph_enabled())


def capture_under_way() -> BreakableCUDAGraphCapture | None:
    """Return the capture that records this thread's kernels now; None if they run at once."""
    capture = BreakableCUDAGraphCapture.current()
    return capture if capture is not None and capture._capturing else None


def weakly(value: Any) -> Any:
    """Return a tensor over the same memory that does not keep it; other values as they are.

    For tensors of a graph, whose memory stays, but is used again by later tensors of the graph.
    """
    return weak_ref_tensor(value)


class RunnerGraphs(ABC):
    """Piecewise graphs of a model runner, by their number of tokens."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    @abstractmethod
    def _wrapper(self) -> BreakableCUDAGraphWrapper | None:
        """Return the object that captures and replays; None if it has not been made."""

    @abstractmethod
    def gate(self, may_replay: Callable[[int], bool]) -> None:
        """Let a step run without a graph if ``may_replay(num_tokens)`` of its graph is False."""

    @abstractmethod
    def _capture(self, num_tokens: int) -> None:
        """Capture a graph; attention gets no metadata meanwhile, as in a batch without requests."""

    def sizes(self) -> set[int]:
        """Return the numbers of tokens of the captured graphs."""
        entries: Mapping[Any, Any] = {} if self._wrapper is None else self._wrapper.entries
        return {batch.num_tokens for batch, one in entries.items() if one.capture is not None}

    def exchange(self, graphs: dict[Any, Any]) -> dict[Any, Any]:
        """Put ``graphs`` in place of the captured ones, which are returned."""
        wrapper = self._wrapper
        if wrapper is None:
            return {}
        before: dict[Any, Any] = wrapper.entries
        wrapper.entries = graphs
        return before

    def capture(self, num_tokens: int) -> None:
        """Capture a graph of the modules that the model has now; call between two steps.

        Waits for the device before and after.
        """
        before = monitor.cudagraph_capturing_enabled
        torch.accelerator.synchronize()
        monitor.set_cudagraph_capturing_enabled(True)
        try:
            with _no_collection(), beside_other_threads(), torch.inference_mode():
                self._capture(num_tokens)
        finally:
            monitor.set_cudagraph_capturing_enabled(before)
            torch.accelerator.synchronize()


class FirstRunnerGraphs(RunnerGraphs):
    """Graphs of vLLM's first model runner, which wraps its model."""

    @property
    def _wrapper(self) -> BreakableCUDAGraphWrapper | None:
        model = self._runner.model
        while model is not None and not isinstance(model, BreakableCUDAGraphWrapper):
            model = vars(model).get("runnable")
        return model

    def gate(self, may_replay: Callable[[int], bool]) -> None:
        def dispatch(call: Call, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            mode, batch = call(num_tokens, *args, **kwargs)
            if mode != CUDAGraphMode.PIECEWISE or may_replay(batch.num_tokens):
                return mode, batch
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)

        wrap_call(self._runner.cudagraph_dispatcher, "dispatch", dispatch)

    def _capture(self, num_tokens: int) -> None:
        from vllm.distributed.parallel_state import graph_capture

        with graph_capture(device=self._runner.device):
            self._runner._warmup_and_capture(
                BatchDescriptor(num_tokens), cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE
            )


class SecondRunnerGraphs(RunnerGraphs):
    """Graphs of vLLM's second model runner, which a manager keeps."""

    @property
    def _wrapper(self) -> BreakableCUDAGraphWrapper | None:
        found: BreakableCUDAGraphWrapper | None = self._runner.cudagraph_manager.breakable_cg_runner
        return found

    def gate(self, may_replay: Callable[[int], bool]) -> None:
        from dataclasses import replace

        def dispatch(call: Call, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            batch = call(num_reqs, num_tokens, *args, **kwargs)
            if batch.cg_mode != CUDAGraphMode.PIECEWISE or may_replay(batch.num_tokens):
                return batch
            return replace(
                batch, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
            )

        wrap_call(self._runner.cudagraph_manager, "dispatch", dispatch)

    def _capture(self, num_tokens: int) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils

        runner, manager = self._runner, self._runner.cudagraph_manager
        mode = CUDAGraphMode.PIECEWISE
        wanted = [one for one in manager._capture_descs[mode] if one.num_tokens == num_tokens]
        prepare = cudagraph_utils.prepare_inputs_to_capture

        def without_metadata(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            return cudagraph_utils.AttentionState(None, prepared.slot_mappings)

        with (
            mock.patch.object(manager, "_capture_descs", {mode: wanted}),
            mock.patch.object(cudagraph_utils, "prepare_inputs_to_capture", without_metadata),
            mock.patch.object(cudagraph_utils, "tqdm", lambda batches, **_: batches),
        ):
            manager.capture(
                runner.model,
                runner.model_state,
                runner.input_buffers,
                runner.intermediate_tensors,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
            )


def graphs_of(runner: Any) -> RunnerGraphs | None:
    """Return the graphs of a runner; None if it captures none, or compiled ones."""
    mode = runner.vllm_config.compilation_config.cudagraph_mode
    if not are_breakable() or mode != CUDAGraphMode.PIECEWISE:
        return None
    if runner.vllm_config.use_v2_model_runner:
        return SecondRunnerGraphs(runner)
    return FirstRunnerGraphs(runner)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Capture without the garbage collection and the emptied caches with which vLLM precedes it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _begin_segment(capture: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=capture.pool, capture_error_mode="thread_local")
    capture._current_graph = graph
    capture._capturing = True


def beside_other_threads() -> Any:
    """Let other threads go on using the device during a capture.

    The mode of vLLM's captures, which all precede the first request, refuses what the store's
    copies do meanwhile.
    """
    return mock.patch.object(BreakableCUDAGraphCapture, "_begin_segment", _begin_segment)
