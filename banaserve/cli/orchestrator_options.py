"""``banaserve serve``'s options of the orchestrator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from banaserve.cli.key_values import read_pair
from banaserve.config import OrchestratorConfig
from banaserve.controller.decisions import DecisionLog
from banaserve.orchestrator.control import ControlLimits
from banaserve.orchestrator.migration import registry

_DEFAULTS = OrchestratorConfig()


def add_orchestrator(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--orchestrator",
        choices=("off", "dry-run", "on"),
        help="who moves layers, heads and roles: off, on, or dry-run, which decides and moves "
        "nothing (dry-run; off without a store)",
    )
    add(
        "--orchestrator-policy",
        default=_DEFAULTS.policy,
        metavar="NAME",
        help=f"one of {', '.join(registry.names())}",
    )
    add(
        "--orchestrator-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the policy, such as delta_up=0.3",
    )
    add("--orchestrator-interval", type=float, default=_DEFAULTS.interval_s, metavar="S")
    add(
        "--orchestrator-concurrent",
        type=int,
        default=_DEFAULTS.concurrent,
        metavar="N",
        help="steps that may be under way at once",
    )
    add(
        "--orchestrator-per-minute",
        type=int,
        default=_DEFAULTS.per_minute,
        metavar="N",
        help="steps that may begin within a minute",
    )
    add("--decision-log", type=Path, metavar="FILE", help="append every decision, as JSON lines")


def orchestrator_of(known: argparse.Namespace) -> OrchestratorConfig:
    """Returns what the options say; without a store nothing is measured, so the default is off."""
    return OrchestratorConfig(
        mode=known.orchestrator or ("off" if known.no_kv_store else _DEFAULTS.mode),
        policy=known.orchestrator_policy,
        options=tuple(read_pair("--orchestrator-option", o) for o in known.orchestrator_option),
        interval_s=known.orchestrator_interval,
        concurrent=known.orchestrator_concurrent,
        per_minute=known.orchestrator_per_minute,
        decision_log=known.decision_log,
    )


def check_orchestrator(config: OrchestratorConfig) -> None:
    """Return if policy and limits make sense and the log can be written.

    Raises:
        UserError: One does not or cannot; names it.
    """
    section: dict[str, Any] = dict(config.options)
    registry.make(config.policy, **section)
    ControlLimits(concurrent=config.concurrent, per_minute=config.per_minute)
    DecisionLog(config.decision_log)
