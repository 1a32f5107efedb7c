"""What a host says of itself: plain values for the coordinator."""

from __future__ import annotations

from typing import Any

from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.host import MigrationHost
from banaserve.engine.vllm.migration.modules import write_modules


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


def _guest(link: GuestLink) -> dict[str, Any]:
    state = "ready" if link.lost is None else "lost"
    facts = {
        "round_trips": link.round_trips,
        "share": link.share,
        "steps_saved": link.num_saved,
    }
    return {"state": state, "reason": link.lost or "", **facts}
