"""Snapshots of a prefix tree for peers, as bytes.

Layout, little-endian: magic, unit bytes (u8), names (u16 count; u16 length and UTF-8 each), entries
(u32 count), each entry its depth (u32), label (u32 length and bytes) and stamps (u16 count; u16
place of the name and u64 stamp each). Parents come before children. Data from a peer is checked
before any of it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from banaserve.base.errors import ProtocolError
from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.prefixes.tree import PrefixTree, TreeEntry

MAGIC = b"bnpt1"
MAX_NAMES = 4096
MAX_NAME_BYTES = 256
MAX_ENTRIES = 1 << 14
MAX_STAMPS = 1 << 16
MAX_DEPTH = 256
MAX_LOADED_BYTES = 1 << 22
"""Maximum total size of the prompts of a snapshot: a small snapshot may stand for many prompts."""


def encode(entries: Sequence[TreeEntry], unit_bytes: int, max_bytes: int) -> bytes:
    """Return a snapshot of ``entries``, a tree's ``dump``, of at most about ``max_bytes``.

    The most recently used entries have priority: of a too large tree, older leaves are left out.
    """
    kept = _newest(entries, max_bytes)
    names = sorted({target for entry in kept for target in entry.stamps})[:MAX_NAMES]
    places = {name: place for place, name in enumerate(names)}
    parts = [MAGIC, struct.pack("<BH", unit_bytes, len(names))]
    for name in names:
        parts += [struct.pack("<H", len(name.encode())), name.encode()]
    parts.append(struct.pack("<I", len(kept)))
    for depth, label, stamps in kept:
        held = [(places[target], stamp) for target, stamp in stamps.items() if target in places]
        parts += [struct.pack("<II", depth, len(label)), label, struct.pack("<H", len(held))]
        parts += [struct.pack("<HQ", *one) for one in held]
    return b"".join(parts)


def decode(data: bytes, unit_bytes: int) -> list[TreeEntry]:
    """Return the entries of a snapshot.

    Raises:
        ProtocolError: The snapshot is damaged, or has another version or other units.
    """
    reader = _Reader(data)
    if reader.take(len(MAGIC)) != MAGIC:
        raise ProtocolError("a prefix snapshot of another version")
    found_bytes, num_names = reader.numbers("<BH")
    if found_bytes != unit_bytes:
        raise ProtocolError(f"a prefix snapshot of {found_bytes}-byte units, not {unit_bytes}")
    if num_names > MAX_NAMES:
        raise ProtocolError(f"a prefix snapshot with {num_names} targets")
    names = [_name(reader) for _ in range(num_names)]
    [num_entries] = reader.numbers("<I")
    if num_entries > MAX_ENTRIES:
        raise ProtocolError(f"a prefix snapshot with {num_entries} entries")
    stamps_left = MAX_STAMPS
    entries: list[TreeEntry] = []
    for _ in range(num_entries):
        depth, length = reader.numbers("<II")
        limit = min(MAX_DEPTH, entries[-1].depth + 1) if entries else 0
        if depth > limit or not length or length % unit_bytes:
            raise ProtocolError("a prefix snapshot whose entries make no tree")
        label = reader.take(length)
        [num_stamps] = reader.numbers("<H")
        stamps_left -= num_stamps
        if stamps_left < 0:
            raise ProtocolError(f"a prefix snapshot with more than {MAX_STAMPS} stamps")
        held = [reader.numbers("<HQ") for _ in range(num_stamps)]
        if any(place >= num_names for place, _ in held):
            raise ProtocolError("a prefix snapshot with an unknown target")
        entries.append(TreeEntry(depth, label, {names[place]: stamp for place, stamp in held}))
    if reader.left:
        raise ProtocolError(f"a prefix snapshot with {reader.left} bytes too many")
    return entries


def load(
    tree: PrefixTree,
    entries: Sequence[TreeEntry],
    rename: Callable[[ReplicaId], ReplicaId] = lambda target: target,
) -> int:
    """Add the prompts of ``entries`` to ``tree``, oldest first; return the number of prompts added.

    Args:
        rename: Function that maps names in the snapshot to targets: a balancer takes all of a
            peer's replicas as the peer.
    """
    found: list[tuple[int, ReplicaId, bytes]] = []
    total = 0
    for stamp, target, path in sorted(_leaves(entries), key=lambda leaf: -leaf[0]):
        total += sum(len(entries[place].label) for place in path)
        if total > MAX_LOADED_BYTES:
            break
        found.append((stamp, rename(target), b"".join(entries[place].label for place in path)))
    for _, target, prompt in reversed(found):
        tree.add(prompt, target)
    return len(found)


def _leaves(entries: Sequence[TreeEntry]) -> list[tuple[int, ReplicaId, tuple[int, ...]]]:
    """Return stamp, target and path of each entry below which its target has no entry."""
    leaves: list[tuple[int, ReplicaId, tuple[int, ...]]] = []
    path: list[int] = []
    below: list[set[ReplicaId]] = []

    def close() -> None:
        held, stamps = below.pop(), entries[path[-1]].stamps
        leaves.extend((stamps[one], one, tuple(path)) for one in stamps if one not in held)
        path.pop()
        if below:
            below[-1].update(stamps)

    for place, entry in enumerate(entries):
        while len(path) > entry.depth:
            close()
        path.append(place)
        below.append(set())
    while path:
        close()
    return leaves


def _newest(entries: Sequence[TreeEntry], max_bytes: int) -> list[TreeEntry]:
    """Return the most recently used entries, each with its ancestors, within ``max_bytes``."""
    newest = [max(entry.stamps.values(), default=0) for entry in entries]
    parents: list[int | None] = []
    path: list[int] = []
    for place, entry in enumerate(entries):
        del path[entry.depth :]
        parents.append(path[-1] if path else None)
        path.append(place)
    for place in reversed(range(len(entries))):
        above = parents[place]
        if above is not None:
            newest[above] = max(newest[above], newest[place])
    left = max_bytes
    kept: set[int] = set()
    for place in sorted(range(len(entries)), key=lambda place: (-newest[place], place)):
        if len(kept) == MAX_ENTRIES:
            break
        left -= 10 + len(entries[place].label) + 10 * len(entries[place].stamps)
        if left < 0:
            break
        kept.add(place)
    return [entries[place] for place in sorted(kept)]


def _name(reader: _Reader) -> ReplicaId:
    [length] = reader.numbers("<H")
    if not 0 < length <= MAX_NAME_BYTES:
        raise ProtocolError(f"a prefix snapshot with a name of {length} bytes")
    try:
        return ReplicaId(reader.take(length).decode())
    except UnicodeDecodeError as error:
        raise ProtocolError("a prefix snapshot with a name that is no text") from error


class _Reader:
    """Reader that takes bytes from the front, and never more than there are."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, length: int) -> bytes:
        if length > self.left:
            raise ProtocolError("a prefix snapshot that ends early")
        self._at += length
        return self._data[self._at - length : self._at]

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))
