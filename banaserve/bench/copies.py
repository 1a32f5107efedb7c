"""``banaserve bench copies``: how near copies of scattered blocks come to memcpy, and to the disk.

Each way copies as many bytes as one memcpy in one piece, in a random order of ways within each run,
from and to memory that no cache holds. A fraction is memcpy's time over the way's: of the thread
that took longest, on a processor, since the clock counts whatever else the machine does.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.progress import Progress

from banaserve import _native
from banaserve.arguments import Parser
from banaserve.bench import result
from banaserve.bench.copies_disk import QueueBench
from banaserve.bench.copies_memory import MEMCPY, CopyBench
from banaserve.bench.kvstore_disk import check_direct
from banaserve.bench.statistics import median
from banaserve.errors import UserError

KIB, MIB = 2**10, 2**20
_BLOCK_BYTES = (32 * KIB, 128 * KIB, 512 * KIB, MIB, 4 * MIB)
_LARGE_BYTES = MIB
_THREADS = (1, 2)
_SAMPLE_BYTES = 32 * MIB
_RING_BYTES = 128 * MIB
_DISK_BLOCK_BYTES = 3 * MIB
# Of the large blocks, with either number of threads, the worst.
_HEADLINES = (
    "copy_fraction",
    "copy_checksum_fraction",
    "copy_wall_fraction",
    "copy_checksum_wall_fraction",
)
Samples = dict[str, list[float]]


def main(argv: Sequence[str]) -> int:
    """Run it and write the result; the exit code."""
    given = _parse(argv)
    torch.set_num_threads(1)  # the pipeline's own threads are what is measured
    started_at = datetime.now(UTC)
    samples: Samples = defaultdict(list)
    with Progress(transient=True) as progress:
        _memory(given, samples, progress)
        engine = _disk(given, samples, progress)
    names = [*_HEADLINES, *(name for name in samples if name not in _HEADLINES)]
    notes = [
        f"streaming copies use {_native.copy_instructions()[:1] or ['memcpy']}; checksums are "
        "XXH3-64 of the xxhash package",
        f"copy_fraction and copy_checksum_fraction are the worst of {_LARGE_BYTES // KIB} KiB and "
        "more, 1 and 2 threads, streaming, in time on a processor; those by the clock say wall",
        f"disk: {engine} beside preadv and pwritev of threads, at the same depth",
    ]
    record = result.result(
        "copies",
        seed=given.seed,
        options={name: str(value) for name, value in vars(given).items() if name != "json"},
        started_at=started_at,
        figures={name: result.figure(samples[name], _unit(name)) for name in names},
        notes=notes,
    )
    result.deliver(record, given.json)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="banaserve bench copies", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=int, default=5)
    add("--repeats", type=int, default=9, help="of each copy within a run; the median counts")
    add("--disk-blocks", type=int, default=64, help="of 3 MiB, of a run on disk; 0 for none")
    add("--depth", type=int, default=8, help="transfers of the disk at once")
    add("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if min(given.runs, given.repeats, given.depth) < 1 or given.disk_blocks < 0:
        raise UserError("--runs, --repeats and --depth are at least 1, --disk-blocks at least 0")
    return given


def _unit(name: str) -> str:
    return "fraction" if "fraction" in name else "GB/s"


def _memory(given: argparse.Namespace, samples: Samples, progress: Progress) -> None:
    task = progress.add_task("memory", total=given.runs * len(_BLOCK_BYTES) * len(_THREADS))
    with ThreadPoolExecutor(max(_THREADS)) as pool:
        for run in range(given.runs):
            large: dict[str, list[float]] = defaultdict(list)
            for block_bytes in _BLOCK_BYTES:
                bench = CopyBench(block_bytes, _SAMPLE_BYTES, _RING_BYTES, given.seed + run)
                bench.run(pool, 1)  # meets page faults, and code that was never called
                for num_threads in _THREADS:
                    case = f"{block_bytes // KIB}kib_{num_threads}t"
                    fractions = _case(bench, pool, num_threads, given.repeats, samples, case)
                    if block_bytes >= _LARGE_BYTES:
                        for name, fraction in fractions.items():
                            large[name].append(fraction)
                    progress.advance(task)
            for name in _HEADLINES:
                samples[name].append(min(large[name]))


def _case(
    bench: CopyBench,
    pool: ThreadPoolExecutor,
    num_threads: int,
    repeats: int,
    samples: Samples,
    case: str,
) -> dict[str, float]:
    """One run of one size: the median over repeats of each way's fraction, by its figure's name."""
    runs = [bench.run(pool, num_threads) for _ in range(repeats)]
    # Of speeds, only what a reader compares with other machines.
    samples[f"memcpy_gb_per_s_{case}"].append(
        median([_SAMPLE_BYTES / one[MEMCPY].wall_s / 1e9 for one in runs])
    )
    fractions, wall = {}, {}
    for way in bench.ways:
        if way != MEMCPY:
            cpu = [one[MEMCPY].cpu_s / one[way].cpu_s for one in runs]
            fractions[f"{way}_fraction"] = median(cpu)
            by_clock = [one[MEMCPY].wall_s / one[way].wall_s for one in runs]
            wall[f"{way}_wall_fraction"] = median(by_clock)
    for name, fraction in fractions.items():
        samples[f"{name}_{case}"].append(fraction)
    return {**fractions, **wall}


def _disk(given: argparse.Namespace, samples: Samples, progress: Progress) -> str:
    if not given.disk_blocks:
        return "not measured"
    check_direct(given.folder)
    task = progress.add_task("disk", total=given.runs)
    bench = QueueBench(given.folder, _DISK_BLOCK_BYTES, given.disk_blocks, given.depth, given.seed)
    with closing(bench):
        bench.run()  # the file's blocks are written for the first time
        for _ in range(given.runs):
            seconds = bench.run()
            num_bytes = given.disk_blocks * _DISK_BLOCK_BYTES
            for kind in ("write", "read"):
                raw_s, queue_s = seconds[f"raw_{kind}"], seconds[f"queue_{kind}"]
                samples[f"disk_{kind}_fraction"].append(raw_s / queue_s)
                samples[f"disk_raw_{kind}_gb_per_s"].append(num_bytes / raw_s / 1e9)
            progress.advance(task)
    return bench.engine
