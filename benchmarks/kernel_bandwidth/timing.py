"""Timing of a piece of device work, without the host's share where that is possible."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_WARM_UP = 3


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> Callable[[], float]:
    """Prepare ``work`` for timing.

    On a GPU the work is captured in a graph, so that the time leaves out launches from Python; the
    work must not wait for the GPU.

    Returns:
        A function that runs the work ``repeats`` times and returns the mean seconds of one run.
    """
    for _ in range(_WARM_UP):
        work()
    if device.type != "cuda":
        return lambda: _on_host(work, repeats)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Keep what the work allocates during the capture: replays write there.
        kept = work()
    return lambda: _on_gpu(graph, kept, device, repeats)


def _on_host(work: Callable[[], object], repeats: int) -> float:
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began_s) / repeats


def _on_gpu(graph: torch.cuda.CUDAGraph, kept: object, device: torch.device, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    del kept
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def copy_work(num_bytes: int, device: torch.device) -> tuple[int, Callable[[], object]]:
    """Prepare a copy within the device's memory, the reference of all other work.

    Returns:
        Bytes read and written, and the work.
    """
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes, lambda: target.copy_(source)
