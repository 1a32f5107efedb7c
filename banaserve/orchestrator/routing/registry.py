"""Routing policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any, Protocol, TypeVar

from banaserve.names import check_known
from banaserve.orchestrator.routing.interface import RoutingPolicy
from banaserve.orchestrator.routing.legs import LegOptions


class PolicyClass(Protocol):
    """A policy's class: its options' dataclass and how it is built from them."""

    Options: type[Any]

    def __call__(self, options: Any, legs: LegOptions, start: int) -> RoutingPolicy: ...


BUILT_IN = ("least_requests", "load_aware", "round_robin")
"""Each is the name of a policy and of its file in this folder."""

_policies: dict[str, PolicyClass] = {}

P = TypeVar("P", bound=PolicyClass)


def register(name: str) -> Callable[[P], P]:
    """Makes the decorated class known as ``name``; a second class of that name is an error."""

    def add(policy: P) -> P:
        if name in _policies:
            raise ValueError(f"a routing policy named {name!r} exists already")
        _policies[name] = policy
        return policy

    return add


def names() -> list[str]:
    """Returns every policy's name in alphabetical order."""
    for file_name in BUILT_IN:
        import_module(f"banaserve.orchestrator.routing.{file_name}")
    return sorted(_policies)


def make(
    name: str, /, *, legs: LegOptions | None = None, start: int = 0, **section: Any
) -> RoutingPolicy:
    """Builds the policy ``name`` from its section of the configuration.

    Args:
        legs: How requests are split into legs.
        start: Where rotation among equals begins; give each front door its own.
        section: The policy's own options.

    Raises:
        UserError: An unknown policy, an unknown option or a value out of range.
    """
    check_known("routing policy", name, names())
    policy = _policies[name]
    known = [field.name for field in fields(policy.Options)]
    for option in section:
        check_known(f"option of routing policy {name}", option, known)
    return policy(policy.Options(**section), legs or LegOptions(), start)
