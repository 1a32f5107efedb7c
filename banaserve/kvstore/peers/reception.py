"""Blocks of one push at the store that gets them: where their bytes go, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from banaserve.errors import ProtocolError
from banaserve.kvstore.peers.messages import OfferPush, PushRange
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.transport.interface import Tensor


class Reception:
    """One push. The connection's thread receives into it; nobody may read the blocks before.

    Args:
        offer: What was offered.
        memory: Of each block that is wanted, by its place in the offer.
        began_s: On the clock of the store's thread.
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
        """Where the bytes of a range go.

        Args:
            sizes: Of its tensors.

        Raises:
            ProtocolError: It has another number of tensors, a block is not wanted, or this is not
                its next range.
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
        """A range has come, and is checked.

        Raises:
            ProtocolError: As for ``targets``.
        """
        sizes = [tensor.data.size for tensor in tensors]
        for target, tensor in zip(self.targets(message, sizes), tensors, strict=True):
            if target.size and target.ctypes.data != tensor.data.ctypes.data:
                target[:] = tensor.data
        for number, size in zip(message.numbers, sizes, strict=True):
            self._filled[number] += size
            self._received_bytes += size

    def ended(self, done: Sequence[int], failed: Sequence[int]) -> None:
        """These blocks are the store's again, whole or not.

        Raises:
            ProtocolError: One is not wanted, has ended before, or has not come as a whole.
        """
        if any(self._filled.get(number) != self.num_bytes for number in done):
            raise ProtocolError("a block has ended that has not come")
        numbers = {*done, *failed}
        if len(numbers) != len(done) + len(failed) or not numbers <= self._memory.keys():
            raise ProtocolError("a block has ended that is not on its way")
        for number in numbers:
            del self._memory[number], self._filled[number]

    def left_s(self, now_s: float) -> float:
        """Seconds until all has come, if it goes on as it has until now."""
        elapsed_s = now_s - self._began_s
        if not self._received_bytes:
            return elapsed_s
        return elapsed_s * (self._total_bytes / self._received_bytes - 1.0)


class BlockSink(Protocol):
    """Takes what peers push. Any thread may call; it raises where the store is busy."""

    def accept(self, offer: OfferPush) -> Reception:
        """Give slots to those blocks of an offer that are wanted."""
        ...

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Let blocks be read, and give others up."""
        ...

    def end_hold(self, hold: int, reader: int | None) -> None:
        """Keep blocks no longer for a decode leg that has read them; None for all."""
        ...
