"""Report of a confirmation, as text and as JSON, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from banaserve.cli.terminal.console import print_rows
from banaserve_bench.loadgen.modelled_time import MOST_LATE
from banaserve_bench.plan.confirm.confirmation import Confirmation
from banaserve_bench.plan.confirm.history import (
    PastError,
    append_errors,
    digest_of,
    errors_path,
    read_errors,
)
from banaserve_bench.plan.search.advisor import PlanQuestion
from banaserve_bench.plan.search.trial import Device

_FIGURES = (("ttft mean, ms", "ttft_mean_s"), ("tpot mean, ms", "tpot_mean_s"))


def errors_of(device: Device, console: Console) -> list[PastError]:
    """Return the errors that advice on these step times has had; say if their file is ignored."""
    known = read_errors(errors_path())
    if known.problem:
        console.print(known.problem, highlight=False, soft_wrap=True, markup=False)
    return known.of(digest_of(device))


def keep_errors(asked: PlanQuestion, found: Sequence[Confirmation]) -> None:
    """Keep the errors of confirmations that are not void, unless the file is no list of them."""
    path = errors_path()
    errors = [one.past(asked) for one in found if not one.is_void]
    if errors and not read_errors(path).problem:
        append_errors(path, errors)


def show_confirmation(found: Sequence[Confirmation]) -> None:
    """Print predictions beside outcomes; nothing if there are none."""
    if found:
        print("\nprediction and outcome, of the same requests on engines:")
        print_rows(confirmation_rows(found), {})
        for words in void_words(found):
            print(words)


def confirmation_rows(found: Sequence[Confirmation]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each system and figure."""
    rows: list[tuple[str, ...]] = [("system", "figure", "predicted", "outcome", "error")]
    for one in found:
        name, real = one.place.candidate.name, one.outcome.figures
        shares = (f"{100 * of['goodput_fraction']:.1f}" for of in (one.predicted, real))
        points = f"{100 * one.goodput_error:+.1f} points"
        rows.append((name, "in time, %", *shares, points))
        for words, key in _FIGURES:
            times = (f"{1e3 * of[key]:.4g}" for of in (one.predicted, real))
            rows.append(("", words, *times, f"{one.error(key):+.1%}"))
    return rows


def void_words(found: Sequence[Confirmation]) -> list[str]:
    """Return a line for each system whose outcome means nothing."""
    return [
        f"{one.place.candidate.name}: void: {one.outcome.overrun_fraction:.1%} of the steps took "
        f"longer than modelled (at most {MOST_LATE:.0%}); end other programs, or give a larger "
        "--dilate"
        for one in found
        if one.is_void
    ]


def confirmation_json(found: Sequence[Confirmation]) -> list[dict[str, Any]]:
    return [
        {
            "system": one.place.candidate.name,
            "url": one.place.url,
            "predicted": one.predicted,
            "outcome": one.outcome.figures,
            "overrun_fraction": one.outcome.overrun_fraction,
            "is_void": one.is_void,
            "errors": {
                "ttft": one.error("ttft_mean_s"),
                "tpot": one.error("tpot_mean_s"),
                "goodput": one.goodput_error,
            },
        }
        for one in found
    ]
