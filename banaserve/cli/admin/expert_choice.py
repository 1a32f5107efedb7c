"""Choice of the fewest experts that move a wanted share of a layer's work.

The work of an expert depends on how often the model's router chooses it: half of the experts need
not be half of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def experts_for(chosen: Sequence[int], share: float) -> tuple[int, ...]:
    """Return the experts whose part of all choices is close to ``share``, ascending.

    Experts are ordered from most to least chosen. From each place in this order, two sets are
    considered: the experts that together just reach the share, and those that fit into it, with and
    without one more. The set nearest to the share is taken; among equals, that with fewer experts.

    Args:
        chosen: Number of choices of each expert.
        share: Wanted share of all choices, in (0, 1].

    Returns:
        At least one expert; none if nothing was chosen.
    """
    wanted = share * sum(chosen)
    by_load = sorted(
        (expert for expert, count in enumerate(chosen) if count),
        key=lambda expert: (-chosen[expert], expert),
    )
    if not by_load:
        return ()
    candidates = [one for n in range(len(by_load)) for one in _from(by_load[n:], chosen, wanted)]
    distances = ((abs(sum(chosen[e] for e in one) - wanted), len(one)) for one in candidates)
    nearest = min(zip(distances, candidates, strict=True))
    return tuple(sorted(nearest[1]))


def _from(by_load: Sequence[int], chosen: Sequence[int], wanted: float) -> Iterator[list[int]]:
    """Yield the candidate sets of these experts, none of them empty."""
    reaching: list[int] = []
    fitting: list[int] = []
    num_reaching = num_fitting = 0
    for expert in by_load:
        if num_reaching < wanted:
            reaching.append(expert)
            num_reaching += chosen[expert]
        if num_fitting + chosen[expert] <= wanted:
            fitting.append(expert)
            num_fitting += chosen[expert]
    yield reaching
    if fitting:
        yield fitting
        left = [expert for expert in by_load if expert not in set(fitting)]
        yield [*fitting, *left[-1:]]
