"""Break-even in the simulator: every fixed arrangement, and each with modules away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from banaserve.base.types import InstanceId, ModulePlacement, Role
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.planner.candidates.arrangement import Arrangement, arrangements
from banaserve.orchestrator.planner.candidates.modules import has_room
from banaserve.orchestrator.planner.candidates.planning import Ledger
from banaserve.sim.cluster.cell import Cell
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from benchmarks.break_even.gains import with_link

CHUNKS = (512, 2048)
WORTH_IT = 0.02
"""Minimum goodput gain by modules away that counts; the policy requires it of any change."""
DURATION_S = 60.0
_PATIENCE_S = 120.0
_TRIES = 6
_PRESSED = (0.65, 0.9)
"""Range of the best plain arrangement's goodput in which alternatives can be distinguished."""
_SAMPLE = 100
_KINDS = ("layers", "heads")
_SHARES = (1 / 8, 1 / 4, 1 / 2)

LENGTHS = {
    "opt-13b-a100": ((300, 300), (600, 400), (1500, 100)),
    "llama-3.1-8b-h100": ((1500, 400), (600, 1200), (12_000, 200)),
    "llama-3.1-70b-h100-tp4": ((1500, 400), (600, 1200), (12_000, 200)),
}
"""Mean prompt and output tokens; each length is drawn from 0.5 to 1.5 times its mean."""

LIMITS = {
    "opt-13b-a100": ((2.0, 0.1), (1.0, 0.05)),
    "llama-3.1-8b-h100": ((2.0, 0.03), (1.0, 0.015)),
    "llama-3.1-70b-h100-tp4": ((4.0, 0.06), (2.0, 0.03)),
}
"""Time to first token and time per output token, in seconds: usual and tight."""


class Question(NamedTuple):
    """A comparison.

    Attributes:
        size: Number of instances.
        limits: Time to first token and time per output token, in seconds.
        bytes_per_s: Bandwidth of the link between the instances.
    """

    profile: str
    size: int
    lengths: tuple[int, int]
    limits: tuple[float, float]
    bytes_per_s: float

    @property
    def name(self) -> str:
        (prompt, output), (ttft_s, tpot_s) = self.lengths, self.limits
        return (
            f"{self.profile} x {self.size}, {prompt}/{output} tokens, {ttft_s:g} s and "
            f"{1e3 * tpot_s:g} ms, {self.bytes_per_s / 1e9:g} GB/s"
        )


class Compared(NamedTuple):
    """Goodput of each alternative at a rate where that of the best plain one is in ``_PRESSED``.

    Attributes:
        plain: Goodput of arrangements with all modules at home, by arrangement.
        moved: Goodput of arrangements with modules away, by arrangement and modules.
    """

    question: Question
    rate_per_s: float
    plain: dict[str, float]
    moved: dict[str, float]

    @property
    def gain(self) -> float:
        """Goodput gain of the best arrangement with modules away over the best one without."""
        return max(self.moved.values(), default=0.0) - max(self.plain.values())


def questions(
    sizes: Sequence[int], links: Sequence[float], names: Sequence[str] = ()
) -> Iterator[Question]:
    """Yield every comparison."""
    for name in names or LENGTHS:
        for size in sizes:
            for lengths in LENGTHS[name]:
                for limits in LIMITS[name]:
                    for link in links:
                        yield Question(name, size, lengths, limits, link)


def compared(question: Question) -> Compared:
    """Run all alternatives on the same requests."""
    profile = with_link(profiles.load(question.profile), question.bytes_per_s)
    some = list(arrangements(question.size, CHUNKS))

    def plain_at(rate_per_s: float) -> dict[str, float]:
        rows = _rows(question, rate_per_s)
        return {str(a): _goodput(question, profile, a, (), rows) for a in some}

    low_per_s, high_per_s = 0.0, _saturation_per_s(question, profile)
    rate_per_s = high_per_s
    plain = plain_at(rate_per_s)
    for _ in range(_TRIES):
        best = max(plain.values())
        if _PRESSED[0] <= best <= _PRESSED[1]:
            break
        low_per_s, high_per_s = (
            (rate_per_s, max(high_per_s, 1.5 * rate_per_s))
            if best > _PRESSED[1]
            else (low_per_s, rate_per_s)
        )
        rate_per_s = (low_per_s + high_per_s) / 2
        plain = plain_at(rate_per_s)
    rows, moved = _rows(question, rate_per_s), {}
    for arrangement in some:
        for words, placements in _moves(profile, _roles(arrangement)):
            found = _goodput(question, profile, arrangement, placements, rows)
            moved[f"{arrangement}, {words}"] = found
    return Compared(question, rate_per_s, plain, moved)


