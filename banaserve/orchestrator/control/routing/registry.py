"""Registry of routing policies."""

from __future__ import annotations

from typing import Any, Protocol

from banaserve.base.plugins.implementation_checks import check_class, check_options
from banaserve.base.plugins.policy_options import build_options, build_policy
from banaserve.base.plugins.registry import OWN, Registry
from banaserve.orchestrator.control.routing.interface import RoutingPolicy
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.routing.named import NamedPolicy


class PolicyClass(Protocol):
    """Class of a policy: the dataclass of its options, and its constructor."""

    Options: type[Any]

    def __call__(self, options: Any, legs: LegOptions, start: int) -> RoutingPolicy: ...


def _check(name: str, found: object) -> PolicyClass:
    policy = check_class(found, RoutingPolicy, ("options", "legs", "start"))
    check_options(policy)
    return policy


BUILT_IN = ("least_requests", "load_aware", "round_robin", "slo_aware")
"""Names of the built-in policies, and of their files in this folder."""

POLICIES: Registry[PolicyClass] = Registry(
    "routing policy",
    _check,
    [f"banaserve.orchestrator.control.routing.{name}" for name in BUILT_IN],
)
register = POLICIES.register
names = POLICIES.names


def make(
    name: str, /, *, legs: LegOptions | None = None, start: int = 0, **section: Any
) -> RoutingPolicy:
    """Build the policy ``name`` from its section of the configuration.

    Args:
        legs: Options of splitting requests into legs.
        start: Place where rotation among equals begins; give each front door its own.
        section: Options of the policy.

    Raises:
        UserError: The policy or an option is unknown, or a value is out of range.
    """
    policy, package, owner = POLICIES.get(name), POLICIES.owner(name), f"routing policy {name}"
    options = build_options(owner, policy.Options, policy.Options, section, package)
    return build_policy(owner, package, policy, options, legs or LegOptions(), start)


def make_named(
    name: str, /, *, legs: LegOptions | None = None, start: int = 0, **section: Any
) -> NamedPolicy:
    """Build the policy ``name`` as ``make`` does; messages about its errors name it.

    Raises:
        UserError: The policy or an option is unknown, or a value is out of range.
    """
    policy = make(name, legs=legs, start=start, **section)
    package = POLICIES.owner(name)
    return NamedPolicy(policy, name, "" if package == OWN else package)
