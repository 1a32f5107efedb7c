"""KV cache events as a vLLM engine publishes them: numbered batches, and replays of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from banaserve_route.policies.caches.cache_view import block_keys

END = (-1).to_bytes(8, "big", signed=True)
BLOCK = 4
"""Tokens of a block."""
_clock = count(1)


def batch(*events: Any) -> bytes:
    """Return the msgpack of a batch, each with a later time than the one before."""
    return msgspec.msgpack.encode([float(next(_clock)), events, 0])


def stored(
    tokens: Sequence[int], parent: bytes | None = None, name: str = "h", **fields: Any
) -> dict[str, Any]:
    """Return the event of blocks of ``tokens``, with the hashes ``name0``, ``name1``..."""
    return {
        "type": "BlockStored",
        "block_hashes": [f"{name}{number}".encode() for number in range(len(tokens) // BLOCK)],
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def removed(*hashes: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | fields


CLEARED = {"type": "AllBlocksCleared"}


def keys_of(tokens: Sequence[int], **how: Any) -> list[bytes]:
    return block_keys(tokens, BLOCK, **how)


class Publisher:
    """Publisher of one engine's events.

    Attributes:
        kept: Batches that a replay has, by their number.
        asked: Numbers from which replays were asked for.
        is_silent: True to leave demands for replays without an answer.
    """

    def __init__(self, events_port: int, replay_port: int = 0) -> None:
        self.events_port, self.replay_port = events_port, replay_port
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.is_silent = False
        self._next = 0

    def __enter__(self) -> Publisher:
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._replays = self._context.socket(zmq.ROUTER)
        self._events.bind(f"tcp://127.0.0.1:{self.events_port}")
        if self.replay_port:
            self._replays.bind(f"tcp://127.0.0.1:{self.replay_port}")
        self._answering = asyncio.get_running_loop().create_task(self._answer())
        return self

    def __exit__(self, *_: object) -> None:
        self._answering.cancel()
        # Its ports are free afterwards.
        self._context.destroy(linger=0)

    @property
    def settings(self) -> dict[str, str]:
        """Addresses of events, as the settings of a replica have them."""
        replay = f"tcp://*:{self.replay_port}" if self.replay_port else ""
        return {"kv_events": f"tcp://*:{self.events_port}", "kv_replay": replay}

    async def subscribed(self) -> None:
        """Return when a subscriber is there."""
        await asyncio.wait_for(self._events.recv(), 60)

    def lose(self, *events: Any) -> None:
        """Number and keep a batch without sending it."""
        self.kept[self._next] = batch(*events)
        self._next += 1

    async def publish(self, *events: Any) -> None:
        self.lose(*events)
        await self.send(self._next - 1, self.kept[self._next - 1])

    async def send(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        await self._events.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            while True:
                peer, _, first = await self._replays.recv_multipart()
                self.asked.append(int.from_bytes(first, "big"))
                if self.is_silent:
                    continue
                for number, payload in sorted(self.kept.items()):
                    if number >= self.asked[-1]:
                        frames = [peer, b"", b"", number.to_bytes(8, "big"), payload]
                        await self._replays.send_multipart(frames)
                await self._replays.send_multipart([peer, b"", b"", END, b""])
