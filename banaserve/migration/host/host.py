"""Host of migrations: one in each engine's worker, called between two steps.

Also the book of a host's moves, and the attaching of guests in the background.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from banaserve.base.errors import BanaServeError, GuestLostError, MigrationError, UserError
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.contracts.move_phase import ModelGeometry, MovePhase
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.runner.experts import experts_of
from banaserve.engine.compat.runner.graphs import graphs_of
from banaserve.engine.migration_settings import MigrationSettings
from banaserve.migration import checks
from banaserve.migration.host.move import Move
from banaserve.migration.host.placement import PlacementManager
from banaserve.migration.host.recovery import StepRecovery
from banaserve.migration.host.time_hook import REAL_TIME, TimeHook
from banaserve.migration.kv.host_kv import HostKv, blocks_gained
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.expert_split import SplitExperts
from banaserve.migration.modules.step_graphs import CompiledModel, StepGraphs
from banaserve.migration.ranks import OTHER_FAILED, Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.gpu_lane import HostLane
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.migration.units.base import MigrationUnit, check_free
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.migration.units.registry import make_unit
from banaserve.migration.worker_api import GuestLinkStatus, LinkState
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import PeerGoneError, TransportError
from banaserve.transport.interface import Transport

KEPT = 32
"""Number of ended moves that are kept for status requests."""


class MoveBook:
    """Moves by id, in the order in which they began: the open ones and the last ended ones."""

    def __init__(self) -> None:
        self._moves: dict[str, Move] = {}

    def __iter__(self) -> Iterator[Move]:
        return iter(list(self._moves.values()))

    def add(self, move: Move) -> None:
        """Add a move that begins, and forget the oldest ended moves.

        Raises:
            MigrationError: The move's id is taken.
        """
        if move.move_id in self._moves:
            raise MigrationError(f"there was a move {move.move_id} already: name another")
        for old in [one for one in self if one.is_over][:-KEPT]:
            del self._moves[old.move_id]
        self._moves[move.move_id] = move

    def get(self, move_id: str) -> Move:
        """Return a move by its id; a ``MigrationError`` if there is none, or it ended long ago."""
        found = self._moves.get(move_id)
        if found is None:
            raise MigrationError(f"there is no move {move_id}")
        return found


logger = logging.getLogger(__name__)

_ABORT_WAIT_S = 1.0
_FREE_WAIT_S = 60.0


class MigrationHost:
    """Host that moves units of one engine between this worker and its guests.

    Every method is called by the engine's thread between two steps, except ``guest_lost``, which
    may be called in the middle of a step. Each worker of a tensor-parallel engine has a host, and
    all hosts get the same calls in the same order. Only ``commit`` and ``guest_lost`` change the
    place of units, on all ranks or on none.

    Attributes:
        attaching: State of guests that are not attached yet or could not be, by guest id.
    """

    def __init__(
        self,
        runner: Any,
        settings: MigrationSettings,
        host_kv: HostKv,
        time_hook: TimeHook = REAL_TIME,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.settings = settings
        self._time_hook = time_hook
        self.epoch = 1
        self.links: dict[str, GuestClient] = {}
        self.attaching: dict[str, GuestLinkStatus] = {}
        self.moves = MoveBook()
        self.num_guests_lost = 0
        self._runner = runner
        self._config = runner.vllm_config
        self.kv = host_kv
        context = self._config.compilation_config.static_forward_context
        attentions = {name: context[name] for name in host_kv.tensors}
        path, layers = checks.find_layers(runner.get_model(), dict(enumerate(host_kv.tensors)))
        (group,) = [g for groups in runner.attn_groups for g in groups]
        spec = group.kv_cache_spec
        self.step_context = StepContext(
            group.get_metadata_builder(0), spec.block_size, host_kv.max_blocks
        )
        kv_shape = host_kv.shape(runner.cache_config.kv_cache_layout, spec.block_size)
        graphs = self._graphs()
        self.engine = HostEngine(
            self._config,
            path,
            layers,
            attentions,
            host_kv,
            kv_shape,
            self.step_context,
            self.guest_lost,
            settings.poison,
            experts=self._experts(layers),
            compiled=CompiledModel(runner.get_model(), graphs),
            graphs=graphs,
            ranks=self.ranks,
        )
        num_experts = max((one.num_experts for one in self.engine.experts.values()), default=0)
        self._shape = ModelGeometry(len(attentions), host_kv.num_heads, num_experts)
        self.lost_steps = StepRecovery(runner)
        self.placement = PlacementManager(self.engine, settings.overlap)

    def _graphs(self) -> StepGraphs | None:
        """Return the CUDA graphs of the runner's steps, captured from now on between its steps."""
        found = graphs_of(self._runner)
        if found is None:
            return None
        graphs = StepGraphs(found)

        def execute(call: runner_hooks.Call, *args: Any, **kwargs: Any) -> Any:
            graphs.capture_wanted()
            return call(*args, **kwargs)

        runner_hooks.wrap_execute_model(self._runner, execute)
        return graphs

    def _experts(self, layers: Iterable[nn.Module]) -> dict[int, SplitExperts]:
        found = {layer: experts_of(module) for layer, module in enumerate(layers)}
        return {
            layer: SplitExperts(experts, self.guest_lost, self.ranks, self.step_context)
            for layer, experts in found.items()
            if experts is not None
        }

    def expert_load(self, *, counting: bool) -> dict[int, list[int]]:
        """Return how often each expert was chosen since counting began, by layer."""
        if self.engine.compiled is not None:
            is_wanted = counting and bool(self.engine.experts)
            self.engine.compiled.call_modules("counted", wanted=is_wanted)
        return {layer: one.count(counting) for layer, one in self.engine.experts.items()}

    # ---- a move, step by step

    def prepare(self, move_id: str, modules: MigrationUnit, guest_id: str) -> Move:
        """Begin to build ``modules``, which are at home, in a guest.

        Raises:
            MigrationError: The modules cannot move, the guest is not attached or is lost, or the
                move's id is taken.
        """
        modules.check(self._shape)
        if not self.ranks.is_alone and not modules.is_on_all_ranks:
            raise MigrationError(
                f"{modules} cannot move: each is on one of the tensor-parallel ranks, which move "
                "what they have in step; move layers or older blocks instead"
            )
        if any(unit.unit_id == move_id for unit in self.placement):
            raise MigrationError(f"there is a unit {move_id} already: name the move otherwise")
        away = {u.unit_id: u.modules for u in self.placement}
        moving = {m.unit.unit_id: m.unit.modules for m in self.moves if m.is_open}
        check_free(modules, away | moving)
        for name in self.engine.names(modules.layers):
            modules.check_attention(self.engine.attentions[name], name)
        unit = make_unit(move_id, modules, self.engine)
        return self._begin(move_id, unit, self._link(guest_id))

    def prepare_again(self, move_id: str, unit_id: str, guest_id: str | None) -> Move:
        """Begin to move a unit that is away on to another guest, or home.

        Raises:
            MigrationError: No such unit is away, or it is moving, or is at the target already.
        """
        unit = next((u for u in self.placement if u.unit_id == unit_id), None)
        if unit is None:
            raise MigrationError(f"{unit_id} is not away: it has come home, or its guest was lost")
        # An aborted move may still be copying, and frees the room at home only then.
        if any(m.unit is unit and not m.is_over for m in self.moves):
            raise MigrationError(f"{unit_id} is moving: wait for that to end, or abort it")
        target = None if guest_id is None else self._link(guest_id)
        assert unit.residence is not None
        if target is unit.residence.link:
            raise MigrationError(f"{unit_id} is in {guest_id} already")
        return self._begin(move_id, unit, target)

    def _begin(self, move_id: str, unit: HostUnit, target: GuestClient | None) -> Move:
        move = Move(move_id, unit, target)
        self.moves.add(move)
        reach(FailPoint.MOVE_PREPARE)
        move.prepare(self.kv, self.step_context.dirty_blocks, self._time_hook)
        return move

    def precopy(self, move_id: str) -> Move:
        """Begin to copy the written blocks, or those written since the last copy."""
        move = self._going_on(move_id)
        reach(FailPoint.MOVE_PRECOPY)
        move.precopy(self.step_context.dirty_blocks)
        return move

    def commit(self, move_id: str) -> Move:
        """Copy the remaining blocks and let the target serve: the stall of the engine.

        Raises:
            MigrationError: The move is not ready, or a guest was lost; the source still serves.
        """
        move = self.ranks.run(lambda: self._ready(move_id))
        began_s = time.perf_counter()
        try:
            num_blocks, copied_s = self.ranks.run(lambda: self._hand_over(move))
        except (GuestLostError, MigrationError) as failed:
            self._failed(move, str(failed))
            self._take_home_lost()
            raise MigrationError(f"move {move_id}: {failed}") from failed
        self.epoch += 1
        if move.source is None:
            move.unit.left_home(self.step_context.dirty_blocks)
        activated_s = time.perf_counter()
        reach(FailPoint.MOVE_COMMIT)
        self.placement.put(move.unit, move.new_residence)
        move.enter(MovePhase.COMMITTED)
        self._time_hook.committed()
        ended_s = time.perf_counter()
        move.end_copies()
        facts = move.facts
        facts.commit_blocks = num_blocks
        facts.copy_s = copied_s - began_s
        facts.activate_s = activated_s - copied_s
        facts.swap_s = ended_s - activated_s
        facts.stall_s = ended_s - began_s
        if move.source is None:
            move.unit.poison()
        return move

    def _going_on(self, move_id: str) -> Move:
        move = self.moves.get(move_id)
        if move.phase is MovePhase.FAILED:
            raise MigrationError(f"move {move_id} has failed: {move.error}")
        return move

    def _ready(self, move_id: str) -> Move:
        move = self._going_on(move_id)
        if move.phase not in (MovePhase.PREPARED, MovePhase.COPIED) or move.mover is None:
            raise MigrationError(f"move {move_id} is {move.phase.value}: nothing to commit yet")
        return move

    def _hand_over(self, move: Move) -> tuple[int, float]:
        """Copy the remaining blocks and activate the target; return their number and copy time."""
        assert move.mover is not None
        self.step_context.dirty_blocks.step_ended()
        blocks = move.take_left(self.step_context.dirty_blocks)
        move.plan(blocks)
        move.facts.commit_bytes = move.mover.copy(blocks)
        copied_s = time.perf_counter()
        if move.new_residence is not None:
            move.new_residence.activate(self.epoch + 1)
        return len(blocks), copied_s

    def free(self, move_id: str) -> Move:
        """Begin to free the memory that the source of a committed move still holds.

        Raises:
            MigrationError: The move is not committed, or its unit has moved again since.
        """
        move = self.moves.get(move_id)
        if move.unit.residence is not move.new_residence:
            raise MigrationError(f"{move.unit.unit_id} has moved since {move_id}")

        def work() -> None:
            reach(FailPoint.MOVE_FREE)
            if move.source is not None:
                move.source.leave()
                return
            freed = move.unit.free()
            move.facts.predicted_bytes = sum(f.predicted_bytes for f in freed)
            move.facts.freed_bytes = sum(f.freed_bytes for f in freed)

        move.free(work)
        return move

    def abort(self, move_id: str) -> Move:
        """Abort an open move, whose source has served all the time.

        Raises:
            MigrationError: The move is committed or has ended.
        """
        move = self.moves.get(move_id)
        move.enter(MovePhase.ABORTED)
        move.give_up()
        move.join(_ABORT_WAIT_S)
        return move

    # ---- faults

    def guest_lost(self, link: GuestClient, error: GuestLostError) -> None:
        """Bring the units of a lost guest home, with the weights kept here; their KV is lost.

        All KV of the engine is recomputed: requests share blocks, and if a block were recomputed
        in place, another request would read it before it is ready.

        Raises:
            MemoryError: There is no memory for the KV at home. The units stay in the lost guest,
                so the next step tries again, and ends the engine if it fails too.
        """
        lost = self.placement.at(link)
        for move in self.moves:
            if move.is_open and (move.target is link or move.unit in lost):
                self._failed(move, str(error))
            if move.unit in lost:
                # The memory of a unit that returns home must not be freed at the same time.
                move.join(_FREE_WAIT_S)
        lost = self.placement.at(link)  # a failed move may have returned its unit home
        if not lost:
            return
        logger.error("%s: %s come home", error, ", ".join(str(u.modules) for u in lost))
        if self.kv.must_be_backed:
            for unit in lost:  # before any comes home: a step must not touch what is not backed
                unit.make_room()
        self.num_guests_lost += 1
        for unit in lost:
            assert unit.residence is not None
            unit.residence.kv.close()
            self.placement.put(unit, None)
            if not self.kv.must_be_backed:
                unit.heal()
        self.epoch += 1
        self.step_context.dirty_blocks.forget()
        self.lost_steps.kv_lost()
        self._take_home_lost()

    def check_guests(self) -> None:
        """Detect guests that have died while no step needed them."""
        for link in list(self.links.values()):
            try:
                link.check()
            except GuestLostError as error:
                if not self.placement.at(link):
                    self.guest_lost(link, error)
        self._take_home_lost()

    def _take_home_lost(self) -> None:
        """Bring home the units of every guest whose process was given up on any rank."""
        links = [unit.residence.link for unit in self.placement if unit.residence is not None]
        lost = self.ranks.any_of([link.lost is not None for link in links])
        for link in dict.fromkeys(itertools.compress(links, lost)):
            if link.lost is None:
                link.give_up(OTHER_FAILED)
            if self.placement.at(link):
                self.guest_lost(link, GuestLostError(f"guest {link.guest_id}: {link.lost}"))

    @staticmethod
    def _failed(move: Move, reason: str) -> None:
        move.fail(reason)
        move.give_up()

    # ---- guests

    def detach(self, guest_id: str) -> None:
        """End the connection to a guest, and so the guest.

        Raises:
            MigrationError: A unit runs or moves there, or the guest is not attached.
        """
        link = self.links.get(guest_id)
        if link is None:
            attempt = self.attaching.get(guest_id)
            if attempt is not None and attempt.state is LinkState.LOST:
                del self.attaching[guest_id]
                return
            raise MigrationError(f"guest {guest_id} is not attached")
        held = [str(unit.modules) for unit in self.placement.at(link)]
        held += [str(m.unit.modules) for m in self.moves if m.is_open and m.target is link]
        if held:
            raise MigrationError(f"guest {guest_id} holds {', '.join(held)}: move it first")
        link.close()
        del self.links[guest_id]

    def free_link(self, guest_id: str) -> GuestClient:
        """Return the client of a guest that answers at once, since it is not building.

        Raises:
            MigrationError: The guest is building, not attached, or lost.
        """
        link = self._link(guest_id)
        if any(m.phase is MovePhase.PREPARING and m.target is link for m in self.moves):
            raise MigrationError(f"guest {guest_id} is building: ask later")
        return link

    @property
    def blocks_gained(self) -> int:
        """Number of blocks by which the pool can grow due to the units that are away."""
        kv = self.kv
        pages = sum(unit.modules.num_pages(kv.num_heads) for unit in self.placement)
        away = round(pages * kv.page_bytes)
        kept = len(kv.tensors) * kv.page_bytes - away
        return blocks_gained(kv.num_blocks, kv.max_blocks, away, kept)

    def _link(self, guest_id: str) -> GuestClient:
        link = self.links.get(guest_id)
        if link is None:
            raise MigrationError(f"guest {guest_id} is not attached")
        if link.lost is not None:
            raise MigrationError(f"guest {guest_id} is lost: {link.lost}")
        return link


