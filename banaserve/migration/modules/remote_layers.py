"""Steps of a range of layers in a guest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.kv.unit_location import UnitLocation
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.messages import SlotCopies
from banaserve.migration.rpc.tensors import to_device


class RunLayers(messages.Run, frozen=True, tag=True):
    """Request for one step of a range of layers.

    Attributes:
        step: Attention metadata by field: a plain value, or a list that begins with the index of
            a tensor.
        arguments: Arguments of the first layer by parameter name, encoded like ``step``.
        num_follow: Number of messages that the host sends next without waiting for this answer.
        saves: Blocks to copy to the store before the answer, as they are after the step.
    """

    step: dict[str, Any]
    arguments: dict[str, Any]
    num_follow: int = 0
    saves: SlotCopies | None = None

    @property
    def writes_store(self) -> bool:
        return self.saves is not None


class RemoteLayers:
    """Steps of a range of layers in one guest."""

    def __init__(self, residence: UnitLocation, step_context: StepContext, ranks: Ranks) -> None:
        self._residence = residence
        self._step_context = step_context
        self._ranks = ranks

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    @property
    def can_save(self) -> bool:
        """Return whether the guest can save blocks of the layers to the store."""
        return self._residence.saves and self.link.can_be_ended

    def run(
        self, arguments: Mapping[str, Any], saves: SlotCopies | None = None
    ) -> Sequence[torch.Tensor | None]:
        """Run one step in the guest and return the last layer's values, without padding's rows.

        Args:
            arguments: Arguments of the first layer, by parameter name.
            saves: Blocks for the guest to copy to the store; ``link.save_s`` is None if it did not.

        Raises:
            GuestLostError: The guest is lost.
        """
        return self._ranks.step(lambda: self._run(arguments, saves), self.link.give_up)

    def _run(
        self, arguments: Mapping[str, Any], saves: SlotCopies | None
    ) -> Sequence[torch.Tensor | None]:
        arguments = without_padding(arguments, self._step_context.num_tokens)
        self.submit(arguments, 0, saves)
        return self.collect(arguments["hidden_states"])

    def submit(
        self, arguments: Mapping[str, Any], num_follow: int, saves: SlotCopies | None = None
    ) -> None:
        """Send a part of a step without waiting.

        Args:
            num_follow: Number of parts that are submitted before any other request to this guest.
            saves: Blocks of the whole step, given with its last part; see ``run``.

        Raises:
            GuestLostError: The guest is lost.
        """
        bundle = self.link.bundle()
        request = RunLayers(
            self._residence.unit_id,
            self._residence.working_epoch,
            bundle.put_all(self._step_context.fields()),
            bundle.put_all(arguments),
            num_follow,
            saves,
        )
        self.link.submit(request, bundle)

    def collect(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return the values for the part submitted first, whose input is ``hidden_states``.

        Raises:
            GuestLostError: The guest is lost.
        """
        returned = self.link.collect(hidden_states.shape[0])
        for number, tensor in enumerate(returned or [None]):
            if tensor is not None or not number:
                self.link.check_shape(tensor, hidden_states)
        device = hidden_states.device
        return [None if tensor is None else to_device(tensor, device) for tensor in returned]


def without_padding(arguments: Mapping[str, Any], num_tokens: int) -> Mapping[str, Any]:
    """Return the arguments of a layer with the rows of the batch's tokens alone.

    A CUDA graph has more rows than the batch for which it is replayed.
    """
    num_rows = len(arguments["hidden_states"])
    if num_rows == num_tokens:
        return arguments
    return {name: _cut(value, num_rows, num_tokens) for name, value in arguments.items()}


def _cut(value: Any, num_rows: int, num_tokens: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    # Positions may have several rows for each token, and then the tokens come last.
    dim = 0 if value.is_floating_point() else -1
    return value.narrow(dim, 0, num_tokens) if value.shape[dim] == num_rows else value
