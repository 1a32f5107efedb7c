"""What has moved or is moving, seen from the host: one object for each range or set of heads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from banaserve.engine.vllm.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.engine.vllm.migration.kv.remote_kv import RemoteKv, StagedRemoteKv
from banaserve.engine.vllm.migration.kv.step_context import StepContext
from banaserve.engine.vllm.migration.modules.context_split import ContextPlan, split_context
from banaserve.engine.vllm.migration.modules.paged_attention import Pages
from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.engine.vllm.migration.rpc.tensors import TensorBundle, to_device
from banaserve.engine.vllm.migration.types import Context, HeadSet, LayerRange, Modules
from banaserve.errors import GuestLostError, MigrationError
from banaserve.kernels.interface import PartialAttention


class UnitLocation:
    """One unit in one guest.

    Attributes:
        link: To the guest.
        kv: The unit's KV there.
        epoch: In which it was put to work; None until then.
        weight_bytes: That the guest has loaded for it.
        saves: Whether the guest can save it to the store.
    """

    saves = False

    def __init__(self, unit_id: str, link: GuestClient, kv: RemoteKv, weight_bytes: int) -> None:
        self.unit_id = unit_id
        self.link = link
        self.kv = kv
        self.weight_bytes = weight_bytes
        self.epoch: int | None = None

    def activate(self, epoch: int) -> None:
        """Put it to work: from here on it takes messages and copies of ``epoch`` only."""
        self.link.ask(messages.Activate(self.unit_id, epoch), messages.StepsDone)
        self.kv.epoch = epoch
        self.epoch = epoch

    def leave(self) -> None:
        """Let the guest forget the unit; a guest that is lost has forgotten already."""
        self.kv.close()
        try:
            self.link.ask(messages.ReleaseUnit(self.unit_id), messages.StepsDone)
        except GuestLostError:
            return
        except MigrationError as refused:
            self.link.give_up(str(refused))

    @property
    def has_landed(self) -> bool:
        """Whether the guest has to be asked for each copy of its KV."""
        return isinstance(self.kv, StagedRemoteKv)

    @property
    def working_epoch(self) -> int:
        assert self.epoch is not None
        return self.epoch

    def layers(self, watch: StepContext) -> LayersHere:
        """The unit's layers, as their proxies want them."""
        return LayersHere(self, watch)

    def heads_of(self, name: str, watch: StepContext) -> HeadsHere:
        """The unit's heads of one layer, as split attention wants them."""
        return HeadsHere(self, name, watch)

    def context_of(self, away: RemoteBlocks, watch: StepContext) -> ContextThere:
        """The unit's older blocks, as attention over a split sequence wants them."""
        return ContextThere(self, away, watch)


