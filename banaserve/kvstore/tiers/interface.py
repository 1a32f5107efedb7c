"""Interface of store tiers: places for KV blocks below the pool, larger, slower or shared."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.stats import TierStats

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


class StoreTier(Protocol):
    """Storage of blocks by key. One thread calls all methods; none waits for a device or a peer.

    A block is immutable: the same key always means the same bytes, so storing a block again
    changes nothing. A tier may hold blocks of different sizes.
    """

    @property
    def name(self) -> str:
        """Name of the tier, short and stable: the label of its metrics."""

    @property
    def fd(self) -> int:
        """File descriptor, readable when ``poll`` has something to return."""

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key. PENDING: a peer is being asked, look up again soon."""

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

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block.

        Args:
            key: Key under which the block was stored.
            target: Memory for the block, ``[num_bytes]``, page aligned, of the block's exact size;
                written to until the completion.

        Returns:
            A ticket; None if the tier has no such block of this size or its queue is full.
        """

    def poll(self) -> list[Completion]:
        """Return the transfers that have ended since the last call, each exactly once."""

    def clear(self) -> int:
        """Forget all blocks that are not being read or written; return their number."""

    def stats(self) -> TierStats:
        """Return the current counters and gauges."""

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""

    def close(self) -> None:
        """Finish the transfers under way, then free all resources. Not callable twice."""


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

    @classmethod
    def from_url(cls, url: str) -> UrlTier:
        """Return the open tier. If this raises, the store goes on without the tier."""
