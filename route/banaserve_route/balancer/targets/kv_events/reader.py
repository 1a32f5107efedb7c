"""Batches of one engine's KV cache events: their decoding, their order, and the view they make.

The wire format is that of vLLM's ``vllm/distributed/kv_events.py``: msgpack of a list of time,
events and data-parallel rank. Each event is a map whose ``type`` names it; unknown fields are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from banaserve_route.policies.caches.cache_view import CacheView, ViewFault
from banaserve_route.policies.caches.known_caches import KnownCaches

MAX_BATCH_BYTES = 4 << 20
"""Maximum size of a batch; the events of half a million tokens fit."""
_MAX_HASH_BYTES = 64
_GROUPS = (None, 0)
"""KV cache groups that count. Models with several kinds of attention have a group for each."""


class KvBatch(msgspec.Struct, array_like=True, gc=False):
    """Batch of events of one scheduler step.

    Attributes:
        ts: Wall-clock time of the step at the engine, in seconds.
        events: Events, not decoded yet: one of another version must not spoil the others.
    """

    ts: float
    events: list[msgspec.Raw]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_decode_batch = msgspec.msgpack.Decoder(KvBatch).decode
_decode_event = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode


class KvEventReader:
    """Reader of one engine's batches in the order of their sequence numbers, which begin at 0.

    A batch that is missing or cannot be read may have removed any block: the view is cleared, and
    is whole again after ``AllBlocksCleared``, a restart of the engine, or a replay of all batches.
    A batch with a lower number and a later time than the last one shows a restart.

    Attributes:
        next: Number of the next batch; None before the first.
        num_restarts: Number of restarts of the engine that its batches have shown.
    """

    def __init__(
        self,
        view: CacheView,
        caches: KnownCaches,
        on_fault: Callable[[str], None],
        on_emptied: Callable[[], None],
    ) -> None:
        """Read into ``view``.

        Args:
            caches: Caches that the view is one of, for their counts and adapters.
            on_fault: Called with one line for the first fault of each kind.
            on_emptied: Called when the engine has restarted or cleared its cache.
        """
        self.next: int | None = None
        self.num_restarts = 0
        self._last_s = 0.0
        self._view, self._caches = view, caches
        self._on_fault, self._on_emptied = on_fault, on_emptied
        self._named: set[str] = set()

    @property
    def is_whole(self) -> bool:
        """Return whether all blocks that the engine holds are in the view."""
        return self._view.is_whole

    @staticmethod
    def decode(payload: bytes) -> KvBatch | None:
        """Return the batch; None if it is too large or is not a batch of a known version."""
        if len(payload) > MAX_BATCH_BYTES:
            return None
        try:
            return _decode_batch(payload)
        except (msgspec.DecodeError, RecursionError):
            return None

    def first_missed(self, seq: int) -> int | None:
        """Return the first number missing between the last batch and ``seq``; None if none is."""
        return self.next if self.next is not None and seq > self.next else None

    def forget(self) -> None:
        """Forget the view and the place in the sequence: the engine may have restarted."""
        self.next = None
        self._view.clear(is_whole=False)

    def nothing_published(self) -> None:
        """Record that the engine has published no batch yet, so that it holds no block."""
        self.next = 0
        self._view.clear(is_whole=True)

    def take(self, seq: int, batch: KvBatch | None) -> None:
        """Take in batch number ``seq``; None if it cannot be read."""
        if self.next is not None and seq < self.next:
            if batch is None or batch.ts <= self._last_s:
                self._caches.counts["duplicates"] += 1
                return
            self.num_restarts += 1
            self._caches.counts["restarts"] += 1
            self._on_emptied()
            self.forget()
        if self.next is None:
            self._view.clear(is_whole=seq == 0)
        elif seq > self.next:
            self.fault("lost", f"batches {self.next} to {seq - 1} are lost")
            self._view.clear(is_whole=False)
        self.next = seq + 1
        if batch is None:
            self._unreadable()
            return
        self._last_s = batch.ts
        self._caches.counts["batches"] += 1
        for event in batch.events:
            self._take_event(event)

    def replayed(self) -> None:
        """Count a replay that has come to its end."""
        self._caches.counts["replays"] += 1

    def fault(self, kind: str, line: str) -> None:
        """Count a fault, and report the first of its kind."""
        self._caches.counts[kind] += 1
        if kind not in self._named:
            self._named.add(kind)
            self._on_fault(line)

    def _take_event(self, raw: msgspec.Raw) -> None:
        try:
            event = _decode_event(raw)
            if isinstance(event, _Cleared):
                self._view.clear(is_whole=True)
                self._on_emptied()
            elif event.group_idx in _GROUPS:
                self._apply(event)
        except (msgspec.DecodeError, OverflowError, RecursionError):
            self._unreadable()

    def _apply(self, event: _Stored | _Removed) -> None:
        medium = event.medium or ""
        if isinstance(event, _Removed):
            self._view.removed(event.block_hashes, medium)
            return
        if any(isinstance(one, bytes) and len(one) > _MAX_HASH_BYTES for one in event.block_hashes):
            self.fault("unreadable", "a block's hash is too long")
            return
        extras = event.extra_keys or []
        if event.lora_name:
            self._caches.learn_adapter(event.lora_name)
            extras = extras or [[event.lora_name]] * len(event.block_hashes)
        what = (event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size)
        match self._view.stored(*what, extras, medium):
            case ViewFault.UNKNOWN_PARENT:
                self.fault(ViewFault.UNKNOWN_PARENT, "blocks follow a block that is not known")
            case ViewFault.WRONG_SIZE:
                self.fault(
                    ViewFault.WRONG_SIZE,
                    f"{len(event.block_hashes)} blocks of {event.block_size} tokens come with "
                    f"{len(event.token_ids)} tokens, or with another size than before",
                )
            case ViewFault.TOO_MANY_BLOCKS:
                self.fault(ViewFault.TOO_MANY_BLOCKS, "more blocks are held than can be kept here")

    def _unreadable(self) -> None:
        self._view.clear(is_whole=False)
        self.fault("unreadable", "an event cannot be read: is the engine of another version?")
