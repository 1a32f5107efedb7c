"""Options of budgets: bounds of an engine's steps by its role."""

from __future__ import annotations

import argparse

from banaserve.config import Budget
from banaserve.types import Role

_ROLES = (Role.PREFILL, Role.DECODE)
_WHAT = {
    "max-num-batched-tokens": "most tokens of a step",
    "max-num-seqs": "most sequences of a step",
}


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    group = parser.add_argument_group(
        "budgets", "as vLLM's options of the same names, which they may not exceed; by role"
    )
    for role in _ROLES:
        for name in _WHAT:
            option = f"--{role.value}-{name}"
            words = f"{_WHAT[name]} of {role.value} instances (as --{name})"
            group.add_argument(option, type=int, default=0, metavar="N", help=words)


def budget_of(known: argparse.Namespace, role: Role) -> Budget:
    """Return the budget that the options set for ``role``."""
    return Budget(
        getattr(known, f"{role.value}_max_num_batched_tokens"),
        getattr(known, f"{role.value}_max_num_seqs"),
    )
