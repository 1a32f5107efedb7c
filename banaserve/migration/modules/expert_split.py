"""Experts of a layer in several places: some here, others in guests, their outputs added up.

``SplitExperts`` replaces the computation of a mixture-of-experts layer's routed experts. The router
stays with the host, which knows the chosen experts of every token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.runner.attention import get_forward_context
from banaserve.engine.compat.runner.experts import (
    RoutedExperts,
    compute_experts,
    join_shared_experts,
    place_experts,
    run_shared_experts,
)
from banaserve.migration.kv.remote_kv import UnitLocation
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.split_attention import GuestQuestion, GuestQuestions
from banaserve.migration.modules.step_graphs import call_in_break, is_capturing
from banaserve.migration.ranks import OTHER_FAILED, Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.tensors import to_device

NOT_HERE = -1
"""Number in the place of an expert that the request does not ask for."""


class RunExperts(messages.Run, frozen=True, tag=True):
    """Request for one step of a unit's experts of ``layer``.

    The tensors are the tokens that have chosen one of the unit's experts ``[n, hidden_size]``, the
    weights of each token's chosen experts ``[n, k]``, and the guest's numbers of these experts,
    ``NOT_HERE`` for experts of another place. The answer is the weighted sum for each token.
    """

    layer: int


class RemoteExperts:
    """Steps of some experts of one layer in one guest.

    ``submit`` and ``collect`` raise ``GuestLostError`` if the guest is lost.
    """

    def __init__(self, residence: UnitLocation, layer: int) -> None:
        self._residence = residence
        self._layer = layer

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    def submit(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Send tokens ``[n, hidden_size]``, ``[n, k]`` weights and the guest's numbers of experts.

        The number is ``NOT_HERE`` for an expert that is in another place.
        """
        residence = self._residence
        bundle = self.link.bundle()
        for tensor in (x, weights, ids):
            bundle.put(tensor)
        request = RunExperts(residence.unit_id, residence.working_epoch, self._layer)
        self.link.submit(request, bundle)

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' weighted sum for each of the submitted tokens ``x``."""
        outputs = self.link.collect(x.shape[0])
        return to_device(self.link.check_shape(outputs[0] if outputs else None, x), x.device)


class _Away(NamedTuple):
    """A unit's experts of the layer.

    Attributes:
        ids: Numbers of the experts in the layer, in the order of the guest's own numbers.
    """

    ids: tuple[int, ...]
    where: RemoteExperts