class LayersHere:
    """A range of layers in one guest."""

    def __init__(self, residence: UnitLocation, watch: StepContext) -> None:
        self._residence = residence
        self._watch = watch

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    @property
    def can_save(self) -> bool:
        """Whether the guest can save blocks of the layers to the store."""
        return self._residence.saves and self.link.can_be_ended

    def run(
        self, arguments: Mapping[str, Any], saves: messages.SlotCopies | None = None
    ) -> Sequence[torch.Tensor | None]:
        """One step there and back: the first layer's arguments by name, the last one's values.

        Args:
            saves: Blocks that the guest copies to the store; ``link.save_s`` says whether it has.

        Raises:
            GuestLostError: The guest is lost.
        """
        request, parcel = self._message(arguments, 0, saves)
        returned = self.link.run(request, parcel, self._watch.num_tokens)
        return self._checked(returned, arguments["hidden_states"])

    def post(
        self,
        arguments: Mapping[str, Any],
        num_follow: int,
        saves: messages.SlotCopies | None = None,
    ) -> None:
        """Send a part of a step without waiting.

        Args:
            num_follow: Parts that are posted before anything else is asked of this guest.
            saves: As for ``run``; of the whole step, with its last part.

        Raises:
            GuestLostError: The guest is lost.
        """
        self.link.post(*self._message(arguments, num_follow, saves))

    def collect(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """What the layers return for the part that was posted first, with ``hidden_states``.

        Raises:
            GuestLostError: The guest is lost.
        """
        return self._checked(self.link.collect(hidden_states.shape[0]), hidden_states)

    def _message(
        self, arguments: Mapping[str, Any], num_follow: int, saves: messages.SlotCopies | None
    ) -> tuple[messages.RunLayers, TensorBundle]:
        parcel = TensorBundle()
        request = messages.RunLayers(
            self._residence.unit_id,
            self._residence.working_epoch,
            parcel.put_all(self._watch.fields()),
            parcel.put_all(arguments),
            num_follow,
            saves,
        )
        return request, parcel

    def _checked(
        self, returned: Sequence[torch.Tensor | None], hidden_states: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        for number, tensor in enumerate(returned or [None]):
            if tensor is not None or not number:
                self.link.check_shape(tensor, hidden_states)
        device = hidden_states.device
        return [None if tensor is None else to_device(tensor, device) for tensor in returned]


class HeadsHere:
    """Some heads of one layer in one guest."""

    def __init__(self, residence: UnitLocation, name: str, watch: StepContext) -> None:
        self._residence = residence
        self._name = name
        self._watch = watch
        self._query: torch.Tensor | None = None

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    def post(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send queries and new keys and values, ``[num_tokens, heads, head_size]``."""
        residence, watch = self._residence, self._watch
        parcel = TensorBundle()
        for tensor in (query, key, value):
            parcel.put(tensor)
        self._query = query
        link = residence.link
        step = parcel.put_all(watch.fields()) if link.described_step != watch.step_id else None
        link.described_step = watch.step_id
        request = messages.RunHeads(
            residence.unit_id, residence.working_epoch, watch.step_id, self._name, step
        )
        link.post(request, parcel)

    def collect(self) -> torch.Tensor:
        """Their attention's output, ``[num_tokens, query heads, head_size]``."""
        query, self._query = self._query, None
        assert query is not None
        outputs = self.link.collect(self._watch.num_tokens)
        output = self.link.check_shape(outputs[0] if outputs else None, query)
        return to_device(output, query.device)


class ContextThere:
    """Older blocks of some layers in one guest, step by step."""

    def __init__(self, residence: UnitLocation, away: RemoteBlocks, watch: StepContext) -> None:
        self._residence = residence
        self._away = away
        self._watch = watch
        self._planned_step = self._described_step = 0
        self._plan: ContextPlan | None = None

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    def plan(self) -> ContextPlan | None:
        """How the step under way is divided: once for all layers."""
        watch = self._watch
        if self._planned_step != watch.step_id:
            assert watch.common is not None
            self._plan = split_context(watch.common, watch.block_size, self._away)
            self._planned_step = watch.step_id
        return self._plan

    def post(self, name: str, query: torch.Tensor) -> None:
        """Send queries ``[num_tokens, num_heads, head_size]`` of one layer."""
        residence, step_id = self._residence, self._watch.step_id
        assert self._plan is not None
        parcel = TensorBundle()
        parcel.put(query)
        step: dict[str, Any] | None = None
        if self._described_step != step_id:
            batch = self._plan.remote
            fields = {
                "block_table": batch.block_table,
                "query_start": batch.query_start,
                "num_tokens": batch.range_end,
            }
            step = parcel.put_all(fields)
        self._described_step = step_id
        request = messages.RunContext(
            residence.unit_id, residence.working_epoch, step_id, name, step
        )
        self.link.post(request, parcel)

    def collect(self, query: torch.Tensor) -> PartialAttention:
        """Attention over the guest's blocks, float32."""
        outputs = self.link.collect(self._watch.num_tokens)
        if len(outputs) != 2:
            raise self.link.give_up("a step over older blocks was answered without log-sum-exp")
        output, lse = outputs
        wanted = query.float()
        self.link.check_shape(output, wanted)
        self.link.check_shape(lse, wanted[..., 0])
        return PartialAttention(*(to_device(tensor, query.device) for tensor in (output, lse)))


class Unit:
    """A range of layers, a set of heads or older blocks, with one place at a time.

    Attributes:
        unit_id: Named by the coordinator through the move that took it away first.
        modules: What it is.
        names: Of its attentions, in layer order.
        residence: Where it runs; None at home.
        away: Of older blocks: which of them are in the guest.
        pages: Of older blocks: how they are read.
    """

    def __init__(
        self,
        unit_id: str,
        modules: Modules,
        names: Mapping[int, str],
        away: RemoteBlocks | None = None,
        pages: Pages | None = None,
    ) -> None:
        assert (away is not None) is isinstance(modules, Context)
        self.unit_id = unit_id
        self.away = away
        self.pages = pages
        self.modules = modules
        self.names = [names[layer] for layer in modules.layers]
        self.residence: UnitLocation | None = None

    def heads(self, name: str) -> tuple[int, ...] | None:
        """Which KV heads of an attention belong to it, ascending; None: all, with the layer."""
        if not isinstance(self.modules, HeadSet):
            return None
        layer = self.modules.layers[self.names.index(name)]
        return tuple(sorted(self.modules.heads[layer]))

    @property
    def is_layers(self) -> bool:
        return isinstance(self.modules, LayerRange)

    def num_pages(self, num_kv_heads: int) -> float:
        """How many whole layers' KV it amounts to; older blocks are not whole."""
        if self.away is not None:
            return 0.0
        if isinstance(self.modules, HeadSet):
            heads = itertools.chain.from_iterable(self.modules.heads.values())
            return sum(1 for _ in heads) / num_kv_heads
        return float(len(self.names))
