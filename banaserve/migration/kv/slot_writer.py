"""Copies of a guest's blocks into slots of its host's store, without the host."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import banaserve._native as _native
from banaserve.base.errors import FingerprintError, StoreUnavailableError
from banaserve.kvstore.client.client import StoreClient
from banaserve.migration.rpc.messages import SlotCopies, StorePlace
from banaserve.transport.memory import Memory

Around = Callable[[], contextlib.AbstractContextManager[Any]]

logger = logging.getLogger(__name__)


class SlotWriter:
    """A writer of some layers' blocks into slots that the host has reserved; it commits none.

    Args:
        client: Store client with the host's client name.
        places: Offset of each layer's blocks in ``memory``, by the layer's number in the model.
    """

    def __init__(self, client: StoreClient, memory: Memory, places: Mapping[int, int]) -> None:
        self._client = client
        self._memory = memory
        self._places = dict(places)

    @classmethod
    def open(
        cls, store: StorePlace, memory: Memory, places: Mapping[int, int]
    ) -> SlotWriter | None:
        """Connect to the store; None if it does not answer or refuses, then the host saves."""
        client = StoreClient(store.socket, store.fingerprint, client_name=store.client_name)
        try:
            client.connect()
        except (StoreUnavailableError, FingerprintError) as reason:
            logger.warning("the host saves what lies here: %s", reason)
            client.close()
            return None
        return cls(client, memory, places)

    def write(self, copies: SlotCopies, around: Around) -> bool:
        """Copy the blocks of all layers; return False if the pool has another generation.

        Raises:
            ValueError: A block or a slot does not exist; some layers may have been copied.
        """
        try:
            view = self._client.view(copies.generation)
        except StoreUnavailableError:
            return False
        page_bytes = view.fingerprint.page_bytes
        slots = np.asarray(copies.slots, np.int64) * view.slot_bytes
        blocks = np.asarray(copies.blocks, np.int64) * page_bytes
        for layer, place in self._places.items():
            with around():
                _native.copy_regions(
                    view.base_address,
                    self._memory.address,
                    slots + view.fingerprint.offset_bytes(layer),
                    blocks + place,
                    page_bytes,
                    view.memory.size,
                    self._memory.num_bytes,
                    streaming=True,  # it is another process that reads the slot
                )
        return True

    def let_go_if_lost(self) -> None:
        """Unmap the pool of a lost store; its memory is freed only then."""
        self._client.let_go_if_lost()

    def close(self) -> None:
        """Disconnect; no copy may be under way."""
        self._client.close()
