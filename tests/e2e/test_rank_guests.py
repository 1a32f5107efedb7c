"""Modules of engines of two tensor-parallel ranks, in a guest of two processes of which one fails.

Whatever becomes of one of them, both ranks have the modules in the same place, and no answer
changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import random_models
from banaserve.api.admin_client import AdminClient
from banaserve.engine.vllm.migration.api import (
    Migration,
    MigrationRequest,
    MoveContext,
    MoveExperts,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.errors import UserError
from banaserve.fail_points import VARIABLE, FailPoint
from banaserve.run_dir import find_admin
from observing import until
from reference import reference_tokens
from server_run import ForkServer, Run
from streams import Answer, Kind, asked, connected

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 300
NUM_STREAMS = 3
LENGTHS = (40, 100, 180)
LAYERS = MoveLayers("d0", "p0", (1, 3))
OLDER_BLOCKS = MoveContext("d0", "p0", (0, 3))
EXPERTS = MoveExperts("d0", "p0", {1: (0, 2), 2: (1,)})
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return random_models.make("qwen3_moe", folder, head_dim=64)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(23)
    return [random.integers(100, 40_000, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(fork_server: ForkServer, model: str, prompts: list[list[int]]) -> list[list[int]]:
    """Of one engine of one rank."""
    sampling = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return reference_tokens(fork_server, model, prompts, {"it": sampling})["it"]


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points")


@pytest.fixture(autouse=True)
def disarmed(points: Path) -> Iterator[None]:
    """What one test has not come by fails in no other."""
    yield
    for left in points.iterdir():
        left.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], model: str, points: Path) -> Iterator[Run]:
    run = serve(
        *("--pd", "1:1", "--model", model, "--served-model-name", "m", "--dtype", "float32"),
        *("--tensor-parallel-size", "2", "--max-model-len", "1024", "--migration-poison"),
        *("--kv-cache-memory-bytes", str(96 << 20), "--kv-store-size", "256MiB"),
        env={VARIABLE: str(points)},
    )
    yield run
    assert run.end() == 0


@pytest.fixture
def admin(server: Run) -> Iterator[AdminClient]:
    client = AdminClient(*find_admin(server.run_dir))
    yield client
    home(client)  # whatever a test has left away is not the next one's


class Streams:
    """Asks for the same answers again and again, in a thread, until the end of its block."""

    def __init__(self, server: Run, prompts: list[list[int]]) -> None:
        self._server = server
        self._bodies = [
            {
                "model": "m",
                "prompt": prompt,
                "temperature": 0.0,
                "ignore_eos": True,
                "max_tokens": OUTPUT_TOKENS,
                "stream": True,
                "return_token_ids": True,
            }
            for prompt in prompts
        ]
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._asking: Future[None] | None = None
        self.answers: list[tuple[int, Answer]] = []

    def __enter__(self) -> Streams:
        self._asking = self._pool.submit(lambda: asyncio.run(self._ask_all()))
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        assert self._asking is not None
        self._asking.result()
        self._pool.shutdown()

    def comes_to(self, count: int) -> None:
        """Return when so many have been answered."""
        assert self._asking is not None
        asking = self._asking
        until(lambda: len(self.answers) >= count or asking.done(), f"{count} answers")
        assert not asking.done(), asking.exception()

    def goes_on(self) -> None:
        """Return when each stream has ended once more, and one begun."""
        self.comes_to(len(self.answers) + 2 * NUM_STREAMS)

    async def _ask_all(self) -> None:
        async with connected(self._server) as client:
            await asyncio.gather(*(self._ask(client, n) for n in range(NUM_STREAMS)))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._ends.is_set():
            kind = Kind("/v1/completions", self._bodies[number])
            self.answers.append((number, await asked(client, kind)))

    def check(self, expected: list[list[int]]) -> None:
        assert len(self.answers) >= NUM_STREAMS
        for number, answer in self.answers:
            assert answer.error == ""
            assert answer.tokens[0] == expected[number]


def move(admin: AdminClient, ask: MigrationRequest) -> Migration:
    migration = admin.run(ask)
    assert (migration.state, migration.error) == ("done", "")
    return migration


def units(admin: AdminClient) -> list[str]:
    return [unit.words for one in admin.placement().instances for unit in one.units]


def home(admin: AdminClient) -> None:
    def is_home() -> bool:
        with contextlib.suppress(UserError):
            admin.run(Return("d0"))
        with contextlib.suppress(UserError):
            return units(admin) == []
        return False

    until(is_home, "everything is at home")


def test_layers_go_and_come_home(
    server: Run, admin: AdminClient, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Streams(server, prompts) as streams:
        streams.comes_to(1)
        gone = move(admin, LAYERS)
        streams.goes_on()
        (guest,) = admin.placement().guests
        assert len(guest.pids) == 2
        back = move(admin, Return("d0"))
        streams.goes_on()
    streams.check(expected)
    # Half of the layers' KV was given back, of both ranks.
    assert gone.moves[0].facts["freed_bytes"] == gone.moves[0].facts["predicted_bytes"] == 96 << 20
    assert gone.blocks_gained == -back.blocks_gained > 0
    assert server.metric("banaserve_migration_lost_steps_total") == 0


@pytest.mark.parametrize("ask", [OLDER_BLOCKS, EXPERTS], ids=["older_blocks", "experts"])
def test_other_modules_go_and_come_home(
    server: Run,
    admin: AdminClient,
    prompts: list[list[int]],
    expected: list[list[int]],
    ask: MigrationRequest,
) -> None:
    lost = server.metric("banaserve_migration_lost_steps_total")
    with Streams(server, prompts) as streams:
        streams.comes_to(1)
        move(admin, ask)
        streams.goes_on()
        assert len(units(admin)) == 1
        move(admin, Return("d0"))
        streams.goes_on()
    streams.check(expected)
    assert server.metric("banaserve_migration_lost_steps_total") == lost


@pytest.mark.parametrize(
    ("point", "how"),
    [
        (FailPoint.GUEST_BUILD, "kill"),
        (FailPoint.GUEST_ACTIVATE, "kill"),
        (FailPoint.GUEST_ACTIVATE, "error"),
        (FailPoint.MOVE_PREPARE, "kill"),
        (FailPoint.MOVE_COMMIT, "kill"),
    ],
)
def test_one_of_two_fails_while_layers_go(
    server: Run,
    admin: AdminClient,
    points: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    point: FailPoint,
    how: str,
) -> None:
    with Streams(server, prompts) as streams:
        streams.comes_to(1)
        (points / point).write_text(how)
        with contextlib.suppress(UserError):
            assert admin.run(LAYERS).state != "done"
        assert list(points.iterdir()) == []
        until(lambda: server.metric("banaserve_instance_ready", instance_id="d0") == 1, "it serves")
        home(admin)
        streams.goes_on()
        move(admin, LAYERS)
        streams.goes_on()
        move(admin, Return("d0"))
    streams.check(expected)


@pytest.mark.parametrize(
    ("ask", "how", "nth"),
    [
        pytest.param(LAYERS, "kill", 1, id="layers-kill-1"),
        pytest.param(LAYERS, "stop", 20, id="layers-stop-20"),
        pytest.param(LAYERS, "error", 30, id="layers-error-30"),
        pytest.param(OLDER_BLOCKS, "kill", 40, id="older_blocks-kill-40"),
        pytest.param(OLDER_BLOCKS, "error", 2, id="older_blocks-error-2"),
        pytest.param(EXPERTS, "stop", 10, id="experts-stop-10"),
        pytest.param(EXPERTS, "kill", 3, id="experts-kill-3"),
    ],
)
def test_one_of_two_fails_in_a_step(
    server: Run,
    admin: AdminClient,
    points: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    ask: MigrationRequest,
    how: str,
    nth: int,
) -> None:
    lost = server.metric("banaserve_guests_lost_total", instance_id="d0")
    with Streams(server, prompts) as streams:
        streams.comes_to(1)
        move(admin, ask)
        (points / FailPoint.GUEST_RUN).write_text(f"{how} {nth}")
        until(lambda: not list(points.iterdir()), "one of them fails")
        until(lambda: units(admin) == [], "all is at home")
        streams.goes_on()
        move(admin, ask)
        streams.goes_on()
        move(admin, Return("d0"))
    streams.check(expected)
    assert server.metric("banaserve_guests_lost_total", instance_id="d0") == lost + 1


def test_heads_are_refused_with_the_reason(admin: AdminClient) -> None:
    told = admin.run(MoveHeads("d0", "p0", {1: (0,)}))
    assert (told.state, units(admin)) == ("failed", [])
    assert "each is on one of the tensor-parallel ranks" in told.error


def test_guests_leave_no_shared_memory(server: Run, admin: AdminClient) -> None:
    move(admin, LAYERS)
    ours = [path.name for path in SHM.iterdir() if server.temp_dir.name in path.name]
    assert ours == []  # it has no name any more while they use it
    move(admin, Return("d0"))
    until(lambda: admin.placement().guests == [], "the guest has ended")
    assert list(Path(server.temp_dir).rglob("*.ranks")) == []
