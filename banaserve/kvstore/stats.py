"""Statistics of the store for clients, operators and metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec

from banaserve.kvstore.index.records import IndexStats
from banaserve.kvstore.measure import counter, gauge
from banaserve.kvstore.tiers.interface import TierStats


class CopyCounters(msgspec.Struct, kw_only=True):
    """Counters of the copies between memory and one tier."""

    promoted: Annotated[int, counter("Blocks copied into memory.")] = 0
    promotion_failures: Annotated[int, counter("Copies into memory that failed here.")] = 0
    declined: Annotated[
        int, counter("Requested blocks not fetched because computing was predicted cheaper.")
    ] = 0
    predicted_fetch_s: Annotated[float, counter("Seconds predicted for promoted blocks.")] = 0.0
    measured_fetch_s: Annotated[float, counter("Seconds that the same blocks took.")] = 0.0
    demoted: Annotated[int, counter("Blocks written behind.")] = 0
    demotion_failures: Annotated[int, counter("Writes behind that failed.")] = 0
    dropped_before_demotion: Annotated[
        int, counter("Blocks that left memory, or the backlog, before they were written.")
    ] = 0


class TierReport(CopyCounters, kw_only=True):
    """Numbers of a tier, counted by the tier itself (``stats``) and by the store."""

    stats: TierStats
    promoting_slots: Annotated[int, gauge("Slots that it fills or is about to fill.")] = 0
    backlog_blocks: Annotated[int, gauge("Blocks waiting to be written to it.")] = 0


class StoreStats(IndexStats, kw_only=True):
    """Counters and gauges of the store.

    Attributes:
        generation: Generation of the current pool; 0 until the first client has set the slot size.
        slot_bytes: Size of a slot; 0 until the first client has set it.
        tiers: Reports of the tiers below memory, fastest first.
    """

    generation: int
    slot_bytes: int
    capacity_bytes: Annotated[int, gauge("Size of the pool.")]
    used_bytes: Annotated[int, gauge("Total size of the slots in use.")]
    quarantined_slots: Annotated[
        int, gauge("Slots being written whose connection is lost while its process lives.")
    ]
    clients: Annotated[int, gauge("Connections that share blocks.")]
    joined: Annotated[
        int, counter("Keys asked for by acquire that were already promoted for another client.")
    ]
    corrupt_blocks: Annotated[
        int, counter("Blocks in memory whose checksum was wrong when requested.")
    ]
    refused_clients: Annotated[int, counter("Connections refused because of their fingerprint.")]
    layout_mismatches: Annotated[
        int, counter("Connections of a model and salt in use whose layout keeps blocks apart.")
    ]
    protocol_errors: Annotated[int, counter("Connections closed because of an invalid message.")]
    lent_blocks: Annotated[int, counter("Blocks that stores of other machines have fetched.")]
    lent_bytes: Annotated[int, counter("Total size of these blocks.")]
    pushed_blocks: Annotated[
        int, counter("Blocks offered to those stores while being written, then committed.")
    ]
    pushed_by_layer_blocks: Annotated[
        int, counter("Pushed blocks of which some layers were reported before others were written.")
    ]
    received_blocks: Annotated[int, counter("Blocks that those stores have pushed here.")]
    tiers: tuple[TierReport, ...]
