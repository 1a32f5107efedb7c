"""Units as a guest holds them: an offered region with their KV, and steps that run there."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.migration.kv.kv_staging import StagingBuffer, make_kv
from banaserve.engine.vllm.migration.kv.slot_writer import SlotWriter
from banaserve.engine.vllm.migration.modules.layer_proxy import Around
from banaserve.engine.vllm.migration.modules.partial_model import attends_with, device_of
from banaserve.engine.vllm.migration.rpc.messages import Build, CopyPages, Run, StepOutputs
from banaserve.engine.vllm.migration.rpc.tensors import TensorBundle, dtype_named
from banaserve.errors import MigrationError, ProtocolError
from banaserve.platform import linux
from banaserve.transport.interface import OfferedRegion, RegionDescriptor, Tensor, Transport
from banaserve.transport.memory import PAGE_BYTES

Answer = tuple[StepOutputs, TensorBundle]

_ADVANCE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class GuestServices:
    """What a guest lends to a unit that runs a step.

    Attributes:
        computing: Whatever computes runs within one: it bounds the guest's share.
        expect: Called with the number of messages that the host sends without waiting.
    """

    computing: Around
    expect: Callable[[int], None]


class GuestUnit(ABC):
    """One offered region with the KV of all attentions of the unit, and the epoch of its use.

    Args:
        config: Of the guest.
        transport: Offers the KV to the host.

    Attributes:
        serves: Messages with which its host asks for steps.
        places: Offset of each attention's KV in the region, by name.
        epoch: None until the host has activated the unit.
        slots: Copies blocks to the host's store; None where the host does that.
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
        """Run one step; ``request`` is of its kind and for the epoch that it runs for.

        Raises:
            ProtocolError: The request makes no sense.
        """

    def _offer(
        self, request: Build, heads: Mapping[str, int], epoch: int
    ) -> dict[str, torch.Tensor]:
        """Reserve and offer the KV caches: ``[num_blocks, num_heads, ...]`` by name.

        Args:
            heads: KV heads of each attention.

        Raises:
            MigrationError: There is no memory for the blocks that are to be backed by it.
        """
        kv = request.kv
        if self._kernels is not None:
            caches = make_kv(kv, heads, request.num_backed_blocks, self._device)
            self._landing = StagingBuffer(self._transport, caches, self._kernels, epoch)
            self._region = self._landing.region
            return caches
        dtype = dtype_named(kv.dtype)
        end = 0
        shapes: dict[str, tuple[int, ...]] = {}
        for name, num_heads in heads.items():
            shapes[name] = (kv.num_blocks, num_heads, *kv.block_shape[1:])
            self.places[name] = end
            end += -(-torch.Size(shapes[name]).numel() * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        self._region = self._transport.offer(end, epoch)
        raw = torch.from_numpy(self._region.memory.view())
        for name, start in self.places.items():
            block_bytes = torch.Size(shapes[name][1:]).numel() * dtype.itemsize
            self._back(start, request.num_backed_blocks * block_bytes)
        return {
            name: raw[start : start + torch.Size(shapes[name]).numel() * dtype.itemsize]
            .view(dtype)
            .view(shapes[name])
            for name, start in self.places.items()
        }

    def _offer_nothing(self, epoch: int) -> None:
        """For a unit without KV: a page that nobody reads, since hosts open what is offered."""
        self._region = self._transport.offer(PAGE_BYTES, epoch)

    def _back(self, first_byte: int, num_bytes: int) -> None:
        """Take pages before a step or a copy has to wait for them."""
        assert self._region is not None
        length = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            linux.madvise(
                self._region.memory.address + first_byte, length, linux.MADV_POPULATE_WRITE
            )
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.14 takes them one by one.
                self._region.close()
                raise MigrationError(f"there is no memory for its KV: {error.strerror}") from None

    @property
    def descriptor(self) -> RegionDescriptor:
        assert self._region is not None
        return self._region.descriptor

    @property
    def landing_bytes(self) -> int:
        """Of a region that only has pages on their way; 0: the region holds the KV itself."""
        return 0 if self._landing is None else self._landing.region.memory.num_bytes

    def copy_pages(self, request: CopyPages) -> None:
        """Take pages that have landed, or let pages be fetched.

        Raises:
            ProtocolError: The KV lies in the region, or the request makes no sense.
        """
        if self._landing is None:
            raise ProtocolError(f"the KV of {request.unit_id} lies in its region")
        self._landing.copy(request)

    def activate(self, epoch: int) -> None:
        """Run for messages of ``epoch`` only, and take no copies of an older one."""
        assert self._region is not None
        self._region.advance(epoch, _ADVANCE_TIMEOUT_S)
        self.epoch = epoch

    def close(self) -> None:
        """Let go of the KV."""
        if self._landing is not None:
            self._landing.close()
        elif self._region is not None:
            self._region.close()
        self._region = self._landing = None
