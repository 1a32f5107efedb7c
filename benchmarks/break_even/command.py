"""Under which model, batch, link and limits do moved modules gain more than a switch of roles?

    python -m benchmarks break-even [--sizes 2,4] [--links 12.5,50,450] [--json FILE]

Computed by the cost model in closed form, and in the simulator: every fixed arrangement with all
modules at home, and each with an eighth, a quarter or a half of the layers or heads of one side
away at the other. No engine runs. ``python -m benchmarks results`` makes the page of both, the
simulator's part from the committed result.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console

from banaserve.orchestrator.control.costs import profile as profiles
from benchmarks.break_even.gains import PROFILES
from benchmarks.break_even.simulated import WORTH_IT, Compared, compared, questions
from benchmarks.measurement import Measurement, Samples, parser_of
from benchmarks.workers import workers


def main(argv: Sequence[str]) -> int:
    parser = parser_of("break-even", __doc__)
    parser.add_argument("--sizes", default="2,4", help="numbers of instances")
    parser.add_argument("--links", default="12.5,50,450", help="GB/s, of the smallest size alone")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(list(argv))
    measurement, console = Measurement("break-even", given), Console(width=200)
    sizes = [int(one) for one in given.sizes.split(",")]
    links = [1e9 * float(one) for one in given.links.split(",")]
    asked = list(questions(sizes[:1], links))
    asked += [
        one
        for name in PROFILES
        for one in questions(sizes[1:], [profiles.load(name).link.bytes_per_s], [name])
    ]
    found = []
    with workers(given.jobs) as pool:
        for number, one in enumerate(pool.map(compared, asked), start=1):
            found.append(one)
            best = max(one.plain.values())
            console.print(
                f"{number}/{len(asked)} {one.question.name}, {one.rate_per_s:.1f} requests/s: "
                f"{best:.3f} {one.gain:+.3f}"
            )
    raw = {one.question.name: msgspec.to_builtins(one) for one in found}
    measurement.deliver(measurement.result(figures(found), [str(__doc__)], raw=raw))
    return 0


def figures(found: Sequence[Compared]) -> Samples:
    """Return goodput gains of modules away over the best with all modules at home, by profile."""
    shown: Samples = {}
    for name in dict.fromkeys(one.question.profile for one in found):
        own = [one for one in found if one.question.profile == name]
        gains = [one.gain for one in own]
        shown[f"gain.{name}"] = gains, "fraction"
        worth_it = sum(gain > WORTH_IT for gain in gains)
        shown[f"worth_it.{name}"] = [worth_it / len(gains)], "fraction"
    return shown
