"""Options of routing."""

from __future__ import annotations

import argparse

from banaserve.cli.serve.options.orchestrator import orchestrator_of
from banaserve.config import SLO_AWARE, ServeConfig
from banaserve.orchestrator.routing import registry as routing_policies

_DEFAULTS = ServeConfig()


def add_routing(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add(
        "--routing-policy",
        metavar="NAME",
        help=f"one of {', '.join(routing_policies.names())} ({_DEFAULTS.routing_policy}; with the "
        f"policy elastic: {SLO_AWARE})",
    )
    add(
        "--routing-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the routing policy, such as preset=published; repeat for several",
    )
    add(
        "--skip-prefill-below-tokens",
        type=int,
        default=_DEFAULTS.skip_prefill_below_tokens,
        metavar="TOKENS",
        help="most tokens of a prompt, cached ones left out, that decode computes itself",
    )
    add(
        "--rebalance",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.rebalances,
        help="let streams leave overloaded instances for nearly idle ones of their role; "
        "needs the store (on)",
    )
    add(
        "--gather-decode",
        type=float,
        default=_DEFAULTS.gather_decode_s,
        metavar="SECONDS",
        help="time that a decode leg waits for prompts that are being computed for the same "
        "instance, to begin together: fewer steps, later second tokens (0: it does not wait)",
    )


def usual_routing(known: argparse.Namespace) -> str:
    """Return the default policy: if roles follow the load, one that may route against them."""
    return SLO_AWARE if orchestrator_of(known).is_elastic else _DEFAULTS.routing_policy
