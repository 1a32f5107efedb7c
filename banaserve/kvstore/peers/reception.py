"""Blocks of one push at the receiving store: the memory for their bytes, and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from banaserve.base.errors import ProtocolError
from banaserve.kvstore.peers.messages import OfferPush, PushRange
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.transport.interface import Tensor


class Reception:
    """Reception of one push by the connection's thread; its blocks may not be read before it ends.

    Args:
        offer: Offer of the peer.
        memory: Memory of each wanted block, by its position in the offer.
        began_s: Time of the beginning on the clock of the store's thread, in seconds.
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
        """Return the memory for the bytes of a range.

        Args:
            sizes: Sizes of the message's tensors, in bytes.

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
        """Take in a range that has arrived and was checked.

        Raises:
            ProtocolError: The range is invalid, see ``targets``.
        """
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


class BlockSink(Protocol):
    """Receiver of pushed blocks. Any thread may call; methods raise if the store is busy."""

    def accept(self, offer: OfferPush) -> Reception:
        """Give slots to those blocks of an offer that the store wants."""
        ...

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Make the ``done`` blocks readable, and drop the ``failed`` ones."""
        ...

    def end_hold(self, hold: int, reader: int | None) -> None:
        """End a hold for a decode leg that has read its blocks; None for all legs."""
        ...
