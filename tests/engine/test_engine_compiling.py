"""What of an engine on a CPU is compiled: the model where it is to be, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from banaserve.engine.runner_setup import compile_model_alone


@pytest.fixture
def stances(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", taken.append)
    return taken


class CountingRunner:
    def __init__(self, stances: list[str]) -> None:
        self._stances = stances
        self.stances_at_warm_up: list[list[str]] = []

    def warming_up_model(self) -> str:
        self.stances_at_warm_up.append(list(self._stances))
        return "done"


def test_without_compiling_nothing_is_compiled_from_the_start(stances: list[str]) -> None:
    runner_class: type[Any] = type("Runner", (CountingRunner,), {})
    compile_model_alone(runner_class, is_eager=True)
    assert stances == ["force_eager"]
    runner_class(stances).warming_up_model()
    assert stances == ["force_eager"]


def test_nothing_but_the_model_is_compiled(stances: list[str]) -> None:
    runner_class: type[Any] = type("Runner", (CountingRunner,), {})
    compile_model_alone(runner_class, is_eager=False)
    assert stances == []
    runner = runner_class(stances)
    assert runner.warming_up_model() == "done"
    assert runner.stances_at_warm_up == [[]]
    assert stances == ["force_eager"]
