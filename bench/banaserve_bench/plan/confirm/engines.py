"""Requests of a plan on engines: paced ones of this machine, or a server that runs already."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from banaserve.base.clock import Clock
from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival, requests_of
from banaserve_bench.loadgen.client import OpenAiClient
from banaserve_bench.loadgen.modelled_time import StretchedClock, modelled_time
from banaserve_bench.loadgen.servers import banaserve_server
from banaserve_bench.loadgen.target import ServerUnderTest, find_target
from banaserve_bench.plan.search.candidates import Candidate
from banaserve_bench.results.result import ModelledTime
from banaserve_bench.serving.simulated_requests import CaseRequest, figures_of, send

_TIMEOUT_S = 3600.0
_WARM_REQUESTS, _WARM_TOKENS = 8, 8
_SMALL = (
    *("--max-concurrent-requests", "8192", "--request-timeout", f"{_TIMEOUT_S:g}"),
    *("--threads-per-instance", "1"),
)


class EngineOutcome(NamedTuple):
    """Outcome of requests on engines.

    Attributes:
        figures: Figures by the simulator's names.
        overrun_fraction: Share of the steps since the first request that took longer than modelled;
            0 if time is real.
    """

    figures: Mapping[str, float]
    overrun_fraction: float


@contextmanager
def paced_engines(
    candidate: Candidate, profile_name: str, dilation: float
) -> Iterator[ServerUnderTest]:
    """Run the system of ``candidate`` in modelled time.

    Raises:
        UserError: The server does not start.
    """
    words = paced_words(candidate, profile_name, dilation)
    with banaserve_server(MINIATURE, *words) as server:
        yield find_target(server.url, None, None)


def paced_words(candidate: Candidate, profile_name: str, dilation: float) -> list[str]:
    """Return the options of ``banaserve serve`` for a candidate in modelled time."""
    return [*small_words(candidate), "--pace", profile_name, "--dilate", f"{dilation:g}"]


def small_words(candidate: Candidate) -> list[str]:
    """Return the options of ``banaserve serve`` for a candidate on a thread for each engine."""
    # All options come before the port that is added, so none after "--".
    words = [*(word for word in candidate.words if word != "--"), *_SMALL]
    if candidate.has_store:
        words += ["--kv-store-size", "512MiB"]
    if candidate.system.migration == "still":
        words += ["--migration", "off", "--orchestrator", "off"]
    return words


def at_server(
    target: ServerUnderTest,
    key: str | None,
    rows: Sequence[Arrival],
    limits: LatencyLimits,
    seed: int,
) -> EngineOutcome:
    """Send the requests to a running server, in the time that it models or in real time.

    Raises:
        UserError: The server does not answer, or every request fails.
    """
    before = modelled_time(target.url)
    clock = StretchedClock(1.0 if before is None else before.dilation)
    figures = asyncio.run(_sent(target, key, rows, limits, seed, clock))
    after = modelled_time(target.url)
    return EngineOutcome(figures, _overrun_fraction(before, after))


def _overrun_fraction(before: ModelledTime | None, after: ModelledTime | None) -> float:
    if before is None or after is None:
        return 0.0
    num_steps = after.num_steps - before.num_steps
    return (after.num_overrun - before.num_overrun) / max(1, num_steps)


async def _sent(
    target: ServerUnderTest,
    key: str | None,
    rows: Sequence[Arrival],
    limits: LatencyLimits,
    seed: int,
    clock: Clock,
) -> dict[str, float]:
    asked = [CaseRequest.of(one, seed) for one in requests_of(rows)]
    warm_up = [
        CaseRequest(0.0, one.prompt[-_WARM_TOKENS:], _WARM_TOKENS) for one in asked[:_WARM_REQUESTS]
    ]
    async with OpenAiClient(
        target.url,
        target.model,
        api_key=key,
        return_token_ids=True,
        timeout_s=_TIMEOUT_S,
        read_late=True,
        clock=clock,
    ) as client:
        await send(client, warm_up, 1.0)
        records = await send(client, asked, 1.0)
    failed = [one.error for one in records if one.error is not None]
    if len(failed) == len(records):
        raise UserError(f"every request to {target.url} failed, the first one by: {failed[0]}")
    return figures_of(records, 1.0, limits)
