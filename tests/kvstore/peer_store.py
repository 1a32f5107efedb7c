"""A store daemon with a door for peers, and a client whose blocks say what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from banaserve.base.access.key_files import PEER_KEY_VARIABLE
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.stats import StoreStats, TierReport
from fingerprints import FINGERPRINT as SMALL
from ports import held_port
from store_process import fork_store
from waiting import eventually

FINGERPRINT = msgspec.structs.replace(SMALL, page_bytes=4096)
SLOT_BYTES = FINGERPRINT.slot_bytes
NUM_SLOTS = 16
DEADLINE_S = 60.0
KEY = "a key that both stores know"
_PATIENT = partial(fork_store, is_patient=True)


def chain(first: int, number: int) -> list[bytes]:
    return [(first + i).to_bytes(32, "little") for i in range(number)]


def block(key: bytes) -> npt.NDArray[np.uint8]:
    """The bytes of a key's block: different everywhere, the same each time."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, SLOT_BYTES, np.uint8)


class PeerStore:
    """A daemon, its door and a client of it.

    Attributes:
        address: ``HOST:PORT`` of its door.

    Args:
        start: Starts the daemon.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        name: str,
        address: str = "",
        start: Callable[..., Any] = _PATIENT,
    ) -> None:
        self.path, self.log = folder / f"{name}.sock", folder / f"{name}.log"
        self.address = address or f"127.0.0.1:{held_port(stack)}"
        self._stack, self._name, self._start = stack, name, start

    def start(self, *peers: PeerStore, key: str = KEY, num_slots: int = NUM_SLOTS) -> None:
        options = ["--poison-free-slots", "--listen", self.address]
        options += [f"--peer={peer.address}" for peer in peers]
        with self.log.open("ab") as log, pytest.MonkeyPatch.context() as patch:
            patch.setenv(PEER_KEY_VARIABLE, key)
            self.process = self._start(self.path, num_slots * SLOT_BYTES, *options, stderr=log)
        self._stack.callback(self.kill)
        self.client = StoreClient(
            self.path, FINGERPRINT, client_name=self._name, timeout_s=DEADLINE_S
        )
        self._stack.callback(self.client.close)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stats(self) -> StoreStats:
        return fetch_stats(self.path, DEADLINE_S)

    def peers(self) -> TierReport:
        return next(tier for tier in self.stats().tiers if tier.stats.name == "peers")

    def is_linked(self) -> bool:
        return self.peers().stats.available

    def write(self, keys: Sequence[bytes]) -> None:
        pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
        slots = [slot for slot in self.client.exchange(reserve=pairs).reserved if slot is not None]
        assert len(slots) == len(keys)
        view = self.client.view()
        for key, slot in zip(keys, slots, strict=True):
            first = view.offset_bytes(slot)
            view.memory[first : first + SLOT_BYTES] = block(key)
        assert self.client.commit(slots)

    def read(self, keys: Sequence[bytes]) -> int:
        """Read what there is of a chain, here or at a peer; how many blocks, each right."""
        found = self.client.exchange(acquire=keys)
        while found.undecided:
            if found.lease is not None:
                self.client.release(found.lease)
            found = self.client.exchange(acquire=keys)
        if found.lease is None:
            return 0
        eventually(lambda: Lookup.PENDING not in self.client.arrivals(found.slots))
        view, num_right = self.client.view(), 0
        for key, slot in zip(keys, found.slots, strict=False):
            if self.client.arrivals([slot]) != [Lookup.HIT]:
                break
            first = view.offset_bytes(slot)
            assert np.array_equal(view.memory[first : first + SLOT_BYTES], block(key))
            num_right += 1
        self.client.release(found.lease)
        return num_right