ATTACH_TIMEOUT_S = 120.0
"""Timeout of attaching a guest, in seconds: a guest that is not forked imports vLLM first."""
_LANE_TIMEOUT_S = 5.0


def attach(host: MigrationHost, address: GuestAddress) -> None:
    """Connect to a guest in a thread; the outcome is in ``host.links`` or in ``host.attaching``.

    Raises:
        MigrationError: A guest with this id is attached or attaching already.
    """
    guest_id = address.guest_id
    known, attempt = host.links.get(guest_id), host.attaching.get(guest_id)
    if (known is not None and known.lost is None) or (
        attempt is not None and attempt.state is LinkState.CONNECTING
    ):
        raise MigrationError(f"guest {guest_id} is attached already")
    host.attaching[guest_id] = GuestLinkStatus(LinkState.CONNECTING)

    def run() -> None:
        try:
            link = _connect(host, address)
        except (BanaServeError, OSError) as failed:
            reason = str(failed)
        except Exception as failed:
            logger.exception("guest %s", guest_id)
            reason = f"{type(failed).__name__}: {failed}"
        else:
            host.links[guest_id] = link
            host.attaching.pop(guest_id, None)
            return
        logger.error("guest %s: %s", guest_id, reason)
        host.attaching[guest_id] = GuestLinkStatus(LinkState.LOST, reason)

    threading.Thread(target=run, name=f"attach-{guest_id}", daemon=True).start()


