"""Blocks that clients are writing, pushed to other machines' stores layer by layer."""

from __future__ import annotations

import itertools
import selectors
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banaserve.base.net.addresses import written
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.mailbox import Mailbox
from banaserve.kvstore.peers.messages import MAX_KEYS, OfferPush
from banaserve.kvstore.peers.push import Push, PushLink
from banaserve.kvstore.wire import PushBlocks


@dataclass(eq=False)
class _Block:
    """Block of a push.

    Attributes:
        written: Number of layers that each part has written.
        told_bytes: Number of bytes, from the first on, that were reported to the link as final.
        is_by_layer: True if some layers were reported before others were written.
    """

    entry: IndexEntry
    written: list[int]
    told_bytes: int = 0
    is_by_layer: bool = False


@dataclass(eq=False)
class _UnderWay:
    """Push under way.

    Attributes:
        layer_bytes: Size of a layer of a block, over all parts.
        open: Blocks that are neither done nor failed, by their position in the offer.
        entries: Index entries of all blocks, pinned until the push is over.
    """

    push: Push
    link: PushLink
    layer_bytes: int
    entries: list[IndexEntry]
    open: dict[int, _Block] = field(default_factory=dict)


class Pushing:
    """Pushes under way. One thread calls all methods, and no method waits for a peer.

    A block is pinned until its push is over, so that its slot is not rewritten while the slot is
    read for the peer. The peer may let a block be read only once the block is READY here.

    Args:
        connect: Function that returns a link to the store at a host and port, which puts finished
            pushes into ``over``.
        over: Mailbox into which the links put pushes that are over.
        selector: Selector of the calling thread.
        carved: Pool of the blocks.

    Attributes:
        num_blocks: Number of blocks offered to peers and then committed, whether or not the peer
            wanted them.
        num_by_layer: Number of these blocks of which some layers were reported before others were
            written.
    """

    def __init__(
        self,
        connect: Callable[[tuple[str, int]], PushLink],
        over: Mailbox[Push],
        selector: selectors.BaseSelector,
        carved: CarvedPool,
    ) -> None:
        self.num_blocks = self.num_by_layer = 0
        self._connect = connect
        self._links: dict[str, PushLink] = {}
        self._closing: list[threading.Thread] = []
        self._over = over
        self._selector = selector
        self._carved = carved
        self._ids = itertools.count()
        self._pushes: dict[Push, _UnderWay] = {}
        self._writing: dict[int, list[tuple[_UnderWay, int]]] = defaultdict(list)
        selector.register(over.fd, selectors.EVENT_READ, self._on_over)

    @property
    def is_busy(self) -> bool:
        """Return whether slots are being read for pushes."""
        return bool(self._pushes)

    def set_peers(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Push to these stores from now on, and to no others, without waiting for any of them.

        Pushes that are under way to a store that is left out fail.
        """
        wanted = {written(*address): address for address in addresses}
        for name in [name for name in self._links if name not in wanted]:
            link = self._links.pop(name)
            pushes = [push for push, way in self._pushes.items() if way.link is link]
            # Closed in another thread, since the link's thread may be waiting for a lost machine.
            self._closing = [one for one in self._closing if one.is_alive()]
            self._closing.append(
                threading.Thread(target=self._leave, args=(link, pushes), name=f"close-push-{name}")
            )
            self._closing[-1].start()
        for name, address in wanted.items():
            if name not in self._links:
                self._links[name] = self._connect(address)

    def _leave(self, link: PushLink, pushes: Sequence[Push]) -> None:
        """Close a link in a separate thread, then end its pushes, whose memory the link read."""
        link.close()
        for push in pushes:
            self._over.put(push)

    def begin(self, request: PushBlocks, keys: Sequence[bytes], fingerprint: Fingerprint) -> bool:
        """Push the blocks of a prompt as their bytes become final.

        Args:
            request: Order of a client.
            keys: Keys of ``request`` with their namespace, in the order of their chain, the first
                without a parent. From the first key that is not in the index on, keys are left out.

        Returns:
            False if the store of the order is not a peer.
        """
        link = self._links.get(request.to)
        if link is None:
            return False
        entries: list[IndexEntry] = []
        for key in keys:
            entry = self._carved.index.get(key)
            if entry is None:
                break
            entries.append(entry)
        for first in range(0, len(entries), MAX_KEYS):
            before = entries[first - 1].key if first else None
            some = entries[first : first + MAX_KEYS]
            self._begin(link, some, before, request, fingerprint)
        return True

    def end_hold(self, to: str, hold: int, reader: int | None) -> None:
        """Tell a peer that a decode leg no longer needs the blocks that the peer holds for it."""
        if (link := self._links.get(to)) is not None:
            link.end_hold(hold, reader)

    def _begin(
        self,
        link: PushLink,
        entries: list[IndexEntry],
        first_parent: bytes | None,
        request: PushBlocks,
        fingerprint: Fingerprint,
    ) -> None:
        offer = OfferPush(
            next(self._ids),
            [entry.key for entry in entries],
            first_parent,
            self._carved.slot_bytes,
            request.tenant,
            request.hold,
            request.num_readers,
        )
        push = Push(offer, [self._carved.bytes_of(entry) for entry in entries])
        layer_bytes = fingerprint.page_bytes * fingerprint.num_parts
        way = _UnderWay(push, link, layer_bytes, entries)
        for number, entry in enumerate(entries):
            self._carved.index.pin(entry)
            way.open[number] = _Block(entry, [0] * entry.num_parts)
            self._writing[entry.serial].append((way, number))
        self._pushes[push] = way
        link.begin(push)

    def written(self, serials: Sequence[int], part: int, num_layers: int) -> None:
        """Note that ``part`` of the first ``num_layers`` layers of these slots is written."""
        ready: dict[_UnderWay, dict[tuple[int, int], list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for serial in serials:
            for way, number in self._writing.get(serial, ()):
                block = way.open.get(number)
                if block is None or part >= len(block.written):
                    continue
                block.written[part] = max(block.written[part], num_layers)
                final = min(min(block.written) * way.layer_bytes, way.push.offer.num_bytes)
                if final > block.told_bytes:
                    ready[way][block.told_bytes, final].append(number)
                    block.told_bytes = final
                    block.is_by_layer |= final < way.push.offer.num_bytes
        for way, ranges in ready.items():
            _tell(way, ranges)

    def look(self) -> None:
        """Report blocks committed or dropped since the last call; cheap if no push is under way."""
        for way in self._pushes.values():
            if way.open:
                self._look(way)

    def close(self) -> None:
        """Abort all pushes and close the links."""
        self._selector.unregister(self._over.fd)
        for link in self._links.values():
            link.close()
        for thread in self._closing:
            thread.join()
        self._over.close()

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        for way in self._pushes.values():
            assert all(entry.num_pins for entry in way.entries)
        pushed = {id(way) for way in self._pushes.values()}
        for ways in self._writing.values():
            assert ways
            assert all(id(way) in pushed for way, _ in ways)

    def _look(self, way: _UnderWay) -> None:
        done = [number for number, block in way.open.items() if block.entry.ready]
        failed = [number for number, block in way.open.items() if block.entry.dropped]
        if not done and not failed:
            return
        ranges: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.num_by_layer += sum(way.open[number].is_by_layer for number in done)
        for number in done:
            told = way.open[number].told_bytes
            ranges[told, way.push.offer.num_bytes].append(number)
        for number in (*done, *failed):
            self._forget(way, number)
        _tell(way, ranges)
        way.link.end(way.push, done, failed, is_last=not way.open)
        self.num_blocks += len(done)

    def _forget(self, way: _UnderWay, number: int) -> None:
        serial = way.open.pop(number).entry.serial
        left = [one for one in self._writing[serial] if one != (way, number)]
        if left:
            self._writing[serial] = left
        else:
            del self._writing[serial]

    def _on_over(self, _events: int) -> None:
        self._over.calm()
        for push in self._over.take():
            way = self._pushes.pop(push, None)
            if way is None:
                continue  # reported by its link, and again by the thread that closed the link
            for number in list(way.open):
                self._forget(way, number)
            for entry in way.entries:
                self._carved.index.unpin(entry)


def _tell(way: _UnderWay, ranges: dict[tuple[int, int], list[int]]) -> None:
    for (first_byte, end_byte), numbers in ranges.items():
        if end_byte > first_byte:
            way.link.ready(way.push, numbers, first_byte, end_byte)
