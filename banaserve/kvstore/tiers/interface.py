"""Interface of store tiers: places for KV blocks below the pool, larger, slower or shared."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from banaserve.kvstore.interface import Lookup

BlockBytes = npt.NDArray[np.uint8]


class BlockName(NamedTuple):
    """What a tier files a block under.

    Attributes:
        key: Namespace (16 bytes) and the client's key: 32 to 80 bytes.
        parent: Of the block before it in its chain, in the same form; None for the first.
    """

    key: bytes
    parent: bytes | None


class TierOutcome(Enum):
    """How a load or a store ended.

    FAILED covers what may work another time (disk full, peer away). After CORRUPT the tier has
    forgotten the block.
    """

    DONE = "done"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class Completion(NamedTuple):
    """The end of a load or a store.

    Attributes:
        ticket: What ``submit_load`` or ``submit_store`` returned.
        outcome: Bytes in a load's target mean something only after DONE.
        num_bytes: Of the block.
        seconds: From submission to completion.
    """

    ticket: int
    outcome: TierOutcome
    num_bytes: int
    seconds: float


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tier's counters (since the daemon started) and gauges (now).

    Attributes:
        name: Of the tier.
        available: False while it takes and gives nothing; ``problem`` says why in one line.
        capacity_bytes: Its budget; 0 where it has none of its own.
        used_bytes: Bytes taken up, headers and dead records included.
        num_blocks: Blocks that a load could return.
        stores: Blocks written.
        stored_bytes: Of them.
        loads: Blocks read.
        loaded_bytes: Of them.
        evictions: Blocks dropped to make room.
        missing: Loads of blocks that were not there (any more).
        corrupt: Records whose checksum or structure was wrong: skipped, never served.
        failures: Loads and stores that failed otherwise.
        in_flight: Loads and stores under way.
        load_bytes_per_s: Measured lately; 0 until the first load.
        store_bytes_per_s: Measured lately; 0 until the first store.
        keeps: Blocks that ``clear`` leaves for later loads, in words; empty for none.
    """

    name: str
    available: bool = True
    problem: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    num_blocks: int = 0
    stores: int = 0
    stored_bytes: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    evictions: int = 0
    missing: int = 0
    corrupt: int = 0
    failures: int = 0
    in_flight: int = 0
    load_bytes_per_s: float = 0.0
    store_bytes_per_s: float = 0.0
    keeps: str = ""


class StoreTier(Protocol):
    """Blocks by key. One thread calls all methods, and none of them waits for a device or a peer.

    A block is immutable: the same key always means the same bytes, so storing what is there
    already changes nothing. Blocks of different sizes lie side by side.
    """

    @property
    def name(self) -> str:
        """Short and stable: labels metrics."""
        ...

    @property
    def fd(self) -> int:
        """Readable when ``poll`` has something to return."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What is known of each key. PENDING: a peer is being asked, look again soon."""
        ...

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Begin to write a block, evicting others where the tier is full.

        Args:
            block: What to file it under.
            source: ``[num_bytes]``, page aligned, unchanged until the completion.

        Returns:
            A ticket; None where the tier takes nothing now (queue full, unavailable) or has the
            block already (then ``lookup`` says HIT).
        """
        ...

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block.

        Args:
            key: As it was stored.
            target: ``[num_bytes]``, page aligned, of the block's exact size; written to until the
                completion.

        Returns:
            A ticket; None where the tier has no such block of this size or its queue is full.
        """
        ...

    def poll(self) -> list[Completion]:
        """What has ended since the last call; each ticket comes up exactly once."""
        ...

    def evict(self, key: bytes) -> bool:
        """Forget a block. False where it is not there or is being read or written."""
        ...

    def clear(self) -> int:
        """Forget every block that is not being read or written; how many went."""
        ...

    def stats(self) -> TierStats:
        """Counters and gauges of this moment."""
        ...

    def check(self) -> None:
        """Assert what must hold between two calls."""
        ...

    def close(self) -> None:
        """Finish what is under way, then let go of everything. Not callable twice."""
        ...


class UrlTier(StoreTier, Protocol):
    """A tier that users ask for by URL: ``--kv-store-distributed NAME://...``.

    The class of another package's tier is one; it is offered as the entry point NAME of the group
    ``banaserve.store_tiers``, and NAME is the scheme of its URLs. What the tier needs beyond the
    URL's host and path are parameters of its query. The front door imports the module and checks
    the URL; the store's daemon imports it too and opens the tier.
    """

    @classmethod
    def check_url(cls, url: str) -> None:
        """Returns if ``url`` makes sense; opens and reaches for nothing.

        Raises:
            UserError: It does not: one line says what to write.
        """
        ...

    @classmethod
    def from_url(cls, url: str) -> UrlTier:
        """Returns the open tier. Where it raises, the store goes on without the tier."""
        ...
