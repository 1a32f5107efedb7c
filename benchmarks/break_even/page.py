"""Page of the break-even of moved modules, which is built with the pages of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve_bench.report.tables import as_markdown
from banaserve_bench.results.result import Result
from benchmarks.break_even.gains import (
    LINKS_BYTES_PER_S,
    PROFILES,
    Point,
    best_gain,
    break_even_bytes_per_s,
    full_point,
    gains,
    points,
    prompt_gain,
    switch_gain,
    with_link,
)
from benchmarks.break_even.simulated import WORTH_IT, Compared

_TEMPLATE = Path(__file__).parent / "template.md"
_CONTEXTS = (500, 2000, 8000, 32_000)


def page(record: Result) -> str:
    """Return the page; the simulator's part comes from the result of ``break-even``."""
    found = [msgspec.convert(one, Compared) for one in record.raw.values()]
    speeds: list[str] = []
    for name in PROFILES:
        speeds += [f"### {name}", "", *_speeds(profiles.load(name)), ""]
    parts = {
        "speeds": speeds[:-1],
        "prompts": _prompts(),
        "rooms": _rooms(),
        "simulated": _simulated(found),
    }
    text = _TEMPLATE.read_text()
    for name, lines in parts.items():
        text = text.replace(f"{{{name}}}", "\n".join(lines))
    return text


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


def _prompts() -> Iterator[str]:
    rows = []
    for name in PROFILES:
        profile = profiles.load(name)
        for tokens in (512, 2048, 8192):
            told = []
            for kind in ("layers", "heads"):
                told.append(f"{prompt_gain(profile, kind, tokens):+.1%}")
                told.append(_bandwidth(break_even_bytes_per_s(profile, kind, tokens)))
            rows.append((name, f"{tokens:,}", *told))
    heading = ("profile", "tokens of a step", "layers", "from GB/s", "heads", "from GB/s")
    yield from _table(heading, rows)


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
    parts = []
    for name in PROFILES:
        gained = [one.gain for one in found if one.question.profile == name]
        worth_it = sum(gain > WORTH_IT for gain in gained)
        parts.append(f"{worth_it} of {len(gained)} on {name} (at most {max(gained):+.3f})")
    yield f"Better with modules away by more than {WORTH_IT:g}: {', '.join(parts)}. All that gain:"
    yield ""
    rows = []
    for one in sorted(found, key=lambda other: -other.gain):
        if one.gain > 0:
            best, moved = max(one.plain, key=one.plain.__getitem__), _best_moved(one)
            goodput = f"{one.plain[best]:.3f}", f"{one.moved[moved]:.3f}"
            rows.append((one.question.name, best, goodput[0], moved, goodput[1]))
    heading = ("question", "best at home", "goodput", "best with modules away", "goodput")
    yield from _table(heading, rows)


def _best_moved(one: Compared) -> str:
    return max(one.moved, key=one.moved.__getitem__)


def _bandwidth(bytes_per_s: float | None) -> str:
    return "never" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield as_markdown([list(heading), *map(list, rows)])
