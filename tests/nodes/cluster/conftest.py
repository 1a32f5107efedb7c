"""What tests over several hosts compare with: one plain engine on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import small_model
from ports import free_port
from served import OPTIONS
from server_run import Run
from streams import Kind, asked_all


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    words = ("--colocated", "1", "--no-kv-store", "--migration", "off")
    folder = tmp_path_factory.mktemp("plain")
    run = Run(folder, free_port(), (*small_model.options(), *OPTIONS, *words), {}, None)
    run.wait_for("Ctrl-C ends it.")
    yield run
    run.close()


@pytest.fixture(scope="session")
def expected(plain: Run) -> Callable[[dict[str, Kind]], list[list[int]]]:
    """Tokens of one engine."""

    def ask(kinds: dict[str, Kind]) -> list[list[int]]:
        answers = asyncio.run(asked_all(plain, kinds)).values()
        return [answer.tokens[0] for answer in answers]

    return ask
