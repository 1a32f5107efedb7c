"""What a host asks of its guests beside steps and moves; between two steps.

What a host says of itself: plain values for the coordinator.

What a coordinator may call on a worker whose layers and heads can move.

Call them with ``collective_rpc(method, args=(...))``; they run between two engine steps. All but
``commit`` return at once: what takes long runs in a thread, ask ``status`` how far it
is. Arguments and replies are plain values. Every reply is a dictionary with ``error``: empty, or
one line that says why nothing was done.

    banaserve_migration_attach(address)
        address: fields of ``GuestAddress``. Begins to connect; ``status()["guests"][guest_id]``
        has ``state`` connecting, ready or lost. Start the guest first, or right after.
    banaserve_migration_detach(guest_id)
        Ends the connection, and so the guest. Refused while a unit runs there or moves there.
    banaserve_migration_prepare(move_id, modules, guest_id)
        modules: ``{"type": "layers", "start": 10, "end": 20}`` or
        ``{"type": "heads", "heads": [[5, [1, 2]], [12, [0]]]}`` or
        ``{"type": "context", "start": 5, "end": 10}``, all of them at home. The unit is
        called ``move_id`` from here on. A guest that serves cannot load layers: start another.
    banaserve_migration_move_on(move_id, unit_id, guest_id)
        Begins to move a unit that is away to another guest; ``guest_id`` None: back home. Home: if
        the pool has grown, shrink it first. Then as for ``prepare``.
    banaserve_migration_precopy(move_id)
        Begins to copy rounds of written blocks until they stop shrinking; callable again.
    banaserve_migration_commit(move_id)
        Phase must be prepared (then everything is copied at a standstill) or copied. Blocks for
        the stall. Reply: ``stall_s = copy_s + activate_s + swap_s``, ``commit_blocks``,
        ``commit_bytes``, ``epoch``.
    banaserve_migration_free(move_id)
        Begins to give back the source's memory. When the move is freed it has ``predicted_bytes``
        and ``freed_bytes`` where the source was the host. Until then the unit cannot move.
    banaserve_migration_abort(move_id)
        Any time before commit.
    banaserve_migration_status(memory)
        ``migration_blocker`` (empty or the reason why not), ``epoch``, ``guests`` (``steps_saved``:
        steps whose blocks a guest has saved to the store itself), ``moves``, ``units``
        (away: ``unit_id``, ``modules``, ``guest``, ``epoch``, ``num_older_blocks`` of a context),
        ``guests_lost``, ``steps_lost``,
        ``kv``: ``num_blocks`` of the start, ``max_blocks``, ``blocks_gained`` (by how much the
        pool may be larger than at the start), ``page_bytes``, ``num_layers``, ``resident_bytes``,
        ``written_blocks``. ``overlap``: ``max_microbatches``, ``blocker`` (steps are not cut; empty
        where they may be), ``steps_cut``, ``steps_waited``, ``parts``, ``prediction_error``, and
        ``sums_s`` of all steps' layers: ``predicted``, ``waiting`` (predicted for one part),
        ``measured`` and ``wrong`` (what each was off by).
        Notices dead guests. ``resident_bytes`` is counted only with
        ``memory``, for that takes milliseconds; else it is None.
    banaserve_migration_overlap(max_microbatches)
        From the next step on, steps are cut into at most so many parts where ranges of layers are
        away, so that host and guests compute at once; 1: guests are waited for. Refused out of
        range, and with the reason where steps of this engine cannot be cut.
    banaserve_migration_share(guest_id, fraction)
        The guest computes for at most this fraction of the time from here on, in (0, 1]. Waits and
        is refused as ``usage``.
    banaserve_migration_usage(guest_id)
        What a guest takes of its target: fields of ``Usage``. Waits for the guest's answer, which
        comes between two of its steps; refused while it loads layers.

A move is a dictionary: ``move_id``, ``unit_id``, ``phase`` (preparing, prepared, copying, copied,
committed, freeing, freed, aborted, failed), ``target``, ``dirty_blocks``, ``reason`` (of failed),
``prepare_s``, ``weight_bytes``, ``rounds``, ``precopy_bytes``, ``precopy_s``, and the replies of
commit and free.

The pool is the scheduler's: ``call_utility("banaserve_pool_info")`` and
``call_utility("banaserve_resize_pool", num_blocks, hold)`` on the engine core, see ``pool.py``.
Grow to ``kv.num_blocks + kv.blocks_gained`` after FREE; a reply with ``busy`` above 0 to
shrinking means that blocks in use are in the way: ask again later, and do not move home before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import msgspec

from banaserve.engine.vllm.compat import runner_hooks
from banaserve.engine.vllm.migration.host.host import Attaching, MigrationHost
from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress
from banaserve.engine.vllm.migration.types import read_modules, write_modules
from banaserve.errors import BanaServeError, MigrationError


def usage_of(host: MigrationHost, guest_id: str) -> messages.GuestUsage:
    """What a guest that is not building takes.

    Raises:
        MigrationError: It is, or is not attached, or is lost.
    """
    return host.free_link(guest_id).ask(messages.GetUsage(), messages.GuestUsage)


def bound_share(host: MigrationHost, guest_id: str, fraction: float) -> None:
    """Let a guest that is not building compute for at most ``fraction`` of the time.

    Raises:
        MigrationError: It is, or is not attached, or is lost; or the fraction is out of range.
    """
    link = host.free_link(guest_id)
    link.ask(messages.SetShare(fraction), messages.StepsDone)
    link.share = fraction


def status_of(host: MigrationHost, memory: bool) -> dict[str, Any]:
    """Guests, moves, units and memory; see ``worker_methods``."""
    kv = host.kv
    return {
        "epoch": host.epoch,
        "guests": dict(host.attaching)
        | {guest_id: _guest(link) for guest_id, link in host.links.items()},
        "moves": {move.move_id: move.status() for move in host.moves},
        "units": [
            {
                "unit_id": unit.unit_id,
                "modules": write_modules(unit.modules),
                "guest": unit.residence.link.guest_id,
                "epoch": unit.residence.epoch,
                "num_older_blocks": len(unit.away) if unit.away is not None else None,
            }
            for unit in host.placement
            if unit.residence is not None
        ],
        "guests_lost": host.num_guests_lost,
        "steps_lost": host.lost_steps.num_lost,
        "overlap": host.placement.overlap.status(),
        "kv": {
            "num_blocks": kv.num_blocks,
            "max_blocks": kv.max_blocks,
            "blocks_gained": host.blocks_gained,
            "page_bytes": kv.page_bytes,
            "num_layers": host.placement.num_layers,
            "resident_bytes": kv.resident_bytes if memory else None,
            "written_blocks": len(host.watch.written),
        },
    }


def _guest(link: GuestClient) -> dict[str, Any]:
    state = "ready" if link.lost is None else "lost"
    facts = {
        "round_trips": link.round_trips,
        "share": link.share,
        "steps_saved": link.num_saved,
    }
    return {"state": state, "reason": link.lost or "", **facts}


Reply = dict[str, Any]
Method = Callable[..., Reply]


def _answered(method: Method) -> Method:
    """Turn what is refused into a reply: an exception would lose its class on the way."""

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Reply:
        try:
            return {"error": "", **method(*args, **kwargs)}
        except (BanaServeError, msgspec.ValidationError) as refused:
            return {"error": str(refused)}

    return answer


class MigrationMethods:
    """Mixed into vLLM's worker; see the module's text for arguments and replies."""

    def _migration(self) -> MigrationHost:
        found = runner_hooks.host_of(self.model_runner)  # type: ignore[attr-defined]
        if isinstance(found, MigrationHost):
            return found
        raise MigrationError(found or "this engine was started without live migration")

    @_answered
    def banaserve_migration_attach(self, address: Reply) -> Reply:
        guest = msgspec.convert(address, GuestAddress)
        Attaching.begin(self._migration(), guest)
        return {"guest_id": guest.guest_id}

    @_answered
    def banaserve_migration_detach(self, guest_id: str) -> Reply:
        self._migration().detach(guest_id)
        return {"guest_id": guest_id}

    @_answered
    def banaserve_migration_prepare(self, move_id: str, modules: Reply, guest_id: str) -> Reply:
        return self._migration().prepare(move_id, read_modules(modules), guest_id).status()

    @_answered
    def banaserve_migration_move_on(
        self, move_id: str, unit_id: str, guest_id: str | None = None
    ) -> Reply:
        return self._migration().prepare_again(move_id, unit_id, guest_id).status()

    @_answered
    def banaserve_migration_precopy(self, move_id: str) -> Reply:
        return self._migration().precopy(move_id).status()

    @_answered
    def banaserve_migration_commit(self, move_id: str) -> Reply:
        host = self._migration()
        return {**host.commit(move_id).status(), "epoch": host.epoch}

    @_answered
    def banaserve_migration_free(self, move_id: str) -> Reply:
        return self._migration().free(move_id).status()

    @_answered
    def banaserve_migration_abort(self, move_id: str) -> Reply:
        return self._migration().abort(move_id).status()

    @_answered
    def banaserve_migration_overlap(self, max_microbatches: int) -> Reply:
        placement = self._migration().placement
        placement.set_overlap(max_microbatches)
        return placement.overlap.status()

    @_answered
    def banaserve_migration_share(self, guest_id: str, fraction: float) -> Reply:
        bound_share(self._migration(), guest_id, fraction)
        return {"share": fraction}

    @_answered
    def banaserve_migration_usage(self, guest_id: str) -> Reply:
        usage = usage_of(self._migration(), guest_id)
        return cast(Reply, msgspec.to_builtins(usage))

    @_answered
    def banaserve_migration_status(self, memory: bool = False) -> Reply:
        try:
            host = self._migration()
        except MigrationError as reason:
            return {"migration_blocker": str(reason)}
        host.check_guests()
        return {"migration_blocker": "", **status_of(host, memory)}
