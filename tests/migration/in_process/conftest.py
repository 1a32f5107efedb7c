"""Engines in this process, stepped by hand, and guests beside them.

A file says as ``ENGINE`` which of ``engines.ENGINES`` it runs on. Files of one engine follow each
other, and share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import ENGINES, Engines
from many_parts import as_many_as_can_be
from rig import GuestParents, Rig, steps

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one engine one after another, in the order of ``ENGINES``."""
    order = {name: place for place, name in enumerate(ENGINES)}
    places = [place for place, item in enumerate(items) if _HERE in item.path.parents]
    ours = [items[place] for place in places]
    ours.sort(key=lambda item: order.get(getattr(item.module, "ENGINE", ""), -1))  # type: ignore[attr-defined]
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def let_pass() -> Callable[..., Any]:
    return steps


@pytest.fixture(scope="session")
def _in_process() -> Iterator[None]:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        # Nobody here has a GPU that a look at a model's class could wake in the wrong process.
        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())
        # As in an engine's own process: its sampler would be compiled at the first logprobs.
        torch.compiler.set_stance("force_eager")
        yield
        torch.compiler.set_stance("default")


@pytest.fixture(scope="session")
def engines(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, _in_process: None
) -> Iterator[Engines]:
    parents = GuestParents(tmp_path_factory.mktemp("guests"))
    folder = tmp_path_factory.mktemp("engines")
    engines = Engines(parents, lambda: request.getfixturevalue("fork_server"), folder)
    yield engines
    engines.close()
    parents.close()


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Rig]:
    """The file's engine, as good as new."""
    rig = engines.take(request.module.ENGINE)
    yield rig
    rig.forget()


@pytest.fixture(scope="module")
def as_many_parts_as_can_be() -> Iterator[None]:
    """Every step has as many parts as it may, cut anywhere."""
    from banaserve.migration.microbatch import overlap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "plan_microbatches", as_many_as_can_be)
        patch.setattr(overlap, "SMALL_TOKENS", 0)
        yield
