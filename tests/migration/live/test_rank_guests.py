"""Modules of engines of two tensor-parallel ranks, in a guest of two processes of which one fails.

Whatever becomes of one of them, both ranks have the modules in the same place, and no answer
changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import random_models
from asked_again import AskedAgain
from banaserve.base.errors import UserError
from banaserve.base.platform.fail_points import VARIABLE, FailPoint
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import (
    MigrationRequest,
    MoveContext,
    MoveExperts,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from migration_load import bring_home, done, units_away
from observing import until, writers
from reference import reference_tokens
from server_run import ForkServer, Run
from streams import Kind

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("disarmed")]

OUTPUT_TOKENS = 120
LENGTHS = (40, 100, 180)
LAYERS = MoveLayers("d0", "p0", (1, 3))
OLDER_BLOCKS = MoveContext("d0", "p0", (0, 3))
EXPERTS = MoveExperts("d0", "p0", {1: (0, 2), 2: (1,)})


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
def server(serve: Callable[..., Run], model: str, points: Path) -> Iterator[Run]:
    run = serve(
        *("--pd", "1:1", "--model", model, "--served-model-name", "m", "--dtype", "float32"),
        *("--decode-tensor-parallel-size", "2", "--max-model-len", "1024", "--migration-poison"),
        *("--kv-cache-memory-bytes", str(96 << 20), "--kv-store-size", "256MiB"),
        env={VARIABLE: str(points)},
    )
    yield run
    assert run.end() == 0


@pytest.fixture
def admin(server: Run) -> Iterator[AdminClient]:
    client = AdminClient(*find_admin(server.run_dir))
    yield client
    bring_home(client, "d0")  # whatever a test has left away is not the next one's


def streams_of(server: Run, prompts: list[list[int]]) -> AskedAgain:
    body = {
        "model": "m",
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    kinds = [Kind("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts]
    return AskedAgain(server, kinds, len(kinds))


@pytest.mark.spine
def test_layers_go_and_come_home(
    server: Run, admin: AdminClient, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with streams_of(server, prompts) as streams:
        streams.comes_to(1)
        gone = done(admin, LAYERS)
        streams.goes_on()
        (guest,) = admin.placement().guests
        assert len(guest.pids) == 2
        back = done(admin, Return("d0"))
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
    with streams_of(server, prompts) as streams:
        streams.comes_to(1)
        done(admin, ask)
        streams.goes_on()
        assert len(units_away(admin)) == 1
        done(admin, Return("d0"))
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
    with streams_of(server, prompts) as streams:
        streams.comes_to(1)
        before = processes_of(server, "d0")
        (points / point).write_text(how)
        with contextlib.suppress(UserError):
            assert admin.run(LAYERS).state != "done"
        assert list(points.iterdir()) == []
        if point in (FailPoint.MOVE_PREPARE, FailPoint.MOVE_COMMIT):
            # Of its end a move may hear before it counts as not ready.
            until(lambda: processes_of(server, "d0") - before != set(), "it is started again")
        until(lambda: server.metric("banaserve_instance_ready", instance_id="d0") == 1, "it serves")
        bring_home(admin, "d0")
        streams.goes_on()
        done(admin, LAYERS)
        streams.goes_on()
        done(admin, Return("d0"))
    streams.check(expected)


def processes_of(server: Run, name: str) -> set[int]:
    return {pid for log, pid in writers(server.run_dir) if log == f"{name}.log"}


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
    with streams_of(server, prompts) as streams:
        streams.comes_to(1)
        done(admin, ask)
        (points / FailPoint.GUEST_RUN).write_text(f"{how} {nth}")
        until(lambda: not list(points.iterdir()), "one of them fails")
        until(lambda: units_away(admin) == [], "all is at home")
        streams.goes_on()
        done(admin, ask)
        streams.goes_on()
        done(admin, Return("d0"))
    streams.check(expected)
    assert server.metric("banaserve_guests_lost_total", instance_id="d0") == lost + 1


def test_heads_are_refused_with_the_reason(admin: AdminClient) -> None:
    told = admin.run(MoveHeads("d0", "p0", {1: (0,)}))
    assert (told.state, units_away(admin)) == ("failed", [])
    assert "each is on one of the tensor-parallel ranks" in told.error


def test_nobody_who_is_killed_would_leave_shared_memory(server: Run, admin: AdminClient) -> None:
    """It has no name any more while ranks add up in it."""
    done(admin, LAYERS)
    mapped = [line for line in server.maps().splitlines() if "-cpushm_" in line]
    assert len({line.split("/dev/shm/")[1] for line in mapped}) == 2 * 2, (
        "an engine of two ranks, its guest"
    )
    assert all(line.endswith("(deleted)") for line in mapped)
    done(admin, Return("d0"))
    until(lambda: admin.placement().guests == [], "the guest has ended")
    assert list(Path(server.temp_dir).rglob("*.ranks")) == []
