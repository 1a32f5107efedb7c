"""Fixtures of folders whose servers have mock engines: the usual calls start those there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fork_server import ForkServer
from mock_run import MockRun, mock_launching, mock_serving

__all__ = ["launch", "serve"]


@pytest.fixture(scope="module")
def launch(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> Iterator[Callable[..., MockRun]]:
    """``launch(*options, port=, env=, mocks=)`` starts a run and returns at once."""
    yield from mock_launching(tmp_path_factory, fork_server)


@pytest.fixture(scope="module")
def serve(launch: Callable[..., MockRun]) -> Callable[..., MockRun]:
    """``serve(*options, port=, env=, mocks=)`` starts a small server; returns when it serves."""
    return mock_serving(launch)