def _rows(question: Question, rate_per_s: float) -> list[tuple[float, int, int]]:
    draws, at_s, rows = Random(question.profile), 0.0, []
    while (at_s := at_s + draws.expovariate(rate_per_s)) < DURATION_S:
        rows.append((at_s, *_drawn(question, draws)))
    return rows


def _drawn(question: Question, draws: Random) -> tuple[int, int]:
    prompt, output = (draws.randint(mean // 2, 3 * mean // 2) for mean in question.lengths)
    return prompt, output


def _saturation_per_s(question: Question, profile: Profile) -> float:
    """Return requests a second that the fastest of three arrangements ends if all come at once."""
    draws, size = Random("saturation"), question.size
    rows = [(0.0, *_drawn(question, draws)) for _ in range(_SAMPLE * size)]
    half = size // 2
    some = [*(Arrangement(0, 0, size, c) for c in CHUNKS), Arrangement(half, size - half, 0, 2048)]
    return max(len(rows) / max(r.end_s for r in _run(profile, one, (), rows, 1e6)) for one in some)


def _roles(arrangement: Arrangement) -> list[tuple[InstanceId, Role]]:
    counts = (arrangement.num_prefill, arrangement.num_decode, arrangement.num_both)
    roles = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
    return [
        (InstanceId(f"{role.value[0]}{n}"), role)
        for role, count in zip(roles, counts, strict=True)
        for n in range(count)
    ]


def _moves(
    profile: Profile, roles: Sequence[tuple[InstanceId, Role]]
) -> Iterator[tuple[str, list[ModulePlacement]]]:
    """Yield placements of modules of decode instances at prefill instances, and the reverse."""
    prefill = [name for name, role in roles if role is Role.PREFILL]
    decode = [name for name, role in roles if role is Role.DECODE]
    for hosts, guests, words in ((decode, prefill, "of decode"), (prefill, decode, "of prefill")):
        for kind in _KINDS:
            total = slabs.num_movable(profile.facts, kind == "heads")
            for share in _SHARES if hosts and guests else ():
                module = slabs.free(profile.facts, (), int(total * share), kind == "heads")
                assert module is not None
                ledger, placements = Ledger(profile.facts, ()), []
                for n, host in enumerate(hosts):
                    guest = guests[n % len(guests)]
                    held = ledger.put(host, guest, module)
                    placements.append(ModulePlacement(module, host, guest, 1, 0.0, held))
                if all(has_room(ledger, guest, 0.0) for guest in guests):
                    yield f"{share:g} of the {kind} {words}", placements


def _goodput(
    question: Question,
    profile: Profile,
    arrangement: Arrangement,
    placements: Sequence[ModulePlacement],
    rows: Sequence[tuple[float, int, int]],
) -> float:
    requests = _run(profile, arrangement, placements, rows, DURATION_S + _PATIENCE_S)
    return sum(_is_good(one, *question.limits) for one in requests) / len(requests)


def _is_good(request: SimRequest, ttft_s: float, tpot_s: float) -> bool:
    if request.end_s < 0 or request.first_s - request.arrival_s > ttft_s:
        return False
    return request.end_s - request.first_s <= tpot_s * max(1, request.output_tokens - 1)


def _run(
    profile: Profile,
    arrangement: Arrangement,
    placements: Sequence[ModulePlacement],
    rows: Sequence[tuple[float, int, int]],
    until_s: float,
) -> list[SimRequest]:
    roles = _roles(arrangement)
    system = System(
        kind="banaserve",
        prefill=arrangement.num_prefill,
        decode=arrangement.num_decode,
        colocated=arrangement.num_both,
        limits=EngineLimits(step_tokens=arrangement.step_tokens),
        attention_fraction=None,
    )
    timeline = Timeline()
    cell = Cell(timeline, profile, system, [*roles], None, 0, lambda _: None)
    for name, role in roles:
        cell.instances[name].set_step_tokens(arrangement.tokens_of(role))
    cell.placing.put(placements)
    requests = [SimRequest(number, *row) for number, row in enumerate(rows)]
    for request in requests:
        timeline.at(request.arrival_s, cell.submit, request)
    if placements:
        _keep_bent(timeline, cell, len(requests))
    timeline.run(until_s)
    return requests


def _keep_bent(timeline: Timeline, cell: Cell, num_requests: int) -> None:
    """Update the cost of modules once a second from the load of their hosts."""

    def bend(_: object) -> None:
        cell.view()
        cell.placing.bend()
        if len(cell.finished) + cell.num_refused < num_requests:
            timeline.after(1.0, bend)

    timeline.after(1.0, bend)
