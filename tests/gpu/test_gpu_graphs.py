"""CUDA graphs that ask something between two segments, captured while other threads use the GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

from banaserve.engine.compat.runner.graphs import beside_other_threads
from banaserve.migration.kv.slabs import no_wait, wait_for
from banaserve.migration.modules.step_graphs import call_in_break

CUDA = torch.device("cuda", 0)
ROWS, WIDTH = 8, 256


class Model:
    """Three layers, of which the second computes on the CPU, for the rows of the batch alone."""

    def __init__(self) -> None:
        draws = torch.Generator(CUDA).manual_seed(1)
        self.weights = [
            torch.randn(WIDTH, WIDTH, device=CUDA, generator=draws) / 16 for _ in range(3)
        ]
        self.num_tokens = ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ self.weights[0])
        hidden, residual = call_in_break(self._away, self._blank, {"hidden": hidden})
        residual += hidden  # in place, as vLLM's kernels add
        return torch.relu(residual @ self.weights[2])

    def _away(self, given: Any) -> Any:
        hidden = given["hidden"][: self.num_tokens]
        there = (hidden.cpu() @ self.weights[1].cpu()).to(CUDA)
        return there, hidden.clone()

    def _blank(self, given: Any) -> Any:
        return torch.zeros_like(given["hidden"]), torch.zeros_like(given["hidden"])


class Busy:
    """A thread that copies and allocates as the store's copies do."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0

    def _run(self) -> None:
        while not self._ends.is_set():
            page = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
            torch.empty(1 << 20, dtype=torch.uint8, device=CUDA).copy_(page)
            wait_for(CUDA)
            self.rounds += 1

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "beside copies"])
def test_a_replay_computes_what_a_call_does(is_shared: bool) -> None:
    model = Model()
    static = torch.randn(ROWS, WIDTH, device=CUDA)
    with torch.inference_mode():
        model(static)
        torch.cuda.synchronize()
        captures = []
        with beside_other_threads():
            if is_shared:
                with Busy() as busy:
                    for _ in range(20):
                        captures.append(_captured(model, static))
                    assert busy.rounds
            else:
                captures.append(_captured(model, static))
        for capture, output in captures[-2:]:
            for num_tokens in (ROWS, 3, ROWS):
                model.num_tokens = num_tokens
                static.normal_()
                capture.replay()
                found = output[:num_tokens].clone()
                model.num_tokens = ROWS
                assert torch.allclose(found, model(static)[:num_tokens], atol=1e-3, rtol=1e-3)


def _captured(model: Model, static: torch.Tensor) -> tuple[BreakableCUDAGraphCapture, torch.Tensor]:
    capture = BreakableCUDAGraphCapture()
    with no_wait(), torch.cuda.stream(torch.cuda.Stream()), capture:
        output = model(static)
    torch.cuda.synchronize()
    return capture, output
