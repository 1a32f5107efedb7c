"""Which CUDA graphs the engines of a server capture on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from banaserve.contracts.environment import GRAPHS_VARIABLE
from banaserve.engine import cuda_graphs
from banaserve.engine.engine_args import parse_vllm_argv


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "is_on_cpu", lambda: False)
    monkeypatch.delenv(GRAPHS_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("options", "variable", "chosen"),
    [
        ((), None, True),
        ((), "0", False),
        ((), "1", False),
        (("--enforce-eager",), None, False),
        (("-cc.mode=3",), None, False),
        (("-cc.mode=0",), None, True),
        (("-cc.cudagraph_mode=FULL_DECODE_ONLY",), None, False),
        (("-cc.cudagraph_mode=PIECEWISE",), None, True),
        (("-cc.cudagraph_mode=NONE",), None, True),
    ],
)
def test_the_users_own_choice_stays(
    options: tuple[str, ...],
    variable: str | None,
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(GRAPHS_VARIABLE, variable)
    args = parse_vllm_argv(["--model", "m", *options])
    assert cuda_graphs.choose_graphs(args) is chosen


@pytest.mark.parametrize(
    ("options", "variable", "mode"),
    [
        ((), "1", CUDAGraphMode.PIECEWISE),
        ((), "0", None),
        (("-cc.cudagraph_mode=FULL",), "1", CUDAGraphMode.FULL),
        (("--enforce-eager",), "1", None),
    ],
)
def test_no_step_is_captured_as_a_whole(
    options: tuple[str, ...],
    variable: str,
    mode: CUDAGraphMode | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GRAPHS_VARIABLE, variable)
    args = parse_vllm_argv(["--model", "m", *options])
    cuda_graphs.break_at_attention(args)
    assert args.compilation_config.cudagraph_mode == mode