def _connect(host: MigrationHost, address: GuestAddress) -> GuestClient:
    channel = _open_channel(address, time.monotonic() + ATTACH_TIMEOUT_S)
    link = GuestClient(
        address.guest_id,
        channel,
        address.make_transport(),
        lambda: host.epoch,
        host.settings.stall_s,
        is_one_of_several=bool(address.rendezvous),
    )
    hello = messages.GuestHello(address.token)
    ready = link.ask(hello, messages.GuestReady, ATTACH_TIMEOUT_S)
    if not address.is_elsewhere:
        link.watch(ready.pid)
    if problem := _pass_beside(host, address, link, ready):
        link.way = f"host memory: {problem}"
        logger.warning("guest %s: KV and activations pass by %s", link.guest_id, link.way)
    return link


def _pass_beside(
    host: MigrationHost, address: GuestAddress, link: GuestClient, ready: messages.GuestReady
) -> str:
    """Open the lane that a guest on a GPU offers; return why not, empty on a CPU."""
    if ready.lane is None:
        return ready.no_lane
    device = next(iter(host.kv.tensors.values())).device
    transport: Transport | None = None
    try:
        transport = address.make_gpu_transport()
        region = transport.open(ready.lane, _LANE_TIMEOUT_S)
        link.enter(HostLane(region, device), transport)
    except (TransportError, UserError, MigrationError) as refused:
        if transport is not None:
            transport.close()
        return str(refused)
    return ""


def _open_channel(address: GuestAddress, deadline_s: float) -> StreamChannel:
    while True:
        try:
            return address.connect(deadline_s - time.monotonic())
        except PeerGoneError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
