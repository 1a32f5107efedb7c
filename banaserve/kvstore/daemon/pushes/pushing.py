"""Blocks that clients are writing, pushed to other machines' stores layer by layer."""

from __future__ import annotations

import itertools
import selectors
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.base.net.addresses import written
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.peers.messages import MAX_KEYS, OfferPush
from banaserve.kvstore.peers.push import Push, PushLink
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve.kvstore.wire import PushBlocks


@dataclass(eq=False)
class _Block:
    """Block of a push.

    Attributes:
        number: Position of the block in the offer.
        written: Number of layers that each part has written.
        told_bytes: Number of bytes, from the first on, that were reported to the link as final.
        is_by_layer: True if some layers were reported before others were written.
    """

    number: int
    entry: IndexEntry
    written: list[int]
    told_bytes: int = 0
    is_by_layer: bool = False


@dataclass(eq=False)
class _UnderWay:
    """Push under way.

    Attributes:
        layer_bytes: Size of a layer of a block, over all parts.
        entries: Index entries of all blocks, pinned until the push is over.
        open: Blocks that are neither done nor failed, by their serial.
    """

    push: Push
    link: PushLink
    layer_bytes: int
    entries: list[IndexEntry]
    open: dict[int, _Block]

    def tell(self, blocks: Sequence[tuple[_Block, int]]) -> None:
        """Report to the link that each block's bytes are final up to a number of bytes."""
        ranges: dict[tuple[int, int], list[int]] = defaultdict(list)
        for block, end_byte in blocks:
            if end_byte > block.told_bytes:
                ranges[block.told_bytes, end_byte].append(block.number)
                block.told_bytes = end_byte
        for (first_byte, end_byte), numbers in ranges.items():
            self.link.ready(self.push, numbers, first_byte, end_byte)


class Pushing:
    """Pushes under way. One thread calls all methods, and no method waits for a peer.

    A block is pinned until its push is over, so that its slot is not rewritten while the slot is
    read for the peer. The peer may let a block be read only once the block is READY here.

    Attributes:
        num_blocks: Number of blocks offered to peers and then committed, whether or not the peer
            wanted them.
        num_by_layer: Number of these blocks of which some layers were reported before others were
            written.
    """

    def __init__(self, key: bytes, selector: selectors.BaseSelector, carved: CarvedPool) -> None:
        self.num_blocks = self.num_by_layer = 0
        self._key = key
        self._links: dict[str, PushLink] = {}
        self._closing: list[threading.Thread] = []
        self._over: Mailbox[Push] = Mailbox()
        self._selector = selector
        self._carved = carved
        self._ids = itertools.count()
        self._pushes: dict[Push, _UnderWay] = {}
        selector.register(self._over.fd, selectors.EVENT_READ, self._on_over)

    @property
    def is_busy(self) -> bool:
        """Return whether slots are being read for pushes."""
        return bool(self._pushes)

    def set_peers(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Push to these stores from now on, and to no others, without waiting for any of them.

        Pushes that are under way to a store that is left out fail.

        Raises:
            RuntimeError: There are no more threads; a later call sets the addresses that are left.
        """
        wanted = {written(*address): address for address in addresses}
        for name in [name for name in self._links if name not in wanted]:
            link = self._links[name]
            pushes = [push for push, way in self._pushes.items() if way.link is link]
            # Closed in another thread, since the link's thread may be waiting for a lost machine.
            closing = threading.Thread(
                target=self._leave, args=(link, pushes), name=f"close-push-{name}"
            )
            closing.start()
            self._closing = [*(one for one in self._closing if one.is_alive()), closing]
            del self._links[name]
        for name, address in wanted.items():
            if name not in self._links:
                self._links[name] = PushLink(address, self._key, self._over)

    def _leave(self, link: PushLink, pushes: Sequence[Push]) -> None:
        """Close a link in a separate thread, then end its pushes, whose memory the link read."""
        link.close()
        for push in pushes:
            self._over.put(push)

    def begin(self, request: PushBlocks, keys: Sequence[bytes], fingerprint: Fingerprint) -> bool:
        """Push a prompt's blocks as their bytes become final; False if ``request.to`` is no peer.

        ``keys`` are those of ``request`` with their namespace. From the first key that is not in
        the index on, keys are left out.
        """
        link = self._links.get(request.to)
        if link is None:
            return False
        entries: list[IndexEntry] = []
        for key in dict.fromkeys(keys):  # a block is open under its serial, so once only
            if (entry := self._carved.index.get(key)) is None:
                break
            entries.append(entry)
        for first in range(0, len(entries), MAX_KEYS):
            before = entries[first - 1].key if first else None
            some = entries[first : first + MAX_KEYS]
            offer = OfferPush(
                next(self._ids),
                [entry.key for entry in some],
                before,
                self._carved.slot_bytes,
                request.tenant,
                request.hold,
                request.num_readers,
            )
            self._begin(link, offer, some, fingerprint.page_bytes * fingerprint.num_parts)
        return True

    def end_hold(self, to: str, hold: int, reader: int | None) -> None:
        """Tell a peer that a decode leg no longer needs the blocks that the peer holds for it."""
        if (link := self._links.get(to)) is not None:
            link.end_hold(hold, reader)

    def _begin(
        self, link: PushLink, offer: OfferPush, entries: list[IndexEntry], layer_bytes: int
    ) -> None:
        push = Push(offer, [self._carved.bytes_of(entry) for entry in entries])
        blocks = {
            entry.serial: _Block(number, entry, [0] * entry.num_parts)
            for number, entry in enumerate(entries)
        }
        for entry in entries:
            self._carved.index.pin(entry)
        self._pushes[push] = _UnderWay(push, link, layer_bytes, entries, blocks)
        link.begin(push)

    def written(self, serials: Sequence[int], part: int, num_layers: int) -> None:
        """Note that ``part`` of the first ``num_layers`` layers of these slots is written."""
        for way in self._pushes.values():
            if not way.open:
                continue  # all is sent, but not acknowledged yet
            num_bytes = way.push.offer.num_bytes
            final: list[tuple[_Block, int]] = []
            for serial in serials:
                block = way.open.get(serial)
                if block is None or part >= len(block.written):
                    continue
                block.written[part] = max(block.written[part], num_layers)
                end_byte = min(min(block.written) * way.layer_bytes, num_bytes)
                block.is_by_layer |= block.told_bytes < end_byte < num_bytes
                final.append((block, end_byte))
            way.tell(final)

    def look(self) -> None:
        """Report blocks committed or dropped since the last call; cheap if no push is under way."""
        for way in self._pushes.values():
            done = [block for block in way.open.values() if block.entry.ready]
            failed = [block for block in way.open.values() if block.entry.dropped]
            if not done and not failed:
                continue
            for block in (*done, *failed):
                del way.open[block.entry.serial]
            way.tell([(block, way.push.offer.num_bytes) for block in done])
            numbers = [block.number for block in done], [block.number for block in failed]
            way.link.end(way.push, *numbers, is_last=not way.open)
            self.num_blocks += len(done)
            self.num_by_layer += sum(block.is_by_layer for block in done)

    def close(self) -> None:
        """Abort all pushes and close the links."""
        self._selector.unregister(self._over.fd)
        for link in self._links.values():
            link.close()
        for thread in self._closing:
            thread.join()
        self._over.close()

    def _on_over(self, _events: int) -> None:
        self._over.calm()
        for push in self._over.take():
            way = self._pushes.pop(push, None)
            if way is None:
                continue  # reported by its link, and again by the thread that closed the link
            for entry in way.entries:
                self._carved.index.unpin(entry)
