"""What the connector remembers of a request, and the slots that its blocks are saved to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from banaserve.engine.vllm import compat
from banaserve.engine.vllm.keys import chain
from banaserve.engine.vllm.promotion import Promotion
from banaserve.kvstore.cost_gate import Verdict
from banaserve.kvstore.interface import Lease, Slot

_TENANT_BYTES = 16
# What the engine client puts before the salts of an API key's requests.
_KEY_NAME = re.compile(r"[0-9a-f]{16}:")


@dataclass(frozen=True, slots=True)
class Offer:
    """A block to save where the store lacks it.

    Attributes:
        index: Of the block in its request.
        end_tokens: The block is whole once so many tokens of the request have been computed.
        key: What the store calls it.
        parent: The key of the block before it.
    """

    index: int
    end_tokens: int
    key: bytes
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class Save:
    """An offer that the store took: the block goes to ``slot``."""

    index: int
    end_tokens: int
    slot: Slot


@dataclass
class Tracked:
    """One request from its first match to its end.

    Attributes:
        tenant: Who pays for its blocks in the store.
        lease: Holds the fetched blocks in the store until they have been copied.
        hits: Slots of the fetched blocks, from block ``first_hit`` on.
        promotion: Of ``hits``; None where the store is not being asked.
        ask_again_at_s: Not None while the store could not say what it has.
        undecided_until_s: Until when it may say so.
        verdict: What the cost gate said of the hits; None where there were none.
        offers: What the store was last offered.
        num_claimed: Full blocks below this index have been offered to the store.
    """

    request: compat.Request
    tenant: bytes = b""
    lease: Lease | None = None
    first_hit: int = 0
    hits: list[Slot] = field(default_factory=list)
    promotion: Promotion | None = None
    ask_again_at_s: float | None = None
    undecided_until_s: float = 0.0
    verdict: Verdict | None = None
    offers: list[Offer] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    num_claimed: int = 0

    @classmethod
    def of(cls, request: compat.Request) -> Tracked:
        return cls(request, tenant_of(request.cache_salt))

    def keep(self, offers: Sequence[Offer], reserved: Sequence[Slot | None]) -> None:
        """Remember which offers the store took."""
        for offer, slot in zip(offers, reserved, strict=False):
            if slot is not None:
                self.saves.append(Save(offer.index, offer.end_tokens, slot))

    def take_ready(self, num_computed: int) -> list[Save]:
        """The saves whose blocks are whole once ``num_computed`` tokens are; they end here."""
        ready = [save for save in self.saves if save.end_tokens <= num_computed]
        if ready:
            self.saves = [save for save in self.saves if save.end_tokens > num_computed]
        return ready


def tenant_of(cache_salt: str | None) -> bytes:
    """A name, which does not tell the salt, for those who share an API key, or else a cache salt.

    The holder of a key may send a salt of its own with each request, and pays for all of them.
    """
    if not cache_salt:
        return b""
    if (key := _KEY_NAME.match(cache_salt)) is not None:
        cache_salt = key[0]
    return hashlib.blake2b(cache_salt.encode(), digest_size=_TENANT_BYTES).digest()


def full_block_offers(keys: Sequence[bytes], first: int, block_size: int) -> list[Offer]:
    """Offers of full blocks from ``first`` on."""
    pairs = chain(keys)
    return [Offer(i, (i + 1) * block_size, *pairs[i]) for i in range(first, len(pairs))]
