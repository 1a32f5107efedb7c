"""Linear step times, as a profile has them, that are nearest to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from banaserve.orchestrator.control.costs.profile import DecodeSection, PrefillSection

Floats = NDArray[np.float64]


def linear_fit(
    steps: Mapping[tuple[int, int, int, int], float],
) -> tuple[PrefillSection, DecodeSection]:
    """Return the linear step times that have the least squared error of ``steps``.

    Args:
        steps: Times by tokens, pairs, requests and context, in seconds.
    """
    rows = np.array([[*step, time_s] for step, time_s in steps.items()], dtype=float)
    decode, mixed = rows[rows[:, 0] == 0], rows[rows[:, 0] > 0]
    ones = np.ones(len(decode))
    fixed_s, context_s, request_s = least_squares([ones, decode[:, 3], decode[:, 2]], decode[:, 4])
    left_s = mixed[:, 4] - context_s * mixed[:, 3] - request_s * mixed[:, 2]
    ones = np.ones(len(mixed))
    prefill_s, token_s, pair_s = least_squares([ones, mixed[:, 0], mixed[:, 1]], left_s)
    return (
        PrefillSection(max(prefill_s, fixed_s), token_s, pair_s),
        DecodeSection(fixed_s, context_s, request_s),
    )


def least_squares(columns: Sequence[Floats], values: Floats) -> list[float]:
    """Return coefficients of 0 or more; a column whose coefficient would be less is left out."""
    whole = np.zeros(len(columns))
    used = list(range(len(columns)))
    while used:
        matrix = np.stack([columns[place] for place in used], axis=1)
        found = np.linalg.lstsq(matrix, values, rcond=None)[0]
        if (found >= 0).all():
            whole[used] = found
            break
        del used[int(found.argmin())]
    return [float(one) for one in whole]
