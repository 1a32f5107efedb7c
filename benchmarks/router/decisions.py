"""Decisions a second of routing policies, and the memory of their tree: for ``bench router``.

A decision is a balancer's work in its event loop for one request: the choice, the counters and the
tree's record of it, and in return the end of another request. It is timed in CPU seconds of this
process. Prompts are int32 tokens, as in a balancer that tokenises: half of each is one of a few
shared prefixes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random

import psutil

from banaserve.base.types import RequestId
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import Flight, ReplicaId, ReplicaView, Request
from banaserve_route.policies.prefixes.tree import make_tree
from banaserve_route.policies.registry import make
from benchmarks.measurement import Samples

REPLICAS = (8, 64, 512)
PROMPT_TOKENS = (1_000, 8_000, 100_000)
HEADLINE = (64, 8_000)
POLICY = "skywalker"
"""Policy whose decisions are ``decisions_per_s``: prefixes and two layers, the longest path."""
POLICIES = ("round_robin", "predicted_latency", "skywalker", "cache_aware", "gorgo", "preble")
UNIT_BYTES = 4
_SHARED = 40
_WARM_UP = 200
_MEMORY_TREE_BYTES = 64 << 20
_MEMORY_SAMPLES = 10


def decisions(
    policies: Sequence[str],
    replicas: Sequence[int],
    prompt_tokens: Sequence[int],
    runs: int,
    seed: int,
    seconds: float,
) -> Samples:
    """Return ``decisions_per_s`` and one figure for each policy, fleet and prompt.

    Args:
        seconds: CPU time of one sample.
    """
    samples: dict[str, list[float]] = {}
    for run in range(runs):
        for num_replicas in replicas:
            for num_tokens in prompt_tokens:
                requests = _requests(num_tokens, seed + run)
                for policy in policies:
                    rate = _rate(policy, num_replicas, requests, seed + run, seconds)
                    name = f"decisions_per_s_{policy}_{num_replicas}_{num_tokens // 1000}k"
                    samples.setdefault(name, []).append(rate)
    figures = {name: (values, "decisions/s") for name, values in samples.items()}
    headline = f"decisions_per_s_{POLICY}_{HEADLINE[0]}_{HEADLINE[1] // 1000}k"
    if headline in figures:
        figures = {"decisions_per_s": figures[headline], **figures}
    return figures


def tree_memory(num_insertions: int, seed: int) -> tuple[Samples, Mapping[str, object]]:
    """Fill a bounded tree far beyond its bound and record the memory of this process.

    Returns:
        ``tree_memory_growth_fraction``, the growth over the second half of the insertions as a
        share of the tree's bound (flat: about 0); insertions a second; and the raw samples.
    """
    rng = Random(seed)
    process = psutil.Process()
    targets = [ReplicaId(f"r{number}") for number in range(8)]
    heads = [rng.randbytes(512) for _ in range(200)]
    pool = rng.randbytes(1 << 20)
    tree = make_tree(1, _MEMORY_TREE_BYTES // 4, _MEMORY_TREE_BYTES)
    before = process.memory_info().rss
    course: list[dict[str, int]] = []
    started_s = time.process_time()
    for sample in range(_MEMORY_SAMPLES):
        for _ in range(num_insertions // _MEMORY_SAMPLES):
            start = int(rng.random() * (len(pool) - 600))
            prompt = heads[int(rng.random() * 200)] + pool[start : start + 600]
            tree.add(prompt, targets[int(rng.random() * 8)])
        course.append(
            {
                "insertions": (sample + 1) * (num_insertions // _MEMORY_SAMPLES),
                "rss_bytes": process.memory_info().rss - before,
                "charged_bytes": tree.num_bytes,
                "nodes": tree.num_nodes,
            }
        )
    taken_s = time.process_time() - started_s
    middle, end = course[_MEMORY_SAMPLES // 2], course[-1]
    growth = (end["rss_bytes"] - middle["rss_bytes"]) / _MEMORY_TREE_BYTES
    figures = {
        "tree_memory_growth_fraction": ([growth], "fraction of the bound"),
        "tree_memory_fraction": (
            [one["rss_bytes"] / _MEMORY_TREE_BYTES for one in course],
            "fraction of the bound",
        ),
        "tree_insertions_per_s": ([num_insertions / taken_s], "insertions/s"),
    }
    return figures, {"tree_memory": course}


def _requests(num_tokens: int, seed: int) -> list[Request]:
    """Return prompts of ``num_tokens``, more of them if they are short; half of each is shared."""
    rng = Random(seed)
    half = num_tokens * UNIT_BYTES // 2
    shared = [rng.randbytes(half) for _ in range(_SHARED)]
    return [
        Request(
            RequestId(str(number)),
            num_tokens,
            shared[int(rng.random() * _SHARED)] + rng.randbytes(half),
            expected_output_tokens=128,
            session=f"s{number % 97}",
        )
        for number in range(max(100, min(1000, 4_000_000 // num_tokens)))
    ]


def _rate(
    policy: str, num_replicas: int, requests: Sequence[Request], seed: int, seconds: float
) -> float:
    fleet = Fleet(make(policy, Random(seed), unit_bytes=UNIT_BYTES))
    for number in range(num_replicas):
        fleet.add(ReplicaView(ReplicaId(f"replica-{number:03}"), round_trip_ms=number % 7 * 10.0))
    flights: deque[Flight] = deque()
    now_s = 0.0

    def serve(request: Request) -> None:
        if len(flights) >= 4 * num_replicas:
            ended = flights.popleft()
            fleet.first_token(ended, now_s)
            fleet.finished(ended, now_s, 128)
        decision = fleet.choose(request, now_s)
        if decision.target is None:
            raise AssertionError(f"{policy} holds a request with room left: {decision.reason}")
        flights.append(fleet.sent(request, decision, now_s))

    count = 0
    started_s: float | None = None
    while started_s is None or time.process_time() - started_s < seconds:
        for request in requests:
            if count % (2 * num_replicas) == 0:
                now_s += 0.1
                for view in fleet.view(now_s).replicas:
                    fleet.reported(view.id, Report(now_s, 0, view.outstanding, 0.3))
            serve(request)
            count += 1
            if started_s is None and count == _WARM_UP:
                started_s, count = time.process_time(), 0
            if started_s is not None and time.process_time() - started_s >= seconds:
                break
    return count / (time.process_time() - started_s)


def figures(
    runs: int, seed: int, num_insertions: int = 10_000_000
) -> tuple[Samples, list[str], dict[str, object]]:
    """Return the figures, notes and raw samples of the whole part."""
    # First, since memory that the decisions free would be reused and the tree seem smaller.
    memory, raw = tree_memory(num_insertions, seed)
    rates = decisions(POLICIES, REPLICAS, PROMPT_TOKENS, runs, seed, seconds=0.2)
    notes = [
        f"decisions: choice, counters and record, and the end of a request, in CPU time of one "
        f"process; decisions_per_s is {POLICY} over {HEADLINE[0]} replicas and prompts of "
        f"{HEADLINE[1]:,} tokens, half of each one of {_SHARED} shared prefixes",
        f"tree memory: {num_insertions:,} insertions of prompts of 1,112 bytes into a tree bounded "
        f"at {_MEMORY_TREE_BYTES >> 20} MiB; growth over the second half of them",
    ]
    return {**rates, **memory}, notes, dict(raw)
