"""Guest server: runs the units that a host has moved to it, one message at a time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hmac
import logging
import os
import traceback
from collections.abc import Callable, Sequence

import torch

from banaserve.base.errors import MigrationError, ProtocolError, UserError
from banaserve.base.platform import huge_pages
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.engine.compat.config import VllmConfig, adopt_kv_layout, is_on_cpu
from banaserve.migration.guest.throttle import ComputeThrottle, run_low_priority
from banaserve.migration.modules.partial_model import device_of
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.gpu_lane import GuestLane
from banaserve.migration.rpc.guest_channel import GuestChannel
from banaserve.migration.rpc.tensors import TensorBundle
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.guest_unit import GuestServices, GuestUnit
from banaserve.migration.units.registry import build_unit, decode_request
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError, TransportError
from banaserve.transport.interface import Message, Tensor, Transport

logger = logging.getLogger(__name__)

_IDLE_S = 60.0

Answer = tuple[messages.Reply, TensorBundle]


class GuestServer:
    """Server of one guest process.

    It is single-threaded: vLLM's forward context and its CPU kernels are global to a process.

    Args:
        channel: Channel to the host; the guest ends when the channel closes.
        token: Secret that the host's first message must contain.
        gpu_transport: Maker of the transport of memory of the guest's GPU; None on a CPU.
    """

    def __init__(
        self,
        config: VllmConfig,
        channel: StreamChannel,
        transport: Transport,
        token: str,
        gpu_transport: Callable[[], Transport] | None = None,
    ) -> None:
        self._config = _own_config(config)
        self._channel = channel
        self._guest_channel = GuestChannel(channel)
        self._transport = transport
        self._token = token
        self._knows_host = False
        self._units: dict[str, GuestUnit] = {}
        self._share = ComputeThrottle()
        self._kv_transport = transport
        self._services = GuestServices(self._share.computing, self._guest_channel.expect)
        self._make_gpu_transport = gpu_transport
        self._gpu_transport: Transport | None = None
        self._lane: GuestLane | None = None
        self._uses_lane = False

    def serve(self) -> None:
        """Answer the host until it is gone."""
        with contextlib.suppress(PeerGoneError):
            while True:
                with contextlib.suppress(TransferTimeoutError):
                    self._answer(self._guest_channel.receive(_IDLE_S))
                for unit in self._units.values():
                    if unit.slots is not None:
                        unit.slots.let_go_if_lost()
        self._close()

    def _answer(self, message: Message) -> None:
        try:
            reply, bundle = self._obey(decode_request(message.body), message)
        except (MigrationError, ProtocolError, ValueError, TypeError) as refused:
            reply, bundle = messages.RequestRefused(str(refused)), TensorBundle()
        except Exception as broken:
            logger.error("%s", traceback.format_exc())
            reply, bundle = (
                messages.RequestRefused(f"{type(broken).__name__}: {broken}"),
                TensorBundle(),
            )
        answer = Message(messages.encode(reply), tuple(bundle.tensors), message.epoch)
        self._guest_channel.answer(message, answer)

    def _obey(self, request: messages.Request, message: Message) -> Answer:
        if isinstance(request, messages.GuestHello):
            return self._hello(request)
        if not self._knows_host:
            raise MigrationError("a guest answers to nobody who has not shown its token")
        match request:
            case messages.Run():
                return self._run(request, message)
            case messages.Build():
                return self._build(request, message.epoch), TensorBundle()
            case messages.Activate():
                reach(FailPoint.GUEST_ACTIVATE)
                self._unit(request.unit_id).activate(request.epoch)
                self._channel.min_epoch = max(self._channel.min_epoch, request.epoch)
            case messages.ReleaseUnit():
                if unit := self._units.pop(request.unit_id, None):
                    unit.close()
            case messages.CopyPages():
                self._unit(request.unit_id).copy_pages(request)
            case messages.SetShare():
                self._share.bound(request.fraction)
            case messages.UseLane():
                self._use_lane()
        return messages.StepsDone(), TensorBundle()

    def _hello(self, hello: messages.GuestHello) -> Answer:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise MigrationError("the token is not this guest's")
        self._knows_host = True
        problem = self._offer_lane()
        lane = None if self._lane is None else self._lane.region.descriptor
        return messages.GuestReady(os.getpid(), lane, problem), TensorBundle()

    def _offer_lane(self) -> str:
        """Offer memory of the GPU for the tensors of steps; return why not, empty on a CPU."""
        if self._make_gpu_transport is None:
            return ""
        try:
            self._gpu_transport = self._make_gpu_transport()
            self._lane = GuestLane(self._gpu_transport, device_of(self._config))
        except (TransportError, UserError) as refused:
            return str(refused)
        return ""

    def _use_lane(self) -> None:
        if self._lane is None or self._gpu_transport is None:
            raise MigrationError("this guest has offered no memory of a GPU")
        self._uses_lane = True
        self._kv_transport = self._gpu_transport
        self._services = dataclasses.replace(self._services, bundle=self._lane.bundle)

    def _build(self, request: messages.Build[MigrationUnit], epoch: int) -> messages.Built:
        if request.unit_id in self._units:
            raise MigrationError(f"{request.unit_id} is here already")
        if request.modules.loads_weights and self._serves():
            raise MigrationError(
                "this guest serves and would stand still while it loads layers: start another"
            )
        reach(FailPoint.GUEST_BUILD)
        adopt_kv_layout(self._config, request.kv.layout, request.kv.block_size_tokens)

        def make() -> GuestUnit:
            unit = build_unit(self._config, self._kv_transport, request, epoch)
            if request.modules.loads_weights and is_on_cpu():
                huge_pages.gather()  # as in the host: each step reads every weight
            return unit

        # The host of a serving guest waits for the build: without weights it takes milliseconds.
        unit = make() if self._serves() else run_low_priority(make)
        self._units[request.unit_id] = unit
        saves = unit.slots is not None
        return messages.Built(
            unit.descriptor, unit.places, unit.weight_bytes, saves, unit.landing_bytes
        )

    def _serves(self) -> bool:
        return any(unit.epoch is not None for unit in self._units.values())

    def _run(self, request: messages.Run, message: Message) -> Answer:
        unit = self._unit(request.unit_id, request.epoch)
        if not isinstance(request, unit.serves):
            raise ProtocolError(f"{request.unit_id} cannot run {type(request).__name__}")
        reach(FailPoint.GUEST_RUN)
        tensors: Sequence[Tensor] = message.tensors
        if self._uses_lane and self._lane is not None:
            tensors = self._lane.received(tensors)
        return unit.serve(request, tensors, self._services)

    def _unit(self, unit_id: str, epoch: int | None = None) -> GuestUnit:
        unit = self._units.get(unit_id)
        if unit is None:
            raise MigrationError(f"{unit_id} is not here (any more)")
        if epoch is not None and epoch != unit.epoch:
            raise MigrationError(f"{unit_id} is at epoch {unit.epoch}, not {epoch}")
        return unit

    def _close(self) -> None:
        for unit in self._units.values():
            unit.close()
        if self._lane is not None:
            self._lane.close()
        self._guest_channel.close()
        self._channel.close()
        for transport in (self._gpu_transport, self._transport):
            if transport is not None:
                transport.close()


def _own_config(config: VllmConfig) -> VllmConfig:
    """Return a copy of the host's configuration without the parts that belong to its engine."""
    own = copy.deepcopy(config)
    own.kv_transfer_config = None
    own.compilation_config.static_forward_context = {}
    torch.compiler.set_stance("force_eager")
    return own
