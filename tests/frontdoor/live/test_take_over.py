"""A server is replaced while clients ask it: the new one takes its socket, and no client notices.

Random weights of SmolLM2's shape, float32: both servers give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import small_model
from server_run import Run
from take_over_clients import replaced_unnoticed

pytestmark = pytest.mark.e2e

OPTIONS = (
    *("--pd", "1:1", "--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
    *("--kv-cache-memory-bytes", str(128 << 20), "--kv-store-size", "256MiB"),
    *("--drain-timeout", "120"),  # two servers on a busy machine
)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def on(folder: Path) -> tuple[str, ...]:
    return ("--kv-store-ssd", str(folder), "--kv-store-ssd-size", "1GiB")


@pytest.fixture(scope="module")
def old(serve: Callable[..., Run], disk: Path) -> Run:
    return serve(*OPTIONS, *on(disk / "old"))


@pytest.fixture(scope="module")
def claim(launch: Callable[..., Run], old: Run) -> Callable[..., Run]:
    """Starts a server that is to replace the old one, and returns at once."""

    def start(*options: str, port: int = old.port) -> Run:
        taking = ("--take-over", str(old.run_dir))
        return launch(*small_model.options(), *OPTIONS, *taking, *options, port=port)

    return start


def test_no_client_notices_that_the_server_is_replaced(
    claim: Callable[..., Run], old: Run, disk: Path
) -> None:
    replaced_unnoticed(old, lambda: claim(*on(disk / "new")))
