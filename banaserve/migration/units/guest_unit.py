"""Units as a guest holds them: an offered region with their KV, and steps that run there."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from banaserve.base.errors import MigrationError, ProtocolError
from banaserve.base.platform import linux
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.kv.kv_staging import StagingBuffer, make_kv
from banaserve.migration.kv.slot_writer import SlotWriter
from banaserve.migration.modules.layer_proxy import Around
from banaserve.migration.modules.partial_model import attends_with, device_of
from banaserve.migration.rpc.messages import Build, CopyPages, Run, StepOutputs
from banaserve.migration.rpc.tensors import TensorBundle, dtype_named
from banaserve.transport.interface import Tensor, Transport
from banaserve.transport.memory import PAGE_BYTES
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.offered_region import OfferedRegion

Answer = tuple[StepOutputs, TensorBundle]
T = TypeVar("T")

_ADVANCE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class GuestServices:
    """Services of a guest for a unit that runs a step.

    Attributes:
        computing: Factory of contexts; all computing runs within one, which bounds the guest's
            share.
        expect: Called with the number of messages that the host sends without waiting.
    """

    computing: Around
    expect: Callable[[int], None]
    bundle: Callable[[], TensorBundle] = TensorBundle


class DescribedStep(Generic[T]):
    """The step that was described last to a guest, for all messages of the step."""

    def __init__(self) -> None:
        self._last: tuple[int, T] | None = None

    def set(self, step_id: int, step: T) -> None:
        """Record a step that has been described."""
        self._last = step_id, step

    def get(self, step_id: int) -> T:
        """Return the step of this id.

        Raises:
            ProtocolError: The step has not been described.
        """
        if self._last is None or self._last[0] != step_id:
            raise ProtocolError(f"step {step_id} has not been described")
        return self._last[1]


class GuestUnit(ABC):
    """A unit in a guest: one offered region with the KV of its attentions, and its epoch.

    Attributes:
        serves: Type of the messages with which the host asks for steps.
        places: Offset of each attention's KV in the region, by name.
        epoch: Epoch of the unit; None until the host has activated the unit.
        slots: Writer of blocks to the host's store; None if the host saves them.
    """

    serves: ClassVar[type[Run]]
    weight_bytes = 0
    slots: SlotWriter | None = None

    def __init__(self, config: VllmConfig, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._device = device_of(config)
        self._kernels = attends_with(config)
        self._region: OfferedRegion | None = None
        self._landing: StagingBuffer | None = None
        self.places: dict[str, int] = {}
        self.epoch: int | None = None

    @abstractmethod
    def serve(self, request: Any, tensors: Sequence[Tensor], services: GuestServices) -> Answer:
        """Run one step; ``request`` has the type ``serves`` and the unit's epoch.

        Raises:
            ProtocolError: The request is invalid.
        """

    def _offer(
        self, request: Build[Any], heads: Mapping[str, int], epoch: int
    ) -> dict[str, torch.Tensor]:
        """Reserve, offer and return the KV caches ``[num_blocks, num_heads, ...]`` by name.

        Raises:
            MigrationError: There is no memory to back the requested number of blocks.
        """
        kv = request.kv
        if self._kernels is not None:
            caches = make_kv(kv, heads, request.num_backed_blocks, self._device)
            self._landing = StagingBuffer(self._transport, caches, self._kernels, epoch)
            self._region = self._landing.region
            return caches
        dtype = dtype_named(kv.dtype)
        shapes = {name: torch.Size((num, *kv.block_shape[1:])) for name, num in heads.items()}
        block_bytes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
        end = 0
        for name, num_bytes in block_bytes.items():
            self.places[name] = end
            end += -(-kv.num_blocks * num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._region = self._transport.offer(end, epoch)
        raw = torch.from_numpy(self._region.memory.view())
        caches = {}
        for name, start in self.places.items():
            self._back(start, request.num_backed_blocks * block_bytes[name])
            cache = raw[start : start + kv.num_blocks * block_bytes[name]].view(dtype)
            caches[name] = cache.view(kv.num_blocks, *shapes[name])
        return caches

    def _offer_nothing(self, epoch: int) -> None:
        """Offer an unused page for a unit without KV, since a host opens each unit's region."""
        self._region = self._transport.offer(PAGE_BYTES, epoch)

    def _back(self, first_byte: int, num_bytes: int) -> None:
        """Back pages with memory before a step or a copy has to wait for them."""
        assert self._region is not None
        length = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            linux.madvise(
                self._region.memory.address + first_byte, length, linux.MADV_POPULATE_WRITE
            )
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.14 backs pages on first touch only.
                self._region.close()
                raise MigrationError(f"there is no memory for its KV: {error.strerror}") from None

    @property
    def descriptor(self) -> RegionDescriptor:
        assert self._region is not None
        return self._region.descriptor

    @property
    def landing_bytes(self) -> int:
        """Return the size of a region with pages on their way only; 0 if it holds the KV itself."""
        return 0 if self._landing is None else self._landing.region.memory.num_bytes

    def copy_pages(self, request: CopyPages) -> None:
        """Copy pages from the region to the device, or put pages there for the host to fetch.

        Raises:
            ProtocolError: The region holds the KV itself, or the request is invalid.
        """
        if self._landing is None:
            raise ProtocolError(f"the KV of {request.unit_id} lies in its region")
        self._landing.copy(request)

    def activate(self, epoch: int) -> None:
        """Run for messages of ``epoch`` only, and accept no copies of an older epoch."""
        assert self._region is not None
        self._region.advance(epoch, _ADVANCE_TIMEOUT_S)
        self.epoch = epoch

    def close(self) -> None:
        """Release the KV."""
        if self._landing is not None:
            self._landing.close()
        elif self._region is not None:
            self._region.close()
        self._region = self._landing = None
