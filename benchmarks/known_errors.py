"""Errors of step times that `plan --model` states, from the result of ``silicon-runs``.

    python -m benchmarks.known_errors    # after a new result: writes the file that plan reads

Groups whose constants are of use to others: those whose checkpoint the package knows by a name of
its own, with enough judged runs, and whose prompts were not cached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from banaserve_bench.results import result
from banaserve_bench.silicon import modelled_engine
from benchmarks.location import ROOT
from benchmarks.whole_runs import CHECKPOINTS, LEAST_FACTOR, LEAST_RUNS

RESULT = ROOT / "benchmarks" / "results" / "silicon-runs.json"
_ERRORS = ("tpot", "ttft", "latency")
_SUMMED, _FITTED = 0, 1
_HEAD = """\
# Errors of summed operators against whole runs of vLLM, and constants that were fitted on others of
# them. Written by `python -m benchmarks.known_errors` from benchmarks/results/silicon-runs.json.
"""


def main() -> None:
    """Write the file that ``plan`` reads, and print its path."""
    path = Path(modelled_engine.KNOWN_ERRORS)
    path.write_text(text(result.read(RESULT).raw["groups"]))
    print(path)


def text(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the file's text for the groups of a result."""
    classes: dict[str, list[str]] = defaultdict(list)
    for name in groups:
        classes["block_scales" if _has_block_scales(name) else "others"].append(name)
    lines = [_HEAD]
    for kind, names in sorted(classes.items()):
        errors = [one for name in names for one in groups[name]["errors"]]
        models = ", ".join(sorted({_parts(name)[0].partition("/")[2] for name in names}))
        devices = ", ".join(sorted({_parts(name)[1] for name in names}))
        runs = f'runs = "{models} on {devices}"'
        lines += [f"[{kind}]", *_errors(errors, _SUMMED), runs, ""]
    for name in sorted(groups):
        lines += _fitted(name, groups[name])
    return "\n".join(lines)


def _fitted(name: str, group: Mapping[str, Any]) -> Iterator[str]:
    model, device, precision, version = _parts(name)
    checkpoint, precisions = CHECKPOINTS.get((model, precision), (model, {}))
    constants = group["constants"]
    is_cached = constants["engine"]["prompt_factor"] <= LEAST_FACTOR
    if precisions or _has_block_scales(name) or is_cached or len(group["errors"]) < LEAST_RUNS:
        return
    yield "[[fitted]]"
    yield from (f'{key} = "{value}"' for key, value in (("model", checkpoint), ("device", device)))
    yield f'version = "{version}"'
    yield from _errors(group["errors"], _FITTED)
    ways = {key: constants[key] for key in ("way_s", "way_token_s")}
    for key, value in (*constants["engine"].items(), *ways.items()):
        yield f"{key} = {value:g}"
    yield ""


def _errors(errors: Sequence[Any], kind: int) -> Iterator[str]:
    """Yield the means of the errors without signs, and the number of runs."""
    means = np.abs(np.array(errors)[:, kind]).mean(axis=0)
    yield from (f"{key} = {mean:.3f}" for key, mean in zip(_ERRORS, means, strict=True))
    yield f"num_runs = {len(errors)}"


def _has_block_scales(name: str) -> bool:
    model, _, precision, _ = _parts(name)
    return precision == "fp8" and (model, precision) not in CHECKPOINTS


def _parts(name: str) -> tuple[str, str, str, str]:
    model, device, precision, version = name.split(", ", 3)
    return model, device, precision, version.strip()


if __name__ == "__main__":
    main()
