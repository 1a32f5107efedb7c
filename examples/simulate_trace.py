"""Simulate a trace of requests in virtual time, and compare systems under it.

    python examples/simulate_trace.py [TRACE]

Without a trace it makes a small one: JSON lines with the arrival in seconds and the lengths of
prompt and output. Nothing real runs: step times come from a measured profile, here of
SmolLM2-135M on a CPU. `banaserve simulate TRACE --profile smollm2-135m-cpu --pd 2:2` does the
same from the command line.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve_bench.simulation.job import AskedSystem, job
from banaserve_bench.simulation.run import simulate

PROFILE = "smollm2-135m-cpu"
SEED = 7


def make_trace(path: Path, num_requests: int = 120, per_s: float = 2.0) -> None:
    """Write a trace with a wave of long prompts in its second half."""
    draw = random.Random(SEED)
    at_s = 0.0
    with path.open("w") as lines:
        for number in range(num_requests):
            at_s += draw.expovariate(per_s)
            is_long = number >= num_requests // 2
            line = {
                "t": round(at_s, 3),
                "input_length": draw.randint(600, 1200) if is_long else draw.randint(50, 300),
                "output_length": draw.randint(10, 60),
            }
            lines.write(json.dumps(line) + "\n")


def compare(path: Path) -> dict[str, dict[str, float]]:
    """The figures of each system, in seconds of virtual time."""
    planned = job(AskedSystem(target=str(path), profile=PROFILE, prefill=2, decode=2))
    return {
        name: simulate(planned.profile, system, planned.requests(SEED), planned.limits)
        for name, system in planned.systems.items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        if len(sys.argv) > 1:
            path = Path(sys.argv[1])
        else:
            make_trace(path)
        results = compare(path)
    print(f"{'SYSTEM':<12}  {'TTFT MEAN':>10}  {'TTFT P99':>10}  {'E2E MEAN':>10}  {'MOVES':>5}")
    for name, found in results.items():
        times = (found["ttft_mean_s"], found["ttft_p99_s"], found["e2e_mean_s"])
        columns = "  ".join(f"{value:>8.2f} s" for value in times)
        print(f"{name:<12}  {columns}  {found['num_moves']:>5}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # such as: a line of the trace is wrong
        raise SystemExit(str(error)) from None
