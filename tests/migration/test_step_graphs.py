"""CUDA graphs of the modules that a model has now, and what a graph calls in between."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.compilation import breakable_cudagraph
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from banaserve.engine.compat.runner import graphs as compat
from banaserve.engine.compat.runner.experts import join_shared_experts
from banaserve.migration.modules.layer_proxy import without_padding
from banaserve.migration.modules.step_graphs import (
    WANTED_STEPS,
    StepGraphs,
    call_in_break,
    is_capturing,
)


class Captured:
    """Graphs of a runner: names in place of what vLLM captures."""

    def __init__(self, *sizes: int) -> None:
        self.now: dict[Any, Any] = dict.fromkeys(sizes, "at home")
        self.may_replay: Callable[[int], bool] = lambda _: False
        self.fails = False

    def sizes(self) -> set[int]:
        return set(self.now)

    def exchange(self, graphs: dict[Any, Any]) -> dict[Any, Any]:
        before, self.now = self.now, graphs
        return before

    def gate(self, may_replay: Callable[[int], bool]) -> None:
        self.may_replay = may_replay

    def capture(self, num_tokens: int) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        assert self.may_replay(num_tokens), "the capture is dispatched as a step is"
        self.now[num_tokens] = "away"


def lack(captured: Captured, size: int, steps: int, graphs: StepGraphs) -> list[bool]:
    """Whether each of some steps replays a graph."""
    found = []
    for _ in range(steps):
        graphs.capture_wanted()
        found.append(captured.may_replay(size))
    return found


def test_graphs_are_captured_once_steps_lack_them_and_kept_at_home() -> None:
    captured = Captured(4, 8)
    graphs = StepGraphs(captured)  # type: ignore[arg-type]
    assert lack(captured, 4, 2, graphs) == [True, True]
    graphs.replace({"m1"})
    assert lack(captured, 4, WANTED_STEPS + 2, graphs) == [False] * WANTED_STEPS + [True, True]
    assert lack(captured, 8, 1, graphs) == [False]
    graphs.replace({"m1"})
    assert captured.now == {4: "away"}, "another guest has the same module"
    graphs.replace({"m1", "m2"})
    assert captured.now == {}
    graphs.replace({"m2"})
    assert captured.now == {}
    graphs.replace(set())
    assert captured.now == {4: "at home", 8: "at home"}
    assert (graphs.sizes, graphs.num_captured) == ([4, 8], 1)


def test_a_capture_that_fails_is_not_tried_again_until_modules_move() -> None:
    captured = Captured(4)
    graphs = StepGraphs(captured)  # type: ignore[arg-type]
    graphs.replace({"m1"})
    captured.fails = True
    assert not any(lack(captured, 4, 3 * WANTED_STEPS, graphs))
    captured.fails = False
    assert not any(lack(captured, 4, WANTED_STEPS + 1, graphs))
    graphs.replace({"m1", "m2"})
    assert lack(captured, 4, WANTED_STEPS + 1, graphs)[-1]


def test_both_runners_run_a_step_without_its_graph() -> None:
    first = SimpleNamespace(
        cudagraph_dispatcher=SimpleNamespace(
            dispatch=lambda num_tokens, **_: (CUDAGraphMode.PIECEWISE, BatchDescriptor(8))
        )
    )
    replays: list[int] = []
    compat.FirstRunnerGraphs(first).gate(lambda size: size in replays)
    assert first.cudagraph_dispatcher.dispatch(num_tokens=5, uniform_decode=True) == (
        CUDAGraphMode.NONE,
        BatchDescriptor(5),
    )

    def dispatch(num_reqs: int, num_tokens: int, *_: Any, **__: Any) -> BatchExecutionDescriptor:
        return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None)

    second = SimpleNamespace(cudagraph_manager=SimpleNamespace(dispatch=dispatch))
    compat.SecondRunnerGraphs(second).gate(lambda size: size in replays)
    found = second.cudagraph_manager.dispatch(2, 5, None, 0)
    assert found == BatchExecutionDescriptor(CUDAGraphMode.NONE, 5, 2)
    replays.append(8)
    assert first.cudagraph_dispatcher.dispatch(num_tokens=5)[1].num_tokens == 8
    assert second.cudagraph_manager.dispatch(2, 5, None, 0).num_tokens == 8


class Nothing:
    """A CUDA graph that holds nothing."""

    def capture_begin(self, **_: Any) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


def test_a_break_fills_the_same_tensors_at_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Nothing)
    monkeypatch.setattr(compat, "weak_ref_tensor", lambda tensor: tensor)
    source, num_rows, calls = torch.ones(4, 2), [4], [0]

    def double(given: Any) -> Any:
        calls[0] += 1
        return 2 * given["x"][: num_rows[0]], None

    def blank(given: Any) -> Any:
        return torch.zeros_like(given["x"]), torch.zeros(4)

    assert torch.equal(call_in_break(double, blank, {"x": source})[0], 2 * source)
    capture = BreakableCUDAGraphCapture()
    with capture:
        assert is_capturing()
        output, nothing = call_in_break(double, blank, {"x": source})
    assert calls == [1], "in the capture no tensor has values yet"
    assert breakable_cudagraph.BreakableCUDAGraphCapture.current() is None
    capture.replay()
    assert torch.equal(output, torch.full((4, 2), 2.0))
    source.fill_(3)
    num_rows[0] = 3
    capture.replay()
    assert torch.equal(output[:3], torch.full((3, 2), 6.0))
    assert not output[3:].any(), "rows of padding"
    assert not nothing.any()


def test_shared_experts_on_another_stream_are_joined_before_a_break() -> None:
    waits: list[str] = []

    class Shared:
        order = SharedExpertsOrder.MULTI_STREAM_OVERLAPPED

        def _determine_shared_experts_order(self, x: torch.Tensor) -> SharedExpertsOrder:
            return self.order

        def wait(self) -> None:
            waits.append("joined")

    shared = Shared()
    for _ in range(2):
        waits.clear()
        join_shared_experts(shared, torch.ones(1))
        assert waits == ["joined"]
        shared.wait()
        assert waits == ["joined"], "as vLLM does after the routed experts"
    shared.wait()
    assert waits == ["joined", "joined"], "its own again"
    shared.order = SharedExpertsOrder.NO_OVERLAP
    join_shared_experts(shared, torch.ones(1))
    join_shared_experts(None, None)
    assert waits == ["joined", "joined"]


def test_a_guest_gets_the_rows_of_the_batch() -> None:
    hidden = torch.arange(32.0).view(8, 4)
    given = {
        "hidden_states": hidden,
        "residual": None,
        "positions": torch.arange(8),
        "by_axis": torch.arange(24).view(3, 8),
        "square": torch.arange(64).view(8, 8),
        "scale": torch.ones(()),
        "factor": 2.0,
    }
    assert without_padding(given, 8) is given
    cut = without_padding(given, 5)
    assert torch.equal(cut["hidden_states"], hidden[:5])
    assert cut["positions"].tolist() == [0, 1, 2, 3, 4]
    assert cut["by_axis"].shape == (3, 5)
    assert cut["square"].shape == (8, 5), "positions by axis: the tokens come last"
    assert (cut["residual"], cut["factor"], cut["scale"].item()) == (None, 2.0, 1.0)
