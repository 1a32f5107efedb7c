"""Times of steps whose KV is fetched from and saved to the store, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.model.learnt_time import StepWork


@dataclass(frozen=True, slots=True)
class Copied:
    """Tokens whose KV of all layers a step copies.

    Attributes:
        fetched: Tokens fetched layer by layer, each layer before it is computed.
        fetched_before: Tokens fetched before the step computes anything.
        saved: Tokens saved layer by layer, each layer after it is computed.
    """

    fetched: int = 0
    fetched_before: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Modelled seconds of one step.

    Attributes:
        step_s: Time of the whole step, including transfers that computation does not hide.
        compute_s: Time without waiting for transfers, including messages to remote modules.
        fetch_s: Time of the step's fetches, whether or not the step waited for them.
    """

    step_s: float
    compute_s: float
    fetch_s: float


def step_times(costs: StepCosts, work: StepWork, copied: Copied) -> StepTimes:
    """Return the times of a step of ``work`` whose transfers overlap as on a GPU.

    While a layer is computed, the next one is fetched and the previous one saved, each direction
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
    """Return the time until the last layer is saved; each layer is fetched, computed, then saved.

    For layers of equal times this is a pipeline of three stages: the time of all stages of the
    first layer, plus the longest stage of each other layer. The arguments are for all layers
    together.
    """
    return (
        fetch_s + compute_s + save_s + (num_layers - 1) * max(fetch_s, compute_s, save_s)
    ) / num_layers
