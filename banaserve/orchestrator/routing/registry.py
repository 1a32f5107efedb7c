"""Registry of routing policies."""

from __future__ import annotations

from typing import Any, Protocol

from banaserve.orchestrator.routing.interface import RoutingPolicy
from banaserve.orchestrator.routing.legs import LegOptions
from banaserve.orchestrator.routing.named import NamedPolicy
from banaserve.registry import (
    OWN,
    Registry,
    build_options,
    build_policy,
    check_class,
    check_options,
)


class PolicyClass(Protocol):
    """A policy's class: its options' dataclass and how it is built from them."""

    Options: type[Any]

    def __call__(self, options: Any, legs: LegOptions, start: int) -> RoutingPolicy: ...


def _check(name: str, found: object) -> PolicyClass:
    policy = check_class(found, RoutingPolicy, ("options", "legs", "start"))
    check_options(policy)
    return policy


BUILT_IN = ("least_requests", "load_aware", "round_robin", "slo_aware")
"""Each is the name of a policy and of its file in this folder."""

POLICIES: Registry[PolicyClass] = Registry(
    "routing policy", _check, [f"banaserve.orchestrator.routing.{name}" for name in BUILT_IN]
)
register = POLICIES.register
names = POLICIES.names


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
    policy, package, owner = POLICIES.get(name), POLICIES.owner(name), f"routing policy {name}"
    options = build_options(owner, policy.Options, policy.Options, section, package)
    return build_policy(owner, package, policy, options, legs or LegOptions(), start)


def make_named(
    name: str, /, *, legs: LegOptions | None = None, start: int = 0, **section: Any
) -> NamedPolicy:
    """Builds the policy ``name`` as ``make`` does; its mistakes are told under its name.

    Raises:
        UserError: As ``make``.
    """
    policy = make(name, legs=legs, start=start, **section)
    package = POLICIES.owner(name)
    return NamedPolicy(policy, name, "" if package == OWN else package)
