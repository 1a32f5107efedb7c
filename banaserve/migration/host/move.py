"""Move of one unit: its phases and its work in the background.

``build_in_guest`` does the work of PREPARE: a guest builds the unit, and the host opens the KV.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable

from banaserve.base.errors import BanaServeError, MigrationError
from banaserve.contracts.move_phase import OPEN, MovePhase, check_step
from banaserve.migration.host.block_mover import BlockMover
from banaserve.migration.host.time_hook import TimeHook
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, Watch
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.kv.remote_kv import RemoteKv, StagedRemoteKv, UnitLocation
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.units.host_unit import HostUnit
from banaserve.migration.worker_api import MoveFacts, MoveReport
from banaserve.transport.errors import TransportError

logger = logging.getLogger(__name__)

MAX_ROUNDS = 16
BUILD_TIMEOUT_S = 600.0


def build_in_guest(
    unit: HostUnit,
    link: GuestClient,
    kv: HostKv,
    dirty_blocks: DirtyBlockTracker,
    time_hook: TimeHook,
) -> UnitLocation:
    """Let a guest build a unit, and open the unit's KV.

    Args:
        kv: KV of the host.
        dirty_blocks: Blocks that are to be copied soon.

    Raises:
        MigrationError: The guest refuses, or its KV cannot be opened.
        GuestLostError: The guest is gone.
    """
    began_s = time.perf_counter()
    built = link.ask(unit.build_request(), messages.Built, BUILD_TIMEOUT_S, may_wait=True)
    runs = {name: kv.runs(unit.heads(name)) for name in unit.names}
    remote: RemoteKv | None = None
    try:
        if built.landing_bytes:
            remote = StagedRemoteKv(link, unit.unit_id, built.region, runs, built.landing_bytes)
        else:
            remote = RemoteKv(link.transport, built.region, built.places, runs)
        remote.warm(dirty_blocks.ids())
    except (TransportError, OSError) as error:
        if remote is not None:
            remote.close()
        # A guest that still answers is not given up: it may serve other units.
        link.ask(messages.ReleaseUnit(unit.unit_id), messages.StepsDone)
        raise MigrationError(f"its KV is out of reach: {error}") from error
    residence = UnitLocation(unit.unit_id, link, remote, built.weight_bytes)
    residence.saves = built.saves
    time_hook.built(unit.modules, time.perf_counter() - began_s)
    return residence


class Move:
    """Move of a unit from its present place to ``target``; owned by the engine's thread.

    The background thread writes only ``_phase`` and the counters, and only in a phase in which it
    works.

    Attributes:
        new_residence: Location of the unit in the target, once it is prepared.
    """

    def __init__(self, move_id: str, unit: HostUnit, target: GuestClient | None) -> None:
        self.move_id = move_id
        self.unit = unit
        self.source = unit.residence
        self.target = target
        self.new_residence: UnitLocation | None = None
        self.facts = MoveFacts()
        self.error = ""
        self.mover: BlockMover | None = None
        self._phase = MovePhase.PREPARING
        self._stop = threading.Event()
        self._ending = threading.RLock()
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        self._working = False

    # ---- phases

    @property
    def phase(self) -> MovePhase:
        return self._phase

    def enter(self, phase: MovePhase) -> None:
        """Go on to ``phase``.

        Raises:
            MigrationError: ``ALLOWED`` has no such change of phase.
        """
        with self._ending:
            check_step(self.move_id, self._phase, phase)
            self._phase = phase

    @property
    def is_open(self) -> bool:
        return self._phase in OPEN

    @property
    def is_over(self) -> bool:
        """Return whether no background work runs and the move is neither open nor FREEING."""
        return not self._working and not self.is_open and self._phase is not MovePhase.FREEING

    def fail(self, reason: str) -> None:
        """End an open move with a fault; the unit stays where it is."""
        with self._ending:
            if self.is_open:
                self.error = reason
                self._phase = MovePhase.FAILED
            self._stop.set()

    # ---- in the background

    def prepare(self, kv: HostKv, dirty_blocks: DirtyBlockTracker, time_hook: TimeHook) -> None:
        """Begin to build the unit in the target, or to make room for it at home."""

        def work() -> None:
            began_s = time.perf_counter()
            if self.target is not None:
                self.new_residence = build_in_guest(
                    self.unit, self.target, kv, dirty_blocks, time_hook
                )
                self.facts.weight_bytes = self.new_residence.weight_bytes
            else:
                self._make_room()
            ends = self.source, self.new_residence
            source, target = (None if one is None else one.kv for one in ends)
            self.mover = BlockMover(self.unit, kv, source, target, time_hook)
            self.facts.prepare_s = time.perf_counter() - began_s

        self._begin(work, MovePhase.PREPARED)

    def _make_room(self) -> None:
        try:
            self.unit.make_room()
        except MemoryError:
            raise MigrationError("there is no memory for its KV at home") from None

    def precopy(self, dirty_blocks: DirtyBlockTracker) -> None:
        """Begin to copy, in rounds while the remaining blocks become fewer; repeatable."""
        self.enter(MovePhase.COPYING)
        if self._watch is None:
            self._watch = dirty_blocks.watch()

        watch = self._watch

        def work() -> None:
            for _ in range(MAX_ROUNDS):
                blocks = watch.take()
                if not blocks:
                    return
                self._round(blocks)
                if self._stop.is_set() or len(watch) >= len(blocks):
                    return

        self._begin(work, MovePhase.COPIED)

    def _round(self, blocks: list[int]) -> None:
        assert self.mover is not None
        began_s = time.perf_counter()
        self.plan(blocks)
        num_bytes = self.mover.copy(blocks, self._stop.is_set, in_background=True)
        self.facts.rounds += 1
        self.facts.precopy_bytes += num_bytes
        self.facts.precopy_s += time.perf_counter() - began_s

    def plan(self, blocks: list[int]) -> None:
        """Note that these blocks are about to be copied."""
        assert self.mover is not None
        planned_bytes = self.facts.planned_bytes or 0
        self.facts.planned_bytes = planned_bytes + len(blocks) * self.mover.each_bytes

    def free(self, work: Callable[[], None]) -> None:
        """Begin to free the source's memory."""
        self.enter(MovePhase.FREEING)

        def timed() -> None:
            began_s = time.perf_counter()
            work()
            self.facts.free_s = time.perf_counter() - began_s

        self._begin(timed, MovePhase.FREED)

    def _begin(self, work: Callable[[], None], then: MovePhase) -> None:
        def run() -> None:
            reason = ""
            try:
                work()
            except BanaServeError as failed:
                reason = str(failed)
            except Exception as failed:
                logger.exception("move %s", self.move_id)
                reason = f"{type(failed).__name__}: {failed}"
            with self._ending:
                self._working = False
                if reason:
                    self.fail(reason)
                if self._phase is MovePhase.FREEING:
                    self.error = reason
                    self._phase = MovePhase.FAILED if reason else then
                elif self._stop.is_set():
                    self._let_go()
                elif self.is_open:
                    self._phase = then

        self._working = True
        self._thread = threading.Thread(target=run, name=f"move-{self.move_id}", daemon=True)
        self._thread.start()

    # ---- by the engine's thread

    def take_left(self, dirty_blocks: DirtyBlockTracker) -> list[int]:
        """Return the blocks that are still to be copied; called between two steps."""
        if self._watch is None:
            self._watch = dirty_blocks.watch()
        return list(self._watch.take())

    def give_up(self) -> None:
        """Stop the copies; release the built unit or the room, now or when the thread ends.

        The caller has entered ABORTED, or called ``fail``.
        """
        with self._ending:
            self._stop.set()
            if not self._working:
                self._let_go()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self._working

    def _let_go(self) -> None:
        residence, self.new_residence = self.new_residence, None
        place = self.unit.residence
        with contextlib.suppress(BanaServeError, OSError):
            if residence is not None:
                residence.leave()
            elif self.target is None and place is not None and place.link.lost is None:
                self.unit.free()  # the room at home; a unit whose guest is lost needs it
        self.end_copies()

    def end_copies(self) -> None:
        """Release the mover and the watch of written blocks."""
        self.mover = None
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def report(self) -> MoveReport:
        """Return the progress of the move, for the coordinator."""
        facts, mover = copy.copy(self.facts), self.mover
        if mover is not None and self._phase is MovePhase.COPYING:
            facts.precopy_bytes = mover.num_bytes
        return MoveReport(
            move_id=self.move_id,
            unit_id=self.unit.unit_id,
            phase=self._phase,
            target=self.target.guest_id if self.target else None,
            reason=self.error,
            dirty_blocks=len(self._watch) if self._watch is not None else None,
            facts=facts,
        )