class SplitExperts:
    """The routed experts of one layer; all at home until ``arrange`` says otherwise.

    Args:
        ranks: Tensor-parallel ranks of the engine, each of which has a part of each expert.
        step_context: Step under way; None if batches are never padded.
    """

    def __init__(
        self,
        experts: RoutedExperts,
        on_lost: Callable[[GuestClient, GuestLostError], None],
        ranks: Ranks,
        step_context: StepContext | None = None,
    ) -> None:
        self.experts = experts
        self._step_context = step_context
        self._on_lost = on_lost
        self._ranks = ranks
        self._units: dict[str, _Away] = {}
        self._counts: torch.Tensor | None = None
        self._is_placed = False
        # By expert: index of the unit that has it, 0 for this engine; and its number there.
        self._place = self._number = torch.empty(0)

    @property
    def num_experts(self) -> int:
        return int(self.experts.global_num_experts)

    # ---- between two steps

    def arrange(self, unit_id: str, ids: Sequence[int], where: RemoteExperts | None) -> None:
        """Set the channel to the guest with a unit's experts; None: they are here."""
        if where is None:
            self._units.pop(unit_id, None)
        else:
            self._units[unit_id] = _Away(tuple(ids), where)
        place = torch.zeros(self.num_experts, dtype=torch.int64)
        number = torch.zeros(self.num_experts, dtype=torch.int64)
        for index, away in enumerate(self._units.values(), start=1):
            mine = torch.tensor(away.ids)
            place[mine] = index
            number[mine] = torch.arange(len(mine))
        device = next(self.experts.parameters()).device
        self._place, self._number = place.to(device), number.to(device)
        self._set_forward()

    def count(self, is_wanted: bool) -> list[int]:
        """Return how often each expert was chosen since counting began.

        The first call begins to count; a call with ``is_wanted`` False ends it.
        """
        if self._counts is None:
            device = next(self.experts.parameters()).device
            self._counts = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        counted: list[int] = self._counts.tolist()
        if not is_wanted:
            self._counts = None
        self._set_forward()
        return counted

    def _set_forward(self) -> None:
        is_needed = bool(self._units) or self._counts is not None
        if is_needed is not self._is_placed:
            place_experts(self.experts, self.forward if is_needed else None)
            self._is_placed = is_needed

    # ---- in a step

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts, as vLLM: ``[num_tokens, hidden_size]``."""
        run_shared_experts(shared_experts, shared_experts_input)
        if is_capturing():
            join_shared_experts(shared_experts, shared_experts_input)
        output: torch.Tensor = call_in_break(
            lambda given: self._sum(**given),
            lambda given: torch.zeros_like(given["x"]),
            {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids},
        )
        return output

    def _sum(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        is_step = get_forward_context().attn_metadata is not None
        if is_step and self._step_context is not None:
            # What a router chooses for the padding of a CUDA graph may be no expert.
            rows = slice(self._step_context.num_tokens)
            x, topk_weights, topk_ids = x[rows], topk_weights[rows], topk_ids[rows]
        if self._counts is not None and is_step:
            chosen = topk_ids.reshape(-1).long()
            self._counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if not self._units or not is_step:
            return compute_experts(self.experts, x, topk_weights, topk_ids)
        place = self._place[topk_ids.long()]
        shares = self._shares(x, topk_weights, topk_ids, place)
        asked = GuestQuestions([question for _, question in shares])
        output = sum_of(self.experts, x, topk_weights, topk_ids, place == 0)
        lost: dict[GuestClient, GuestLostError] = {}
        for (tokens, question), answer in zip(shares, asked.answers(), strict=True):
            if isinstance(answer, GuestLostError):
                lost.setdefault(question.link, answer)  # adds nothing: the step runs again
            else:
                output.index_add_(0, tokens, answer)
        self._settle(lost)
        return output

    def _settle(self, mine: Mapping[GuestClient, GuestLostError]) -> None:
        """Report guests that are lost on any rank; all ranks call this, whatever tokens chose."""
        links = list(dict.fromkeys(away.where.link for away in self._units.values()))
        lost = self._ranks.any_of([link in mine for link in links])
        for link in itertools.compress(links, lost):
            self._on_lost(link, mine.get(link) or link.give_up(OTHER_FAILED))

    def _shares(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, place: torch.Tensor
    ) -> list[tuple[torch.Tensor, GuestQuestion[torch.Tensor]]]:
        """Return, for each unit with a chosen expert, the tokens that chose and the question."""
        shares: list[tuple[torch.Tensor, GuestQuestion[torch.Tensor]]] = []
        number = self._number[ids.long()]
        for index, away in enumerate(self._units.values(), start=1):
            mine = place == index
            tokens = mine.any(1).nonzero().squeeze(1)
            if not len(tokens):
                continue
            there = torch.where(mine, number, NOT_HERE)[tokens].to(ids.dtype)
            mine_x, where = x[tokens], away.where
            submit = functools.partial(where.submit, mine_x, weights[tokens], there)
            collect = functools.partial(where.collect, mine_x)
            shares.append((tokens, GuestQuestion(where.link, submit, collect)))
        return shares


def sum_of(
    experts: RoutedExperts,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of the experts marked in ``wanted``; zero for a token without one.

    Tokens with the same number of wanted experts are computed together, so that no kernel has to
    know of experts that are elsewhere, and no unwanted expert is computed.

    Args:
        x: ``[num_tokens, hidden_size]``.
        weights: ``[num_tokens, k]``; ``ids`` and ``wanted`` (bool) likewise.
    """
    if bool(wanted.all()):
        return compute_experts(experts, x, weights, ids)
    output = torch.zeros_like(x)
    counts = wanted.sum(1)
    for count in counts.unique().tolist():
        if not count:
            continue
        tokens = (counts == count).nonzero().squeeze(1)
        mine = wanted[tokens]
        some_weights = weights[tokens][mine].view(-1, count)
        some_ids = ids[tokens][mine].view(-1, count)
        output[tokens] = compute_experts(experts, x[tokens], some_weights, some_ids)
    return output
