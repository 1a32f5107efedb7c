"""One system of a case on paced engines: its options, its load, and what came of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from banaserve.bench.client import Call, OpenAiClient
from banaserve.bench.compare_timeline import decisions_of
from banaserve.bench.loops import open_loop
from banaserve.bench.modelled import modelled_time
from banaserve.bench.provenance import ModelledTime
from banaserve.bench.record import RequestRecord
from banaserve.bench.servers import banaserve_server
from banaserve.bench.serving_summary import output_tokens, tpot_s
from banaserve.config import MINIATURE
from banaserve.costs.profile import Profile
from banaserve.errors import UserError
from banaserve.sim.request import SimRequest
from banaserve.sim.result import Limits, percentile
from banaserve.sim.system import System

_TOKEN_IDS = range(500, 40_000)
_WARM_UP = 4
_TIMEOUT_S = 3600.0
_OPTIONS = (
    *("--kv-store-size", "512MiB", "--max-concurrent-requests", "8192"),
    *("--request-timeout", f"{_TIMEOUT_S:g}"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: when it comes, in modelled seconds, and what it asks for."""

    at_s: float
    prompt: list[int]
    output_tokens: int

    @classmethod
    def of(cls, request: SimRequest, seed: int) -> Self:
        """The request with a prompt that no other one shares."""
        draws = random.Random(f"{seed} prompt {request.id}")
        prompt = draws.choices(_TOKEN_IDS, k=request.prompt_tokens)
        return cls(request.arrival_s, prompt, request.output_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one system.

    Attributes:
        figures: As the simulator's results name them, times in modelled seconds.
        decisions: Those that began steps.
    """

    records: list[RequestRecord]
    figures: dict[str, float]
    decisions: list[dict[str, Any]]
    modelled_time: ModelledTime


def options_of(system: System, profile: str, dilation: float, log: Path) -> list[str]:
    """Returns ``banaserve serve``'s options for ``system``.

    Raises:
        UserError: It has instances that do both, which the cases on engines leave out.
    """
    if system.colocated:
        raise UserError("only systems with prefill and decode apart run as paced engines")
    options = ["--pace", profile, "--dilate", f"{dilation:g}"]
    options += ["--pd", f"{system.prefill}:{system.decode}", "--routing-policy", system.routing]
    for key, value in system.routing_options.items():
        options += ["--routing-option", f"{key}={value}"]
    if system.migration == "still":
        return [*options, *_OPTIONS, "--orchestrator", "off"]
    limits = system.control_limits
    options += ["--orchestrator", "on", "--orchestrator-policy", system.migration]
    options += ["--orchestrator-interval", f"{system.control_s:g}"]
    options += ["--orchestrator-concurrent", str(limits.concurrent)]
    options += ["--orchestrator-per-minute", str(limits.per_minute), "--decision-log", str(log)]
    if not system.overlap_fraction:
        options += ["--migration-overlap", "1"]  # As the simulator has it: guests are waited for.
    for key, value in system.migration_options.items():
        options += ["--orchestrator-option", f"{key}={value}"]
    return [*options, *_OPTIONS]


async def run_system(
    profile: Profile, system: System, asked: Sequence[Asked], dilation: float, limits: Limits
) -> Run:
    """Start ``system``, send it ``asked`` as they come, and end it.

    Raises:
        UserError: It does not start, or its time is not modelled.
    """
    with TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "decisions.jsonl"
        options = options_of(system, profile.name, dilation, log)
        with banaserve_server(MINIATURE, *options, "--run-dir", f"{folder}/run") as server:
            name = f"paced-{profile.name}"
            async with OpenAiClient(
                server.url, name, return_token_ids=True, timeout_s=_TIMEOUT_S, read_late=True
            ) as client:
                warm_up = [Asked(0.0, one.prompt[:64], 8) for one in asked[:_WARM_UP]]
                await _send(client, warm_up, dilation)
                began_s = time.time()
                records = await _send(client, asked, dilation)
            told = modelled_time(server.url)
        if told is None:
            raise UserError(f"{server.url} does not say that its time is modelled")
        decisions = decisions_of(log, began_s, dilation)
    num_moves = sum(step["ending"] == "done" for one in decisions for step in one["steps"])
    figures = figures_of(records, dilation, limits)
    figures["num_moves"] = float(num_moves)
    figures["overrun_fraction"] = told.num_overrun / max(1, told.num_steps)
    return Run(records, figures, decisions, told)


async def _send(
    client: OpenAiClient, asked: Sequence[Asked], dilation: float
) -> list[RequestRecord]:
    calls = [
        Call(str(n), prompt=one.prompt, max_tokens=one.output_tokens, extra={"ignore_eos": True})
        for n, one in enumerate(asked)
    ]
    return await open_loop(client, calls, [one.at_s * dilation for one in asked])


def figures_of(
    records: Sequence[RequestRecord], dilation: float, limits: Limits
) -> dict[str, float]:
    """Returns the simulator's figures of real records; latencies count from the arrival."""
    ended = [r for r in records if r.error is None and r.ended_at_s is not None]
    start_s = min(_due_s(record) for record in records)
    ttft = [((r.first_token_at_s or 0.0) - _due_s(r)) / dilation for r in ended]
    tpot = [(tpot_s(r) or 0.0) / dilation for r in ended]
    e2e = [((r.ended_at_s or 0.0) - _due_s(r)) / dilation for r in ended]
    good = sum(
        first <= limits.ttft_s and each <= limits.tpot_s
        for first, each in zip(ttft, tpot, strict=True)
    )
    total_s = max(((r.ended_at_s or 0.0) - start_s for r in ended), default=0.0) / dilation
    figures = {
        "num_requests": float(len(records)),
        "num_finished": float(len(ended)),
        "finished_fraction": len(ended) / len(records),
        "goodput_fraction": good / len(records),
        "total_s": total_s,
        "output_tokens_per_s": sum(map(output_tokens, ended)) / total_s if total_s else 0.0,
    }
    for name, values in (("ttft", sorted(ttft)), ("tpot", sorted(tpot)), ("e2e", sorted(e2e))):
        figures[f"{name}_mean_s"] = sum(values) / len(values) if values else 0.0
        figures[f"{name}_p50_s"] = percentile(values, 0.5)
        figures[f"{name}_p99_s"] = percentile(values, 0.99)
    return figures


def _due_s(record: RequestRecord) -> float:
    return record.sent_at_s if record.due_at_s is None else record.due_at_s
