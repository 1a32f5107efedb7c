"""Options of the orchestrator: its policy, its limits and its log."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from banaserve.arguments import read_pair
from banaserve.config import OrchestratorConfig
from banaserve.controller.decisions import DecisionLog
from banaserve.orchestrator.control import ControlLimits
from banaserve.orchestrator.migration import registry as migration_policies

_ORCHESTRATOR = OrchestratorConfig()
_ANY = 10_000


def add_orchestrator(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add(
        "--orchestrator",
        choices=("off", "dry-run", "on"),
        help="who moves layers, heads and roles: off, on, or dry-run, which decides and moves "
        "nothing (dry-run; off without a store)",
    )
    add(
        "--orchestrator-policy",
        metavar="NAME",
        help=f"one of {', '.join(migration_policies.names())} ({_ORCHESTRATOR.policy})",
    )
    add(
        "--slo-ttft",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="limit of the time to first token; a request may name its own in a header "
        "(0: no limit)",
    )
    add(
        "--slo-tpot",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="limit of the mean time per output token after the first (0: no limit)",
    )
    add(
        "--orchestrator-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the policy, such as delta_up=0.3; repeat for several",
    )
    add(
        "--orchestrator-interval",
        type=float,
        default=_ORCHESTRATOR.interval_s,
        metavar="SECONDS",
        help="time between two decisions",
    )
    add(
        "--orchestrator-concurrent",
        type=int,
        metavar="N",
        help=f"changes that may be under way at once ({_ORCHESTRATOR.concurrent}; elastic: any)",
    )
    add(
        "--orchestrator-per-minute",
        type=int,
        metavar="N",
        help=f"changes that may begin within a minute ({_ORCHESTRATOR.per_minute}; elastic: any)",
    )
    add(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="file to append decisions to, as JSON lines",
    )


def orchestrator_of(known: argparse.Namespace) -> OrchestratorConfig:
    """Return the configuration; without a store nothing is measured, so the default is off."""
    is_elastic = known.elastic or (known.instances and known.orchestrator is None)
    usual = "off" if known.no_kv_store else "on" if is_elastic else _ORCHESTRATOR.mode
    policy = known.orchestrator_policy or ("elastic" if is_elastic else _ORCHESTRATOR.policy)
    # Role changes of the elastic policy drain nothing, and a plan is carried out as a whole.
    concurrent, per_minute = (
        (_ANY, _ANY)
        if policy == "elastic"
        else (_ORCHESTRATOR.concurrent, _ORCHESTRATOR.per_minute)
    )
    return OrchestratorConfig(
        mode=known.orchestrator or usual,
        slo_ttft_s=known.slo_ttft,
        slo_tpot_s=known.slo_tpot,
        policy=policy,
        options=tuple(read_pair("--orchestrator-option", o) for o in known.orchestrator_option),
        interval_s=known.orchestrator_interval,
        concurrent=_given(known.orchestrator_concurrent, concurrent),
        per_minute=_given(known.orchestrator_per_minute, per_minute),
        decision_log=known.decision_log,
    )


def _given(value: int | None, usual: int) -> int:
    return usual if value is None else value


def check_orchestrator(config: OrchestratorConfig) -> None:
    """Check that policy and limits are valid and the log can be written.

    Raises:
        UserError: One of them fails; the message names it.
    """
    section: dict[str, Any] = dict(config.options)
    migration_policies.make(config.policy, **section)
    ControlLimits(concurrent=config.concurrent, per_minute=config.per_minute)
    DecisionLog(config.decision_log)
