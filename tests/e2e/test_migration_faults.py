"""Guests, hosts and targets die or stand still at every phase of a move, under streams.

Every stream ends with right tokens (greedy streams go on after a loss), everything is at home again
or goes on working, and no guest, lease or request is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from banaserve import models
from banaserve.api.admin_client import AdminClient
from banaserve.bench.servers import Server, banaserve_server
from banaserve.engine.vllm.moves.words import Migration, MoveHeads, MoveLayers, Return
from banaserve.run_dir import find_admin

_path = Path(__file__).parent / "migration_load.py"
_spec = importlib.util.spec_from_file_location("migration_load", _path)
assert _spec is not None
assert _spec.loader is not None
loads: Any = importlib.util.module_from_spec(_spec)
sys.modules["migration_load"] = loads
_spec.loader.exec_module(loads)

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
OPTIONS = ("--pd", "1:1", "--migration-poison", "--dtype", "float32")
LIGHT = ("--kv-store-size", "512MiB", "--kv-cache-memory-bytes", str(400 << 20))
LAYERS = MoveLayers("d0", "p0", (10, 20))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loads.Reference(tmp_path_factory.mktemp("reference"), 20, longest=300, seed=5)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "run"


@pytest.fixture(scope="module")
def server(run_dir: Path, reference: Any) -> Iterator[Server]:
    with banaserve_server(models.PACKAGED, *OPTIONS, *LIGHT, "--run-dir", str(run_dir)) as started:
        yield started


@pytest.fixture
def admin(server: Server, run_dir: Path) -> Iterator[AdminClient]:
    client = AdminClient(*find_admin(run_dir))
    loads.until_clean(server, client)
    yield client
    loads.until_clean(server, client)
    assert guests_of(run_dir) == []


def guests_of(run_dir: Path) -> list[int]:
    """Processes that write a guest's log."""
    return [pid for name, pid in writers(run_dir) if name.startswith("guest-")]


def engine_of(run_dir: Path, instance: str) -> int:
    (pid,) = [pid for name, pid in writers(run_dir) if name == f"{instance}.log"]
    return pid


def writers(run_dir: Path) -> Iterator[tuple[str, int]]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent == run_dir:
                yield log.name, process.pid


def ended(admin: AdminClient, migration: Migration) -> Migration:
    """A migration's end; it must come soon after a fault."""
    for _ in range(60):
        if not migration.is_open:
            return migration
        migration = admin.show(migration.id, wait_s=1.0)
    raise AssertionError(f"still {migration.moves[0].phase}")


def on_guest(number: int) -> Callable[[Path], None]:
    def strike(run_dir: Path) -> None:
        for pid in guests_of(run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    return strike


def on_engine(instance: str) -> Callable[[Path], None]:
    return lambda run_dir: os.kill(engine_of(run_dir, instance), signal.SIGKILL)


@pytest.mark.parametrize("phase", ["preparing", "copying"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_guest_is_lost_while_it_is_moved_to(server, admin, run_dir, reference, phase, number):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        migration = loads.until_phase(admin, admin.begin(LAYERS), phase)
        on_guest(number)(run_dir)
        migration = ended(admin, migration)
        # A strike that comes after COMMIT is one on a guest that serves.
        assert migration.state in ("failed", "done")
        loads.until(lambda: not placed_away(admin), "everything is at home")
        load.wait_tokens(30)


def placed_away(admin: AdminClient) -> list[str]:
    return [unit.unit_id for one in admin.placement().instances for unit in one.units]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(
    "ask", [LAYERS, MoveHeads("d0", "p0", {5: (1, 2)})], ids=["layers", "heads"]
)
def test_a_guest_that_serves_is_lost(server, admin, run_dir, reference, number, ask):
    lost = server.metric("banaserve_guests_lost_total")
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, ask)
        load.wait_tokens(60)
        on_guest(number)(run_dir)
        loads.until(lambda: not placed_away(admin), "everything is at home", deadline_s=5)
        load.wait_tokens(60)
        loads.done(admin, ask)
        load.wait_tokens(30)
        loads.done(admin, Return("d0"))
    loads.until(
        lambda: server.metric("banaserve_guests_lost_total") == lost + 1, "the loss is counted"
    )


def test_a_guest_is_lost_while_nobody_asks_for_anything(server, admin, run_dir, reference):
    loads.done(admin, LAYERS)
    on_guest(signal.SIGSTOP)(run_dir)
    loads.until(lambda: not placed_away(admin), "noticed without a stream", deadline_s=5)
    with loads.streaming(server, reference, 2) as load:
        load.wait_tokens(30)


@pytest.mark.parametrize("phase", ["preparing", "copying"])
def test_a_guest_is_lost_on_the_way_home(server, admin, run_dir, reference, phase):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, LAYERS)
        load.wait_tokens(40)
        migration = loads.until_phase(admin, admin.begin(Return("d0")), phase)
        on_guest(signal.SIGKILL)(run_dir)
        assert ended(admin, migration).state in ("failed", "done")
        loads.until(lambda: not placed_away(admin), "everything is at home")
        load.wait_tokens(30)


@pytest.mark.parametrize("phase", ["preparing", "copying"])
def test_abort_leaves_the_host_as_it_was(server, admin, reference, phase):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        epoch = admin.placement().instances[1].epoch
        migration = loads.until_phase(admin, admin.begin(LAYERS), phase)
        admin.abort(migration.id)
        assert ended(admin, migration).state == "aborted"
        assert placed_away(admin) == []
        assert admin.placement().instances[1].epoch == epoch
        load.wait_tokens(30)


def test_an_aborted_return_stays_away(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, LAYERS)
        migration = loads.until_phase(admin, admin.begin(Return("d0")), "copying")
        with contextlib.suppress(Exception):
            admin.abort(migration.id)
        state = ended(admin, migration).state
        assert (state, len(placed_away(admin))) in (("aborted", 1), ("done", 0))
        load.wait_tokens(30)
        if state == "aborted":
            loads.done(admin, Return("d0"))


@pytest.mark.parametrize("when", ["preparing", "away"])
def test_a_host_that_dies_takes_its_guest_with_it(server, admin, run_dir, reference, when):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        migration = admin.begin(LAYERS)
        if when == "preparing":
            loads.until_phase(admin, migration, when)
        else:
            assert ended(admin, migration).state == "done"
            load.wait_tokens(40)
        on_engine("d0")(run_dir)
        assert ended(admin, migration).state == ("failed" if when == "preparing" else "done")
        loads.until(lambda: guests_of(run_dir) == [], "the guest has ended")
        load.wait_tokens(30)


def test_a_target_that_dies_keeps_the_guest_beside_it(server, admin, run_dir, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, LAYERS)
        load.wait_tokens(40)
        guests = guests_of(run_dir)
        on_engine("p0")(run_dir)
        load.wait_tokens(60)
        assert guests_of(run_dir) == guests
        assert len(placed_away(admin)) == 1
        loads.done(admin, Return("d0"))
