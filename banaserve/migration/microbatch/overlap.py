"""Overlap of host and guests: steps of a model with remote layers, run in micro-batches."""

from __future__ import annotations

import logging
import time
from typing import Any

from torch import nn

from banaserve.base.config.serve_config import MAX_MICROBATCHES
from banaserve.base.errors import MigrationError
from banaserve.contracts.migration_api import Overlapping
from banaserve.engine.compat.runner.attention import get_forward_context
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.microbatch.pipeline import (
    Pipeline,
    Segment,
    cut,
    join,
    microbatch_blocker,
    seen_of,
    segments_of,
)
from banaserve.migration.microbatch.planner import (
    HERE,
    LEAST_TOKENS,
    MicroBatchPlan,
    StageTimes,
    plan_microbatches,
)
from banaserve.migration.modules.layer_proxy import (
    LayerChain,
    LayerOrder,
    RemoteLayers,
    by_name,
    signature_of,
)
from banaserve.migration.modules.step_graphs import is_capturing

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1
SMALL_TOKENS = 2 * LEAST_TOKENS
"""Minimum number of tokens of a step that may be cut."""
_LEARN_EVERY = 8
"""Small steps for each one that is planned and learnt from, which takes tenths of a millisecond."""


class Overlap:
    """Wrapper of the model's layers while a range is remote and steps may be cut.

    The first layer that is called runs the whole step in micro-batches; the others pass its result
    on. This is right for models that do nothing between their layers, which a step in one
    micro-batch has to confirm before any step is cut.

    Args:
        blocker: Reason why steps of this engine cannot be cut; empty if they can.

    Attributes:
        max_microbatches: Maximum number of micro-batches of a step; 1: the host waits for guests.
    """

    def __init__(
        self, layers: nn.ModuleList, step_context: StepContext, blocker: str, max_microbatches: int
    ) -> None:
        self.max_microbatches = max_microbatches
        self._never_blocker = blocker
        self._placement_blocker = self._told = ""
        self._layers = layers
        # Made here in advance: the engine stands still while the wrappers are put in place.
        self._before = [_Before(self, index) for index in range(len(layers))]
        self._step_context = step_context
        self._times = StageTimes()
        self._segments: list[Segment] = []
        self._order = LayerOrder(len(layers))
        self._result: Any = None
        self._num_cut = self._num_waited = self._num_microbatches = self._num_small = 0
        self._error_fraction = 0.0

    # ---- between two steps, and when a guest is lost in one

    def allow(self, max_microbatches: int) -> None:
        """Set the maximum number of micro-batches of a step.

        Raises:
            MigrationError: The number is out of range, or steps of this engine cannot be cut.
        """
        if not 1 <= max_microbatches <= MAX_MICROBATCHES:
            raise MigrationError(
                f"a step has 1 to {MAX_MICROBATCHES} parts, not {max_microbatches}"
            )
        never_blocker = self._never_blocker or self._order.blocker
        if max_microbatches > 1 and never_blocker:
            raise MigrationError(f"steps cannot be cut, guests are waited for: {never_blocker}")
        self.max_microbatches = max_microbatches

    def step_aside(self) -> None:
        """Remove the wrappers: only layers and their proxies remain in the model's list."""
        for index, module in enumerate(self._layers):
            if isinstance(module, _Before):
                self._layers[index] = module.leave()
        self._segments = []

    def step_in(self, blocker: str) -> None:
        """Run the steps from now on, if a range of layers is away.

        Args:
            blocker: Reason why the present placement requires waiting for guests; empty if none.
        """
        self._placement_blocker = blocker
        self._tell()
        if self.max_microbatches == 1 or self.blocker:
            return
        segments = segments_of(list(self._layers))
        guests = [s.link.guest_id for s in segments if isinstance(s, RemoteLayers)]
        self._times.keep(guests)
        if not guests:
            return
        self._segments = segments
        for index, module in enumerate(self._layers):
            self._layers[index] = self._before[index].standing_before(module)

    def _tell(self) -> None:
        blocker = self.blocker if self.max_microbatches > 1 else ""
        if blocker and blocker != self._told:
            logger.warning("steps are not cut, guests are waited for: %s", blocker)
        self._told = blocker

    @property
    def blocker(self) -> str:
        """Return the reason why steps are not cut; empty if they may be cut."""
        return self._never_blocker or self._order.blocker or self._placement_blocker

    @property
    def parts_allowed(self) -> int:
        """Return the maximum number of micro-batches of a step with the present placement."""
        return 1 if self.blocker else self.max_microbatches

    def status(self) -> Overlapping:
        """Return the counts so far, for the coordinator."""
        return Overlapping(
            max_microbatches=self.max_microbatches,
            blocker=self.blocker,
            steps_cut=self._num_cut,
            steps_waited=self._num_waited,
            parts=self._num_microbatches,
            prediction_error=self._error_fraction,
        )

    # ---- in a step

    def call(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer of the model's list."""
        if is_capturing():
            return layer(*args, **kwargs)  # a graph runs its layers without these wrappers
        if index == 0:
            self._result = self._run(layer, args, kwargs)
        if self._result is not None:
            result = self._result
            if index == len(self._layers) - 1:
                self._result = None
            return result
        self._order.called(index, layer, args, kwargs)
        returned = layer(*args, **kwargs)
        self._order.returned(index, returned)
        if index == len(self._layers) - 1:
            self._tell()
        return returned

    def _run(self, first: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole step; None if the model is to call its layers one by one."""
        context, common = get_forward_context(), self._step_context.common
        if context.attn_metadata is None or common is None:
            return None
        if common.num_actual_tokens < SMALL_TOKENS:
            self._num_small += 1
            if self._num_small % _LEARN_EVERY:
                self._num_waited += 1
                return None
        arguments = by_name(signature_of(first), args, kwargs)
        if (
            not self._order.is_known
            or self.blocker
            or microbatch_blocker(arguments, common, context)
        ):
            self._num_waited += 1
            return None
        plan = plan_microbatches(
            self._times, self._stages(), seen_of(common), self.max_microbatches
        )
        batches = cut(arguments, self._step_context, context, plan.sizes)
        began_s = time.perf_counter()
        spans = [s for s in self._segments if isinstance(s, RemoteLayers)]
        if not Pipeline(self._segments, self._step_context, self._times).run(batches):
            return spans[0].zeros(arguments)
        self._count(plan, time.perf_counter() - began_s)
        return join(batches)

    def _stages(self) -> list[tuple[str, int]]:
        """Return host and guests in the order of a token's way, each with its number of layers."""
        layers: dict[str, int] = {}
        for segment in self._segments:
            name = HERE if isinstance(segment, LayerChain) else segment.link.guest_id
            layers[name] = layers.get(name, 0) + len(segment)
        return list(layers.items())

    def _count(self, plan: MicroBatchPlan, seconds: float) -> None:
        self._num_microbatches += len(plan.sizes)
        if len(plan.sizes) == 1:
            self._num_waited += 1
        else:
            self._num_cut += 1
        error_fraction = abs(plan.predicted_s - seconds) / seconds
        self._error_fraction += _SMOOTHING * (error_fraction - self._error_fraction)


class _Before(nn.Module):
    """Wrapper in the place of a layer, or of a layer's proxy."""

    layer: nn.Module

    def __init__(self, overlap: Overlap, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "overlap", overlap)
        self.index = index

    def standing_before(self, layer: nn.Module) -> _Before:
        """Wrap ``layer`` without registering it as a submodule; return the wrapper."""
        object.__setattr__(self, "layer", layer)
        return self

    def leave(self) -> nn.Module:
        """Release and return the wrapped layer."""
        layer = self.layer
        object.__delattr__(self, "layer")
        return layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.overlap.call(self.index, self.layer, args, kwargs)
