"""Times of steps whose KV is fetched from the store and saved to it, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.costs.steps import StepCosts
from banaserve.orchestrator.model.calibration import StepWork


@dataclass(frozen=True, slots=True)
class Copied:
    """Tokens whose KV of all layers a step copies.

    Attributes:
        fetched: Fetched layer by layer, each before its layer is computed.
        fetched_before: Fetched before the step computes anything.
        saved: Saved layer by layer, each after its layer is computed.
    """

    fetched: int = 0
    fetched_before: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Modelled seconds of one step.

    Attributes:
        step_s: From its begin to its end, with whatever transfers nothing hides.
        compute_s: Without waiting for transfers; messages to remote modules included.
        fetch_s: Of its fetches, whether or not anything waited for them.
    """

    step_s: float
    compute_s: float
    fetch_s: float


def step_times(costs: StepCosts, work: StepWork, copied: Copied) -> StepTimes:
    """Returns the times of a step of ``work``, its transfers overlapped as on a GPU.

    While a layer is computed the next one is fetched and the one before saved, each direction
    over the profile's link (BanaServe Eqs. 12 and 13); all layers take the same time.
    """
    compute_s, _ = costs.mixed_s(
        int(work.prefill_tokens),
        int(work.prefill_pairs),
        int(work.decode_requests),
        int(work.context_tokens),
    )
    before_s = copied.fetched_before * costs.fetch_token_s
    fetch_s = copied.fetched * costs.fetch_token_s
    save_s = copied.saved * costs.fetch_token_s
    ended_s = overlapped_s(fetch_s, compute_s, save_s, costs.num_layers)
    return StepTimes(before_s + ended_s, compute_s, before_s + fetch_s)


def overlapped_s(fetch_s: float, compute_s: float, save_s: float, num_layers: int) -> float:
    """Returns when the last layer is saved, each layer fetched, then computed, then saved.

    For layers that all take the same this is the pipeline of three stages: every stage of the
    first layer, and the longest stage of each other one. The arguments are for all layers.
    """
    return (
        fetch_s + compute_s + save_s + (num_layers - 1) * max(fetch_s, compute_s, save_s)
    ) / num_layers
