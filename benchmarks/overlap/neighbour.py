"""Slow-down of an engine by a guest on its core, by the share that the guest may take."""

from __future__ import annotations

import itertools
import threading
import time
from typing import NamedTuple

from banaserve.serving.moves.placement import predicted_slow_down
from benchmarks.drivers.driven_engine import DrivenEngine

Prompts = list[list[int]]


class NeighbourSharing(NamedTuple):
    """Results of one run beside a guest.

    Attributes:
        slow_down: Time of the neighbour's streams over their time while the guest rests.
        predicted: Slow-down predicted from the time that the guest computed.
        busy_fraction: Share of the core's time that the guest computed.
        prefill_s: Mean time of the prompts that the guest's host served meanwhile.
    """

    slow_down: float
    predicted: float
    busy_fraction: float
    prefill_s: float


class Streams(NamedTuple):
    """Prompts that both engines serve.

    Attributes:
        fed: Prompts that the host serves in sequence, for as long as the neighbour's streams last.
        own: Prompts of the neighbour's streams, all sent at once.
        output_tokens: Output tokens of each of ``own``.
    """

    fed: Prompts
    own: Prompts
    output_tokens: int


def beside(host: DrivenEngine, neighbour: DrivenEngine, streams: Streams) -> NeighbourSharing:
    """Serve the neighbour's streams alone, then while the host keeps its guest busy."""
    alone_s = _streams_s(neighbour, streams)
    host.tell(do="usage")
    began_s = time.perf_counter()
    feeding = _Feeding(host, streams.fed)
    try:
        shared_s = _streams_s(neighbour, streams)
    finally:
        fed_s = feeding.stop()
    elapsed_s = time.perf_counter() - began_s
    busy = float(host.tell(do="usage")["busy_s"]) / elapsed_s
    return NeighbourSharing(
        shared_s / alone_s, predicted_slow_down(busy), busy, sum(fed_s) / len(fed_s)
    )


def _streams_s(neighbour: DrivenEngine, streams: Streams) -> float:
    answer = neighbour.tell(do="run", prompts=streams.own, tokens=streams.output_tokens)
    return float(answer["seconds"])


class _Feeding:
    """Thread that has a host serve prompts in sequence, from its construction until ``stop``."""

    def __init__(self, host: DrivenEngine, prompts: Prompts) -> None:
        self._host = host
        self._prompts = prompts
        self._seconds: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for prompt in itertools.cycle(self._prompts):
            answer = self._host.tell(do="run", prompts=[prompt], tokens=1)
            self._seconds.append(float(answer["seconds"]))
            if self._is_over.is_set():
                return

    def stop(self) -> list[float]:
        """Stop after the current prompt; return the seconds of each prompt."""
        self._is_over.set()
        self._thread.join()
        return self._seconds
