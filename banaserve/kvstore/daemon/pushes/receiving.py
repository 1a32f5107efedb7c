"""Reception of blocks that other machines' stores push into this one before a client asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from banaserve.base.errors import ProtocolError
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.promoter import Promoter
from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import HOLD_S, IndexEntry
from banaserve.kvstore.peers.messages import OfferPush, PushRange
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.transport.interface import Tensor


class Reception:
    """Reception of one push by the connection's thread; its blocks may not be read before it ends.

    ``memory`` is that of each wanted block, by its position in the offer; ``began_s`` is a time of
    the clock of the store's thread.
    """

    def __init__(self, offer: OfferPush, memory: dict[int, BlockBytes], began_s: float) -> None:
        self.push_id = offer.push_id
        self.num_bytes = offer.num_bytes
        self.wanted = sorted(memory)
        self._memory = memory
        self._filled = dict.fromkeys(memory, 0)
        self._began_s = began_s
        self._total_bytes = len(memory) * offer.num_bytes
        self._received_bytes = 0

    @property
    def open(self) -> list[int]:
        """Blocks that have not ended."""
        return list(self._memory)

    def targets(self, message: PushRange, sizes: Sequence[int]) -> list[BlockBytes]:
        """Return the memory for the bytes of a range, whose tensors have ``sizes`` in bytes.

        Raises:
            ProtocolError: The number of tensors is wrong, a block is not wanted, or this is not
                the block's next range.
        """
        first = message.first_byte
        if len(sizes) != len(message.numbers) or len(set(message.numbers)) != len(sizes):
            raise ProtocolError("a range without its bytes")
        for number, size in zip(message.numbers, sizes, strict=True):
            if self._filled.get(number) != first or first + size > self.num_bytes:
                raise ProtocolError(f"a range of block {number} is not the next one of it")
        pairs = zip(message.numbers, sizes, strict=True)
        return [self._memory[number][first : first + size] for number, size in pairs]

    def received(self, message: PushRange, tensors: Sequence[Tensor]) -> None:
        """Take in a range that has arrived and was checked; raises as ``targets`` does."""
        sizes = [tensor.data.size for tensor in tensors]
        for target, tensor in zip(self.targets(message, sizes), tensors, strict=True):
            if target.size and target.ctypes.data != tensor.data.ctypes.data:
                target[:] = tensor.data
        for number, size in zip(message.numbers, sizes, strict=True):
            self._filled[number] += size
            self._received_bytes += size

    def ended(self, done: Sequence[int], failed: Sequence[int]) -> None:
        """Remove blocks that have ended, complete (``done``) or not (``failed``).

        Raises:
            ProtocolError: A block is not wanted, has ended before, or is done but incomplete.
        """
        if any(self._filled.get(number) != self.num_bytes for number in done):
            raise ProtocolError("a block has ended that has not come")
        numbers = {*done, *failed}
        if len(numbers) != len(done) + len(failed) or not numbers <= self._memory.keys():
            raise ProtocolError("a block has ended that is not on its way")
        for number in numbers:
            del self._memory[number], self._filled[number]

    def left_s(self, now_s: float) -> float:
        """Return the seconds until all bytes have arrived, at the average speed until now."""
        elapsed_s = now_s - self._began_s
        if not self._received_bytes:
            return elapsed_s
        return elapsed_s * (self._total_bytes / self._received_bytes - 1.0)


class Receiving:
    """Pushes to this store under way. One thread calls all methods.

    A pushed block is treated like one that a tier loads: it may be leased, and is readable only
    once its sender has committed it and all of its bytes have arrived. Meanwhile ``promoter``
    predicts for readers how long to wait.
    """

    def __init__(
        self,
        carved: CarvedPool,
        promoter: Promoter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = 0
        self._promoter = promoter
        self._clock = clock
        self._carved = carved
        self._entries: dict[Reception, dict[int, IndexEntry]] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether slots are being written by pushes."""
        return bool(self._entries)

    def accept(self, offer: OfferPush) -> Reception:
        """Give slots to those blocks of an offer that are not in the pool, if there is room.

        An offer with a hold gets slots for all of its blocks or for none: of two prompts that each
        had a part of the room, neither would ever get the rest.
        """
        self._carved.index.expire(self._clock())
        entries = dict(self._promoted(offer))
        if offer.hold and not self._hold(offer, self._carved.index):
            self._carved.index.end_hold(offer.hold)  # of the prompt's earlier blocks, if any
            for entry in entries.values():
                self._carved.index.end_promotion(entry, filled=False)
            entries = {}
        memory = {number: self._carved.bytes_of(entry) for number, entry in entries.items()}
        reception = Reception(offer, memory, self._clock())
        if entries:
            self._entries[reception] = entries
            for entry in entries.values():
                self._promoter.expect(entry, reception.left_s)
        return reception

    def _promoted(self, offer: OfferPush) -> list[tuple[int, IndexEntry]]:
        parent, found = offer.first_parent, []
        if offer.num_bytes != self._carved.slot_bytes:
            return []
        for number, key in enumerate(offer.keys):
            if self._carved.index.get(key) is None:
                entry = self._carved.promote(key, parent, offer.tenant)
                if entry is None:
                    break
                found.append((number, entry))
            parent = key
        return found

    def _hold(self, offer: OfferPush, index: BlockIndex) -> bool:
        """Hold all blocks of ``offer``; False if one or its first parent is not in the pool."""
        before = [] if offer.first_parent is None else [offer.first_parent]
        if any(index.get(key) is None for key in (*before, *offer.keys)):
            return False
        index.hold(offer.hold, offer.keys, self._clock() + HOLD_S, offer.num_readers)
        return True

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Make the ``done`` blocks of a push readable, and drop the ``failed`` ones."""
        entries = self._entries.get(reception)
        if entries is None:
            return
        for numbers, filled in ((done, True), (failed, False)):
            for number in numbers:
                entry = entries.pop(number)
                self._promoter.expect(entry, None)
                self._carved.index.end_promotion(entry, filled=filled)
        self.num_blocks += len(done)
        if not entries:
            del self._entries[reception]
