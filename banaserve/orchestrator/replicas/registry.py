"""Policies over replicas by name, and their presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, TypeVar

from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.orchestrator.replicas.interface import Generator, ReplicaPolicy
from banaserve.orchestrator.replicas.policy import Policy

BUILT_IN = (
    "cache_aware",
    "consistent_hash",
    "gorgo",
    "least_load",
    "least_requests",
    "load_aware",
    "power_of_two",
    "preble",
    "prefix_cache",
    "random_choice",
    "round_robin",
    "session_affinity",
    "skywalker",
    "papers.gorgo_v1",
)
"""Modules below this folder; one may hold several policies."""

UNIT_BYTES = (1, 4, 8)
"""Of text, tokens and digests of blocks."""

_policies: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def register(name: str) -> Callable[[P], P]:
    """Makes the decorated class known as ``name``; a second class of that name is an error."""

    def add(policy: P) -> P:
        if name in _policies:
            raise ValueError(f"a policy named {name!r} exists already")
        _policies[name] = policy
        return policy

    return add


def names() -> list[str]:
    """Returns every policy's name in alphabetical order."""
    for file_name in BUILT_IN:
        import_module(f"banaserve.orchestrator.replicas.{file_name}")
    return sorted(_policies)


def presets(name: str) -> list[str]:
    """Returns the presets of policy ``name``, its default first.

    Raises:
        UserError: An unknown policy.
    """
    return list(_policy(name).PRESETS)


def make(
    name: str,
    /,
    generator: Generator,
    *,
    preset: str | None = None,
    unit_bytes: int = 1,
    **section: Any,
) -> ReplicaPolicy:
    """Builds the policy ``name`` from its section of the configuration.

    Args:
        generator: Seeded, of this policy alone.
        preset: The options to start from; None for the policy's default.
        unit_bytes: Of the prompts that it will be asked about; see ``Request.prompt``.
        section: Options that differ from the preset.

    Raises:
        UserError: An unknown policy, preset or option, or a value out of range.
    """
    policy = _policy(name)
    check_known(f"preset of policy {name}", preset or next(iter(policy.PRESETS)), policy.PRESETS)
    if unit_bytes not in UNIT_BYTES:
        raise UserError(f"unit_bytes is {unit_bytes}: give one of {UNIT_BYTES}")
    options = policy.PRESETS[preset or next(iter(policy.PRESETS))]
    known = [field.name for field in fields(options)]
    for option in section:
        check_known(f"option of policy {name}", option, known)
    return policy(replace(options, **section), generator, unit_bytes)


def _policy(name: str) -> type[Policy]:
    check_known("policy", name, names())
    return _policies[name]
