"""An instance that answers the coordinator as ``MigrationApi`` says, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.errors import MigrationError
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId, ModulePlacement, Role
from banaserve.contracts.migration_api import Migration, MoveLayers
from banaserve.migration.kv.host_kv import blocks_gained
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.registry import AnyUnit
from banaserve.serving.instances.service_state import ServiceState
from banaserve.serving.launch.launcher import InstancePlace, Launcher
from banaserve.serving.launch.messages import Order, StartGuest
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.guest_pool import GuestPool
from banaserve.serving.moves.sizes import ModelFacts

FACTS = ModelFacts(num_layers=30, num_kv_heads=3, layer_weight_bytes=1000)
NUM_BLOCKS, PAGE_BYTES = 300, 3000
LAYERS = MoveLayers("d0", "p0", (10, 20))
THEN = {"preparing": "prepared", "copying": "copied", "freeing": "freed"}


_NO_STEPS = {"steps_cut": 0, "steps_waited": 0, "parts": 0}
_POOL_COUNTS = {"free_blocks": 0, "running": 0, "waiting": 0, "preemptions": 0}
Plain = dict[str, Any]


def answered(value: object) -> Plain:
    return {"type": "Answered", "value": value}


def refused(reason: str) -> Plain:
    return {"type": "Refused", "reason": reason}


def modules_of(plain: Plain) -> MigrationUnit:
    """Modules as they travel in a call."""
    return msgspec.convert(plain, AnyUnit)


class Engine:
    """The worker and the scheduler of one instance.

    Attributes:
        calls: Methods that were called, without looks, in their order.
        held: Phases, and "connecting" of guests, that do not end by themselves.
        faults: A method's reply, or a phase's end: the reason that it fails with.
        lost_answers: Methods that do their work and answer with an error.
        still: Methods that the host does not come to, as if it were stopped.
        late: Methods that do their work and never answer.
        attached: What it was told of the processes of each guest.
        shares: What each guest was told last.
        overlap: Of its status.
        busy: Replies of shrinking, one after the other; then none is in the way.
    """

    def __init__(self, cannot: str = "") -> None:
        self.calls: list[str] = []
        self.held: set[str] = set()
        self.faults: dict[str, str] = {}
        self.lost_answers: set[str] = set()
        self.still: set[str] = set()
        self.late: set[str] = set()
        self.busy: list[int] = []
        self.dirty: list[int] = []
        self.guests: dict[str, dict[str, str]] = {}
        self.moves: dict[str, Plain] = {}
        self.units: dict[str, Plain] = {}
        self.sources: dict[str, str | None] = {}
        self.epoch = 1
        self.shares: dict[str, float] = {}
        self.attached: list[list[dict[str, Any]]] = []
        self.overlap = {"max_microbatches": 1, "blocker": "", "prediction_error": 0.0, **_NO_STEPS}
        self.guests_lost = 0
        self.pool_blocks = NUM_BLOCKS
        self.pool_sizes: list[int] = []
        self.engine_core = self
        self._cannot = cannot

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Plain]:
        await asyncio.sleep(0)
        name = method.removeprefix("banaserve_migration_")
        if name == "status" and name not in self.still:
            return [self._status()]
        self.calls.append(name)
        if reason := self.faults.get(name):
            return [refused(reason)]
        if name in self.still:
            await asyncio.Event().wait()
        reply = getattr(self, f"_{name}")(*args)
        if name in self.late:
            await asyncio.Event().wait()
        if name in self.lost_answers:
            return [refused("the answer was lost")]
        return [reply]

    async def call_utility_async(self, method: str, *args: int) -> Plain:
        await asyncio.sleep(0)
        busy = 0
        if method == "banaserve_resize_pool":
            wanted, hold = args
            assert hold
            busy = self.busy.pop(0) if wanted < self.pool_blocks and self.busy else 0
            if not busy and wanted != self.pool_blocks:
                self.pool_blocks = wanted
                self.pool_sizes.append(wanted)
                self.calls.append("resize_pool")
        pool = {"num_blocks": self.pool_blocks, **_POOL_COUNTS}
        resized = {"pool": pool, "busy": busy}
        return answered(resized if method == "banaserve_resize_pool" else pool)

    # ---- what the worker does

    def _attach(self, addresses: list[dict[str, str]]) -> Plain:
        self.attached.append(addresses)
        state = "connecting" if "connecting" in self.held else "ready"
        self.guests[addresses[0]["guest_id"]] = {"state": state, "reason": ""}
        return answered(None)

    def _detach(self, guest_id: str) -> Plain:
        return answered(None) if self.guests.pop(guest_id, None) else refused("not attached")

    def _prepare(self, move_id: str, modules: Plain, guest_id: str) -> Plain:
        return self._begin(move_id, move_id, modules, guest_id)

    def _move_on(self, move_id: str, unit_id: str, guest_id: str | None) -> Plain:
        if guest_id is None:
            unit = self.units[unit_id]
            rest = [u for name, u in self.units.items() if name != unit_id]
            assert self.pool_blocks <= NUM_BLOCKS + self._gained(rest), unit
        return self._begin(move_id, unit_id, self.units[unit_id]["modules"], guest_id)

    def _begin(self, move_id: str, unit_id: str, modules: Plain, guest: str | None) -> Plain:
        move = {"move_id": move_id, "unit_id": unit_id, "phase": "preparing", "reason": ""}
        where = {"modules": modules, "target": guest, "dirty_blocks": None, "facts": {}}
        self.moves[move_id] = {**move, **where}
        return answered(self.moves[move_id])

    def _overlap(self, max_microbatches: int) -> Plain:
        self.overlap["max_microbatches"] = max_microbatches
        return answered(dict(self.overlap))

    def _share(self, guest_id: str, fraction: float) -> Plain:
        self.shares[guest_id] = fraction
        return answered(None)

    def _precopy(self, move_id: str) -> Plain:
        move = self.moves[move_id]
        assert move["phase"] in ("prepared", "copied")
        move["phase"] = "copying"
        move["dirty_blocks"] = self.dirty.pop(0) if self.dirty else 0
        return answered(move)

    def _commit(self, move_id: str) -> Plain:
        move = self.moves[move_id]
        assert move["phase"] in ("prepared", "copied")
        self.epoch += 1
        move["phase"], move["facts"]["stall_s"] = "committed", 0.004
        if move["target"] is None:
            del self.units[move["unit_id"]]
        else:
            unit = {"unit_id": move["unit_id"], "modules": move["modules"], "epoch": self.epoch}
            where = {"guest_id": move["target"], "num_older_blocks": None}
            self.units[move["unit_id"]] = {**unit, **where}
        return answered({"move": move, "epoch": self.epoch})

    def _free(self, move_id: str) -> Plain:
        assert self.moves[move_id]["phase"] == "committed"
        self.moves[move_id]["phase"] = "freeing"
        self.moves[move_id]["facts"] |= {"freed_bytes": 1, "predicted_bytes": 1}
        return answered(self.moves[move_id])

    def _abort(self, move_id: str) -> Plain:
        if move_id not in self.moves:
            return refused(f"there is no move {move_id}")
        assert self.moves[move_id]["phase"] not in ("committed", "freed")
        self.moves[move_id]["phase"] = "aborted"
        return answered(self.moves[move_id])

    def lose(self, guest_id: str) -> None:
        """A guest dies: what it held comes home."""
        self.guests[guest_id] = {"state": "lost", "reason": "killed"}
        self.units = {n: u for n, u in self.units.items() if u["guest_id"] != guest_id}
        self.guests_lost += 1

    def _status(self) -> Plain:
        if self._cannot:
            return refused(self._cannot)
        status = {
            "epoch": self.epoch,
            "guests": dict(self.guests),
            "moves": {name: copy.deepcopy(move) for name, move in self.moves.items()},
            "units": list(self.units.values()),
            "guests_lost": self.guests_lost,
            "steps_lost": 0,
            "graph_sizes": None,
            "graphs_captured": 0,
            "overlap": dict(self.overlap),
            "kv": {
                "num_blocks": NUM_BLOCKS,
                "max_blocks": 2 * NUM_BLOCKS,
                "blocks_gained": self._gained(list(self.units.values())),
                "page_bytes": PAGE_BYTES,
                "num_layers": FACTS.num_layers,
                "resident_bytes": 0,
                "written_blocks": 0,
            },
        }
        self._go_on()
        return answered(status)

    def _go_on(self) -> None:
        """Phases end between two looks."""
        for move in self.moves.values():
            phase = move["phase"]
            if phase in THEN and phase not in self.held:
                reason = self.faults.get(phase)
                move["phase"] = "failed" if reason else THEN[phase]
                move["reason"] = reason or ""

    def _gained(self, units: list[Plain]) -> int:
        pages = sum(modules_of(u["modules"]).num_pages(FACTS.num_kv_heads) for u in units)
        away = round(pages * PAGE_BYTES)
        kept = FACTS.num_layers * PAGE_BYTES - away
        return blocks_gained(NUM_BLOCKS, 2 * NUM_BLOCKS, away, kept)


class Instance:
    """What the coordinator sees of an instance."""

    def __init__(self, name: str, cannot: str = "") -> None:
        self.id = InstanceId(name)
        self.role = Role.DECODE
        self.incarnation = 1
        self.pid = 0
        self.place, self.num_ranks = InstancePlace(), 1
        self.vllm_argv: tuple[str, ...] = ()
        self.engine = Engine(cannot)
        self.llm: Any = self.engine
        self.guests = (0, 0.0)
        self.placements: tuple[ModulePlacement, ...] = ()
        self.is_paused = False
        self.service = ServiceState(name)

    @property
    def is_ready(self) -> bool:
        return self.llm is not None

    def check_not_paused(self) -> None:
        if self.is_paused:
            raise MigrationError("the engines sleep or are paused")

    def set_guests(self, num_bytes: int, busy_fraction: float) -> None:
        self.guests = (num_bytes, busy_fraction)

    def set_placements(self, placements: tuple[ModulePlacement, ...], epoch: int) -> None:
        self.placements = placements

    def die(self) -> None:
        self.llm = None

    def restart(self) -> None:
        self.incarnation += 1
        self.llm = self.engine = Engine()


class SleepLauncher(Launcher):
    """Guests are processes that do nothing: they can be killed, stopped and waited for."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.devices = ""

    def devices_of(self, instance_id: str) -> str:
        return self.devices

    async def start(self, order: Order) -> int:
        assert isinstance(order, StartGuest), "no engine is started here"
        self.processes.append(subprocess.Popen(["sleep", "1000"]))  # noqa: ASYNC220
        return self.processes[-1].pid

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Cluster:
    """Instances d0, p0, p1 and x0, which cannot migrate, and a coordinator of them."""

    def __init__(self, folder: Path, available_bytes: int = 1 << 40) -> None:
        self.instances = {
            InstanceId(name): Instance(name, "MLA cannot be moved" if name == "x0" else "")
            for name in ("d0", "p0", "p1", "x0")
        }
        self.launcher = SleepLauncher()
        guests = GuestPool(self.launcher, RunDir(folder, folder), "shm")
        self.coordinator = Coordinator(self.instances, guests, FACTS, lambda name: available_bytes)
        self.d0 = self.instances[InstanceId("d0")]
        self.engine = self.d0.engine

    async def close(self) -> None:
        await self.coordinator.stop()
        with contextlib.suppress(ProcessLookupError):
            self.launcher.close()


async def run(coordinator: Coordinator, ask: Any) -> Migration:
    return await coordinator.wait((await coordinator.begin(ask)).id)


async def done(coordinator: Coordinator, ask: Any) -> Migration:
    migration = await run(coordinator, ask)
    assert (migration.state, migration.error) == ("done", "")
    return migration
