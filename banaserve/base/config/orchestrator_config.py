"""Configuration of the orchestrator: each field is declared together with its option."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from banaserve.base.arguments import Options, Rule, check_rules, option, pairs, values_of

SLO_AWARE = "slo_aware"
"""Name of the routing policy that uses the limits of ``--slo-ttft`` and ``--slo-tpot``."""
ELASTIC_INTERVAL_S = 1.0
"""Time between two decisions of the elastic policy, in seconds."""
ANY_NUMBER = 10_000
"""Limit of the changes of the elastic policy, never reached: its plans are carried out as a whole,
and its role changes drain nothing."""
_LIMIT = Rule(lambda value: value >= 0, "seconds above 0, or 0 for no limit")
_orchestrator = partial(option, group="orchestrator")


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """Configuration of the orchestrator, which balances instances.

    Attributes:
        options: Options of the policy.
        concurrent, per_minute: Maximum numbers of steps under way at once, and of steps that begin
            within a minute.
    """

    mode: str = _orchestrator(
        "who moves layers, heads and roles: off, on, or dry-run, which decides and moves nothing "
        "(dry-run; off without a store)",
        "dry-run",
        name="--orchestrator",
        choices=("off", "dry-run", "on"),
        decided=True,
    )
    policy: str = _orchestrator(
        "one of {names} (repaired)",
        "repaired",
        name="--orchestrator-policy",
        metavar="NAME",
        decided=True,
        read=lambda known: known.policy or None,
    )
    slo_ttft_s: float = _orchestrator(
        "limit of the time to first token; a request may name its own in a header (0: no limit)",
        0.0,
        rule=_LIMIT,
    )
    slo_tpot_s: float = _orchestrator(
        "limit of the mean time per output token after the first (0: no limit)", 0.0, rule=_LIMIT
    )
    options: Options = pairs(
        "option of the policy, such as delta_up=0.3; repeat for several",
        name="--orchestrator-option",
        group="orchestrator",
    )
    interval_s: float = _orchestrator(
        f"time between two decisions (2; elastic: {ELASTIC_INTERVAL_S:g})",
        2.0,
        name="--orchestrator-interval",
        decided=True,
        rule=Rule(lambda value: value > 0, "must be above 0"),
    )
    concurrent: int = _orchestrator(
        "changes that may be under way at once (2; elastic: any)",
        2,
        name="--orchestrator-concurrent",
        decided=True,
    )
    per_minute: int = _orchestrator(
        "changes that may begin within a minute (6; elastic: any)",
        6,
        name="--orchestrator-per-minute",
        decided=True,
    )
    decision_log: Path | None = _orchestrator(
        "file to append decisions to, as JSON lines", None, Path, metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_rules(self)

    @classmethod
    def of(cls, known: Namespace) -> OrchestratorConfig:
        """Return the configuration; without a store nothing is measured, so the default is off."""
        is_elastic = known.elastic or (known.instances and known.mode is None)
        usual: dict[str, Any] = {"policy": "elastic", "mode": "on"} if is_elastic else {}
        if not known.kv_store:
            usual["mode"] = "off"
        given = values_of(cls, known)
        if {**usual, **given}.get("policy") == "elastic":
            usual |= {"concurrent": ANY_NUMBER, "per_minute": ANY_NUMBER}
            usual["interval_s"] = ELASTIC_INTERVAL_S
        return cls(**usual | given)

    @property
    def is_elastic(self) -> bool:
        """True if the orchestrator decides by forecasts, that is, by the elastic policy."""
        return self.policy == "elastic" and self.mode != "off"
