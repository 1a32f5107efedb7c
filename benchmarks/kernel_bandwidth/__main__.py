"""Bandwidth of the kernels, as a fraction of the device's.

``python -m benchmarks kernels``. Each case is run by our kernels and, where they can, by torch and
FlashInfer, in turns. A fraction is the minimum number of bytes that the case must move, over its
time, over the bandwidth of a plain copy on the same device in the same run. Needs a GPU; ``--device
cpu --sizes tiny`` only shows that it runs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.kernels.registry import CHOICES, pick
from banaserve_bench.results import result
from benchmarks.kernel_bandwidth.native import measure_native, native_or_reason
from benchmarks.kernel_bandwidth.timing import copy_work, timed
from benchmarks.kernel_bandwidth.work import (
    KV_HEADS,
    SIZES,
    KernelWork,
    Sizes,
    all_work,
    attention_work,
)
from benchmarks.script import run_script

Samples = dict[str, list[float]]
_UNITS = {
    "_copy_fraction": "fraction",
    "_speedup": "times as fast",
    "_ms": "ms",
    "_gb_per_s": "GB/s",
}


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA GPU: run it where one is, or give --device cpu")
    started_at = datetime.now(UTC)
    kernels, reason = pick(device, given.kernels)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    notes = [f"kernels: {kernels.name} ({reason})", f"device: {name}"]
    if device.type != "cuda":
        notes.append("not on a GPU: these figures say nothing of the kernels' speed")
    samples: Samples = defaultdict(list)
    sizes = SIZES[given.sizes]
    for works, missing in all_work(sizes, kernels, device, given.seed):
        notes += [note for note in missing if note not in notes]
        _measure(works, kernels.name, sizes, device, given, samples)
    if device.type == "cuda":
        native, reason = native_or_reason()
        if native is None:
            notes.append(reason)
        else:
            measure_native(native, device, given.runs, samples)
    raw = {"sweep": list(_sweep(sizes, device, given))} if given.sweep else {}
    record = result.result(
        "kernels",
        seed=given.seed,
        options={name: str(value) for name, value in vars(given).items() if name != "json"},
        started_at=started_at,
        figures={name: result.figure(found, _unit(name)) for name, found in samples.items()},
        notes=notes,
        raw=raw,
    )
    result.deliver(record, given.json)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks kernels", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--device", default="cuda")
    add("--kernels", choices=CHOICES, default="auto")
    add("--sizes", choices=sorted(SIZES), default="full")
    add("--runs", type=int, default=5)
    add("--repeats", type=int, default=20, help="of each case within a run; the mean counts")
    add("--sweep", action="store_true", help="also try other tiles for the batched decode")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if min(given.runs, given.repeats) < 1:
        raise UserError("runs and repeats are at least 1")
    return given


def _measure(
    works: Sequence[KernelWork],
    ours: str,
    sizes: Sizes,
    device: torch.device,
    given: argparse.Namespace,
    samples: Samples,
) -> None:
    """Time the works and a plain copy in turns, once a run."""
    copied, copying = copy_work(sizes.copy_bytes, device)
    copy = timed(copying, device, given.repeats)
    ready = [(work, timed(work.run, device, given.repeats)) for work in works]
    for _ in range(given.runs):
        bandwidth = copied / copy()
        samples["copy_gb_per_s"].append(bandwidth / 1e9)
        seconds = {(work.name, work.by): run() for work, run in ready}
        for work, _ in ready:
            taken = seconds[work.name, work.by]
            name = work.name if work.by == ours else f"{work.name}_{work.by}"
            if work.num_bytes:
                samples[f"{name}_copy_fraction"].append(work.num_bytes / taken / bandwidth)
            samples[f"{name}_ms"].append(taken * 1e3)
            if work.by != ours:
                speedup = taken / seconds[work.name, ours]
                samples[f"{work.name}_over_{work.by}_speedup"].append(speedup)


def _sweep(
    sizes: Sizes, device: torch.device, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield times of the batched decode with other tiles, to choose those of ``kernels.tiling``."""
    from banaserve.kernels.tiling import Tiling
    from banaserve.kernels.triton.kernels import TritonKernels

    copied, copying = copy_work(sizes.copy_bytes, device)
    bandwidth = copied / timed(copying, device, given.repeats)()
    heads = tuple(range(KV_HEADS))
    for keys, warps, stages, splits in product((32, 64, 128), (4, 8), (3, 5, 7), (1, 2, 4)):
        tried = {"keys": keys, "num_warps": warps, "num_stages": stages, "num_splits": splits}
        kernels = TritonKernels(splits, Tiling(16, keys, warps, stages))
        try:
            works, _ = attention_work(
                "sweep", kernels, device, sizes.batch, 1, sizes.context, heads
            )
            taken = timed(works[0].run, device, given.repeats)()
        except Exception as error:
            # Usually too much shared memory for this GPU; the table says so and the sweep goes on.
            yield {**tried, "error": str(error).partition("\n")[0]}
            continue
        yield {**tried, "ms": taken * 1e3, "copy_fraction": works[0].num_bytes / taken / bandwidth}


def _unit(name: str) -> str:
    return next(unit for end, unit in _UNITS.items() if name.endswith(end))


if __name__ == "__main__":
    run_script(main)
