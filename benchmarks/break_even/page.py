"""Page of the break-even of moved modules: ``docs/break-even.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from banaserve.bench.results import result
from banaserve.costs import profile as profiles
from banaserve.costs.profile import Profile
from benchmarks.break_even import words
from benchmarks.break_even.gains import (
    LINKS_BYTES_PER_S,
    PROFILES,
    Point,
    best_gain,
    break_even_bytes_per_s,
    full_point,
    gains,
    points,
    switch_gain,
    with_link,
)
from benchmarks.break_even.simulated import LIMITS, Compared
from benchmarks.location import ROOT

PAGE = ROOT / "docs" / "break-even.md"
RESULT = ROOT / "benchmarks" / "results" / "break-even.json"
COMMAND = "python -m benchmarks break-even --page"

_CONTEXTS = (500, 2000, 8000, 32_000)


def written(only_check: bool) -> int:
    """Write the page, or say whether it is stale; the exit code."""
    text = page(RESULT)
    if not only_check:
        PAGE.write_text(text)
        print(PAGE.relative_to(ROOT))
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: run {COMMAND}")
    return 1


def page(path: Path) -> str:
    """Returns the page, its last part from the result at ``path``."""
    found = [msgspec.convert(one, Compared) for one in result.read(path).raw.values()]
    lines = [words.OPENING, ""]
    for name in PROFILES:
        lines += [f"### {name}", "", *_speeds(profiles.load(name)), ""]
    lines += [words.ROOM, "", *_rooms(), "", words.SIMULATED, "", *_simulated(found), ""]
    return "\n".join(lines) + words.CONCLUSION


def _speeds(profile: Profile) -> Iterator[str]:
    own = f"{profile.link.bytes_per_s / 1e9:g}"
    heading = ("batch of context", "step", "step beside 512", "layers", "heads", "older blocks")
    rows = []
    for point in points(profile):
        step, mixed = _steps_ms(profile, point)
        told = [f"{one.speed:+.1%}" for one in gains(profile, point)]
        ends = [
            _bandwidth(break_even_bytes_per_s(profile, kind, point))
            for kind in ("heads", "older blocks")
        ]
        rows.append((str(point), step, mixed, *told, *ends))
    yield f"At {own} GB/s; break-even in GB/s."
    yield ""
    yield from _table((*heading, "heads from", "older from"), rows)


def _steps_ms(profile: Profile, point: Point) -> tuple[str, str]:
    told = switch_gain(profile, point)
    return f"{1e3 * told.step_s:.1f} ms", f"{1e3 * told.mixed_step_s:.0f} ms"


def _rooms() -> Iterator[str]:
    rows = []
    for name in PROFILES:
        profile = profiles.load(name)
        for context in _CONTEXTS:
            point = full_point(profile, context)
            if point is None:
                continue
            told = []
            for kind in ("layers", "heads"):
                for bytes_per_s in (LINKS_BYTES_PER_S[0], LINKS_BYTES_PER_S[-1]):
                    one = best_gain(with_link(profile, bytes_per_s), kind, point)
                    told.append(f"{one.room:+.0%} ({one.share:g})")
            rows.append((name, str(point), *_steps_ms(profile, point), *told))
    slow, fast = (f"{one / 1e9:g}" for one in (LINKS_BYTES_PER_S[0], LINKS_BYTES_PER_S[-1]))
    heading = ("profile", "full with", "step", "beside 512")
    kinds = [f"{kind}, {link} GB/s" for kind in ("layers", "heads") for link in (slow, fast)]
    yield from _table((*heading, *kinds), rows)


def _simulated(found: Sequence[Compared]) -> Iterator[str]:
    rows = []
    for one in found:
        asked = one.question
        for place, (ttft_s, tpot_s) in enumerate(LIMITS[asked.profile]):
            best, moved = one.best(one.plain, place), one.best(one.moved, place)
            if one.plain[best][place] >= 0.99 or one.gain(place) <= 0:
                continue
            rows.append(
                (
                    asked.name,
                    f"{ttft_s:g} s, {1e3 * tpot_s:g} ms",
                    best,
                    f"{one.plain[best][place]:.3f}",
                    moved,
                    f"{one.moved[moved][place]:.3f}",
                )
            )
    yield _counted(found)
    yield ""
    yield from _table(
        ("question", "limits", "best at home", "", "best with modules away", ""), rows
    )


def _counted(found: Sequence[Compared]) -> str:
    parts = []
    for name in PROFILES:
        gained = [
            one.gain(place)
            for one in found
            if one.question.profile == name
            for place in range(len(LIMITS[name]))
        ]
        worth_it = sum(gain > 0.02 for gain in gained)
        parts.append(f"{worth_it} of {len(gained)} on {name} (at most {max(gained):+.3f})")
    return "Better by more than 0.02: in " + ", ".join(parts) + "."


def _bandwidth(bytes_per_s: float | None) -> str:
    return "never" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heading) + " |"
    yield "| " + " | ".join("---" for _ in heading) + " |"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
