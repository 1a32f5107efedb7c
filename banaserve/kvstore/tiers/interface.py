"""Interface of store tiers: places for KV blocks below the pool, larger, slower or shared."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.measure import counter, gauge

BlockBytes = npt.NDArray[np.uint8]


class BlockName(NamedTuple):
    """Name under which a tier stores a block.

    Attributes:
        key: Namespace (16 bytes) and the client's key: 32 to 80 bytes.
        parent: Key of the block before it in its chain, in the same form; None for the first.
    """

    key: bytes
    parent: bytes | None


class TierOutcome(Enum):
    """Outcome of a load or a store.

    FAILED covers errors that may be temporary (disk full, peer away). After CORRUPT the tier has
    forgotten the block.
    """

    DONE = "done"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class Completion(NamedTuple):
    """End of a load or a store; bytes in a load's target are valid only after DONE.

    Attributes:
        ticket: Ticket that ``submit_load`` or ``submit_store`` returned.
    """

    ticket: int
    outcome: TierOutcome


class TierCounts(msgspec.Struct, kw_only=True):
    """Counters that every tier keeps."""

    stores: Annotated[int, counter("Blocks written.")] = 0
    stored_bytes: Annotated[int, counter("Total size of the blocks written.")] = 0
    loads: Annotated[int, counter("Blocks read.")] = 0
    loaded_bytes: Annotated[int, counter("Total size of the blocks read.")] = 0
    evictions: Annotated[int, counter("Blocks dropped to make room.")] = 0
    missing: Annotated[int, counter("Loads of blocks that were not in the tier (any more).")] = 0
    corrupt: Annotated[
        int, counter("Records with a wrong checksum or structure: skipped, never served.")
    ] = 0
    failures: Annotated[int, counter("Loads and stores that failed otherwise.")] = 0


class TierStats(TierCounts, kw_only=True):
    """Counters and gauges of a tier.

    Attributes:
        name: Name of the tier.
        problem: Reason in one line why the tier is out of service, or stores nothing.
        keeps: Description of blocks that ``clear`` leaves for later loads; empty for none.
    """

    name: str
    available: Annotated[bool, gauge("1 while the tier is in service.")] = True
    problem: str = ""
    capacity_bytes: Annotated[int, gauge("Budget of the tier; 0 if it has none of its own.")] = 0
    used_bytes: Annotated[int, gauge("Bytes used, including headers and dead records.")] = 0
    num_blocks: Annotated[int, gauge("Blocks that a load could return.")] = 0
    in_flight: Annotated[int, gauge("Loads and stores under way.")] = 0
    load_bytes_per_s: Annotated[float, gauge("Recent speed of loads; 0 until the first.")] = 0.0
    store_bytes_per_s: Annotated[float, gauge("Recent speed of stores; 0 until the first.")] = 0.0
    keeps: str = ""


class StoreTier(Protocol):
    """Storage of blocks by key. One thread calls all methods; none waits for a device or a peer.

    A block is immutable: the same key always means the same bytes, so storing a block again
    changes nothing. A tier may hold blocks of different sizes.
    """

    @property
    def name(self) -> str:
        """Name of the tier, short and stable: the label of its metrics."""
        ...

    @property
    def fd(self) -> int:
        """File descriptor, readable when ``poll`` has something to return."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key. PENDING: a peer is being asked, look up again soon."""
        ...

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Begin to write a block, evicting others if the tier is full.

        Args:
            block: Name under which to store the block.
            source: Bytes of the block, ``[num_bytes]``, page aligned, unchanged until the
                completion.

        Returns:
            A ticket; None if the tier accepts nothing now (queue full, unavailable) or has the
            block already (then ``lookup`` returns HIT).
        """
        ...

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block.

        Args:
            key: Key under which the block was stored.
            target: Memory for the block, ``[num_bytes]``, page aligned, of the block's exact size;
                written to until the completion.

        Returns:
            A ticket; None if the tier has no such block of this size or its queue is full.
        """
        ...

    def poll(self) -> list[Completion]:
        """Return the transfers that have ended since the last call, each exactly once."""
        ...

    def clear(self) -> int:
        """Forget all blocks that are not being read or written; return their number."""
        ...

    def stats(self) -> TierStats:
        """Return the current counters and gauges."""
        ...

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        ...

    def close(self) -> None:
        """Finish the transfers under way, then free all resources. Not callable twice."""
        ...


class UrlTier(StoreTier, Protocol):
    """Tier that users choose by URL: ``--kv-store-distributed NAME://...``.

    The tier of another package implements this protocol. The package offers the class as the entry
    point NAME of the group ``banaserve.store_tiers``, and NAME is the scheme of the tier's URLs.
    Settings beyond the URL's host and path are parameters of its query. The front door imports the
    module and checks the URL; the store's daemon imports the module too and opens the tier.
    """

    @classmethod
    def check_url(cls, url: str) -> None:
        """Check ``url`` without opening or connecting to anything.

        Raises:
            UserError: The URL is invalid: one line says what to write.
        """
        ...

    @classmethod
    def from_url(cls, url: str) -> UrlTier:
        """Return the open tier. If this raises, the store goes on without the tier."""
        ...
