"""Attention of a layer in several places: base of its implementations, and steps in guests.

An implementation takes the place of the one in vLLM's attention module. ``head_split`` has the one
for heads, ``context_split`` the one for sequences, ``paged_attention`` the one on our kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.runner.hooks import set_implementation
from banaserve.migration.kv.remote_kv import UnitLocation
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.tensors import to_device

if TYPE_CHECKING:  # it needs vLLM, and the kernels are also measured where vLLM is missing
    from banaserve.migration.kv.step_context import StepContext

T = TypeVar("T")
OnLost = Callable[[GuestClient, GuestLostError], None]
"""Function that is called with a guest that is lost in the middle of a step."""


# ---- questions to guests


class GuestQuestion(NamedTuple, Generic[T]):
    """Question to one guest; both functions raise ``GuestLostError`` if the guest is lost.

    Attributes:
        submit: Function that sends the question without waiting.
        collect: Function that waits for the answer and returns it.
    """

    link: GuestClient
    submit: Callable[[], None]
    collect: Callable[[], T]

    def ask(self) -> GuestLostError | None:
        """Send the question; return the error if the guest is lost."""
        try:
            self.submit()
        except GuestLostError as lost:
            return lost
        return None

    def answer(self, lost: GuestLostError | None) -> T | GuestLostError:
        """Return the answer, unless the guest is ``lost`` already or is lost meanwhile."""
        try:
            return self.collect() if lost is None else lost
        except GuestLostError as error:
            return error


class GuestQuestions(Generic[T]):
    """Questions that are submitted at once, so that this process can compute meanwhile.

    Each guest is asked once; its further questions follow after its answer. Two large requests to
    one guest would wait for each other: the guest cannot read the second while its answer to the
    first is not read.
    """

    def __init__(self, questions: Sequence[GuestQuestion[T]]) -> None:
        self._questions = questions
        self._asked: dict[int, GuestLostError | None] = {}
        links: set[GuestClient] = set()
        for number, question in enumerate(questions):
            if question.link not in links:
                links.add(question.link)
                self._asked[number] = question.ask()

    def answers(self) -> list[T | GuestLostError]:
        """Wait for all answers, even if one of the guests is lost; return them in order."""
        found = {
            number: self._questions[number].answer(lost) for number, lost in self._asked.items()
        }
        for number, question in enumerate(self._questions):
            if number not in found:
                found[number] = question.answer(question.ask())
        return [found[number] for number in range(len(self._questions))]


class RunAttention(messages.Run, frozen=True, tag=True):
    """Request for one step of the attention ``name``.

    The first tensor has the queries; of heads, key and value follow.

    Attributes:
        step_id: Id of the step; ``step`` is None if the unit has this step's description already.
        step: Description of the batch, with tensors by index; each kind of unit has its own.
    """

    step_id: int
    name: str
    step: dict[str, Any] | None


class RemoteAttention:
    """Steps of the attentions of one unit in one guest.

    Each kind of unit has its own ``_description``; ``submit`` and ``collect`` raise
    ``GuestLostError`` if the guest is lost.
    """

    def __init__(self, residence: UnitLocation, step_context: StepContext) -> None:
        self._residence = residence
        self._step_context = step_context

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    def submit(self, name: str, *tensors: torch.Tensor) -> None:
        """Send the tensors of one attention, ``[num_tokens, heads, head_size]`` each."""
        residence, step_id = self._residence, self._step_context.step_id
        bundle = self.link.bundle()
        for tensor in tensors:
            bundle.put(tensor)
        is_described = residence.described_step == step_id
        step = None if is_described else bundle.put_all(self._description())
        residence.described_step = step_id
        request = RunAttention(residence.unit_id, residence.working_epoch, step_id, name, step)
        self.link.submit(request, bundle)

    def _description(self) -> Mapping[str, Any]:
        """Return the batch of the step under way for the guest."""
        return self._step_context.fields()

    def collect(self, *wanted: torch.Tensor) -> list[torch.Tensor]:
        """Return the answer: tensors that are each like one of ``wanted``."""
        outputs = self.link.collect(self._step_context.num_tokens)
        if len(outputs) != len(wanted):
            counts = f"{len(outputs)} tensors, not {len(wanted)}"
            raise self.link.give_up(f"a step was answered with {counts}")
        return [
            to_device(self.link.check_shape(output, like), like.device)
            for output, like in zip(outputs, wanted, strict=True)
        ]


# ---- implementations


class AttentionStep(NamedTuple):
    """Arguments of an attention in one step, without padding.

    Attributes:
        query: ``[num_tokens, num_heads, head_size]``.
        key: New keys ``[num_tokens, num_kv_heads, head_size]``; ``value`` likewise.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        metadata: vLLM's attention metadata.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    metadata: Any


class ReplacedAttention(ABC):
    """Implementation of an attention that keeps the replaced one as ``inner``.

    Attributes:
        inner: Implementation that is replaced, which has all attributes that this one lacks.
    """

    def __init__(self, layer: Any) -> None:
        # No reference to the layer: the cycle would keep the KV of a unit that a guest releases.
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def _install(self, layer: Any, is_wanted: bool = True) -> None:
        """Take the place of ``inner``, or give it back; between two steps only."""
        set_implementation(layer, self if is_wanted else self.inner)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Fill ``output`` ``[num_tokens, num_heads, head_size]``, as vLLM's implementation does."""
        if attn_metadata is None:
            return output
        if self._leaves_to_inner():
            arguments = layer, query, key, value, kv_cache, attn_metadata
            whole: torch.Tensor = self.inner.forward(*arguments, output=output, **kwargs)
            return whole
        num_tokens = attn_metadata.num_actual_tokens
        new = query[:num_tokens], key[:num_tokens], value[:num_tokens]
        self._fill(output[:num_tokens], AttentionStep(*new, kv_cache, attn_metadata))
        return output

    def _leaves_to_inner(self) -> bool:
        """Return whether ``inner`` computes this step."""
        return False

    @abstractmethod
    def _fill(self, output: torch.Tensor, step: AttentionStep) -> None:
        """Fill ``output`` ``[num_tokens, num_heads, head_size]``."""


class SplitAttention(ReplacedAttention):
    """Base of an engine's attention of which guests hold a part.

    Args:
        layer: vLLM's attention module, whose ``impl`` this object becomes while it is split.
    """

    def __init__(self, layer: Any, name: str, step_context: StepContext, on_lost: OnLost) -> None:
        super().__init__(layer)
        self._layer = layer
        self._name = name
        self._step_context = step_context
        self._on_lost = on_lost
