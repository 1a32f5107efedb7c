"""Confirmation of an advice: the same part of a load, simulated and on engines."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.sim.trace import Arrival
from banaserve_bench.loadgen.modelled_time import MOST_LATE
from banaserve_bench.loadgen.target import find_target
from banaserve_bench.plan.confirm.engines import EngineOutcome, at_server, paced_engines
from banaserve_bench.plan.confirm.history import PastError, digest_of
from banaserve_bench.plan.confirm.options import ConfirmOptions
from banaserve_bench.plan.search.advisor import Advice, PlanQuestion, Screening, Tell
from banaserve_bench.plan.search.candidates import Candidate

_BEST = 2
_LEAST_REQUESTS = 5
_MOST_REQUESTS = 1000


class Place(NamedTuple):
    """System and where it runs.

    Attributes:
        url: Address of a server that runs it; None for paced engines of this machine.
    """

    candidate: Candidate
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Prediction and outcome of one system, for the same requests.

    Attributes:
        predicted: Figures of the simulator.
    """

    place: Place
    predicted: Mapping[str, float]
    outcome: EngineOutcome

    @property
    def is_void(self) -> bool:
        """True if too many steps took longer than modelled for the times to mean anything."""
        return self.outcome.overrun_fraction > MOST_LATE

    def error(self, figure: str) -> float:
        """Return the relative error of a predicted figure, with its sign."""
        real = self.outcome.figures[figure]
        return self.predicted[figure] / real - 1 if real else 0.0

    @property
    def goodput_error(self) -> float:
        """Predicted share of requests within the limits, less the real one."""
        return self.predicted["goodput_fraction"] - self.outcome.figures["goodput_fraction"]

    def past(self, asked: PlanQuestion) -> PastError:
        return PastError(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            profile=asked.device.profile.name,
            digest=digest_of(asked.device),
            system=self.place.candidate.name,
            place="paced" if self.place.url is None else "url",
            ttft=self.error("ttft_mean_s"),
            tpot=self.error("tpot_mean_s"),
            goodput=self.goodput_error,
        )


def check_confirmable(asked: PlanQuestion, options: ConfirmOptions) -> None:
    """Check, before anything has run, that the advice can be confirmed.

    Raises:
        UserError: It cannot; the message says why.
    """
    if options.confirm and options.confirm_urls:
        raise UserError("give --confirm, for paced engines, or --confirm-url, not both")
    if options.confirm and asked.device.measured is not None:
        raise UserError(
            "--confirm paces engines by a profile's own times: leave out --step-times and --model, "
            "or give --confirm-url"
        )
    for word in options.confirm_urls:
        _named_place(word, asked.fixed_candidates())
    part_of(asked, options.confirm_duration_s)


def confirmed(
    asked: PlanQuestion,
    found: Screening,
    advice: Advice,
    options: ConfirmOptions,
    tell: Tell,
) -> list[Confirmation]:
    """Run the best systems and the best colocated one, or those of the given URLs.

    Raises:
        UserError: A server does not start or answer, or every request fails.
    """
    rows = part_of(asked, options.confirm_duration_s)
    done = []
    for place in places_of(found, advice, options):
        tell(f"confirm {place.candidate.name}: {len(rows)} requests")
        predicted = asked.run(place.candidate, rows, asked.scenarios[1])
        done.append(Confirmation(place, predicted, _outcome(asked, place, rows, options)))
    return done


def part_of(asked: PlanQuestion, duration_s: float) -> list[Arrival]:
    """Return the requests of the first judged load that come within ``duration_s``.

    Raises:
        UserError: There are too few.
    """
    rows = [row for row in asked.loads.others[0] if row.at_s <= duration_s][:_MOST_REQUESTS]
    if len(rows) < _LEAST_REQUESTS:
        raise UserError(
            f"{len(rows)} requests come within {duration_s:g} s: give a longer --confirm-duration"
        )
    return rows


def places_of(found: Screening, advice: Advice, options: ConfirmOptions) -> list[Place]:
    """Return the systems to confirm, and where they run."""
    tried = sorted([*found.colocated, *found.others], key=lambda one: one.goodput, reverse=True)
    ranked = [one.candidate for one in tried]
    if options.confirm_urls:
        return [_named_place(word, ranked) for word in options.confirm_urls]
    best = [*_unlike(ranked)][:_BEST]
    return [Place(one) for one in {one.name: one for one in (*best, advice.rival)}.values()]


def _unlike(ranked: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the best candidate of each arrangement, whatever its step size."""
    seen = set()
    for one in ranked:
        arrangement = tuple(sorted(str(role) for _, role in one.system.roles())), one.has_store
        if arrangement not in seen:
            seen.add(arrangement)
            yield one


def _named_place(word: str, candidates: Sequence[Candidate]) -> Place:
    """Return the first candidate whose name begins with the name in NAME=URL.

    Raises:
        UserError: ``word`` has no such form, or no candidate has that name.
    """
    name, equals, url = word.partition("=")
    if not (name and equals and url.startswith(("http://", "https://"))):
        raise UserError(
            f"--confirm-url {word}: write NAME=URL, such as 'split 1:1=http://HOST:PORT'"
        )
    for one in candidates:
        if one.name.startswith(name):
            return Place(one, url)
    known = ", ".join(one.name for one in candidates)
    raise UserError(f"--confirm-url {word}: no system is named {name}: {known}")


def _outcome(
    asked: PlanQuestion, place: Place, rows: Sequence[Arrival], options: ConfirmOptions
) -> EngineOutcome:
    seed = secrets.randbits(32)  # a server may have cached the prompts of an earlier run
    if place.url is None:
        with paced_engines(place.candidate, asked.profile_name, options.dilate) as target:
            return at_server(target, None, rows, asked.limits, seed)
    key = options.confirm_key or None
    return at_server(find_target(place.url, None, key), key, rows, asked.limits, seed)
