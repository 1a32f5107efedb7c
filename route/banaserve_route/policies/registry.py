"""Registry of replica policies, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from banaserve.base.errors import UserError
from banaserve.base.plugins.implementation_checks import check_class, check_frozen
from banaserve.base.plugins.policy_options import build_options, build_policy
from banaserve.base.plugins.registry import Registry
from banaserve.base.text.names import check_known
from banaserve_route.policies.interface import Generator, Need, ReplicaPolicy
from banaserve_route.policies.policy import Policy
from banaserve_route.policies.prefixes.peers import SharesPrefixes

BUILT_IN = (
    "baselines.cache_aware",
    "baselines.consistent_hash",
    "gorgo.gorgo",
    "baselines.least_load",
    "baselines.least_requests",
    "load_aware",
    "gorgo.gorgo_v1",
    "baselines.power_of_two",
    "preble.policy",
    "predicted_latency",
    "baselines.prefix_cache",
    "baselines.random_choice",
    "baselines.round_robin",
    "baselines.session_affinity",
    "skywalker",
)
"""Modules with policies below this folder; a module may have several policies."""

UNIT_BYTES = (1, 4, 8)
"""Unit sizes of text, of tokens and of digests of blocks."""


def _check(name: str, found: object) -> type[Policy]:
    policy = check_class(found, ReplicaPolicy, ("options", "generator", "unit_bytes"))
    if not issubclass(policy, Policy):
        raise UserError(f"{policy.__name__} does not derive from {Policy.__module__}.Policy")
    presets = getattr(policy, "PRESETS", None)
    if not isinstance(presets, Mapping) or not presets:
        raise UserError(f"{policy.__name__}.PRESETS names no options: give at least the default")
    for preset, options in presets.items():
        if isinstance(options, type) or not is_dataclass(options):
            raise UserError(f"{policy.__name__}.PRESETS[{preset!r}] is no instance of a dataclass")
        check_frozen(options, f"{policy.__name__}.PRESETS[{preset!r}]")
    check_needs(policy)
    return policy


def check_needs(policy: type[Policy]) -> None:
    """Check that the needs that ``policy`` declares are known, and that it can take their input.

    Raises:
        UserError: A need is unknown, or the policy lacks the method for it.
    """
    for need in policy.needs:
        check_known(f"need of {policy.__name__}", need, list(Need))
    if Need.PEER_PREFIXES in policy.needs and not issubclass(policy, SharesPrefixes):
        raise UserError(f"{policy.__name__} needs peers' prefixes and has no share_prefixes()")


POLICIES: Registry[type[Policy]] = Registry(
    "policy", _check, [f"banaserve_route.policies.{name}" for name in BUILT_IN]
)
register = POLICIES.register
names = POLICIES.names


def presets(name: str) -> list[str]:
    """Return the presets of policy ``name``, its default first.

    Raises:
        UserError: The policy is unknown.
    """
    return list(POLICIES.get(name).PRESETS)


def make(
    name: str,
    /,
    generator: Generator,
    *,
    preset: str | None = None,
    unit_bytes: int = 1,
    **section: Any,
) -> ReplicaPolicy:
    """Build the policy ``name`` from its section of the configuration.

    Args:
        generator: Seeded random generator for this policy only.
        preset: Name of the options to start from; None for the policy's default.
        unit_bytes: Size of a unit of the prompts, see ``Request.prompt``.
        section: Options that differ from the preset.

    Raises:
        UserError: The policy, preset or an option is unknown, or a value is out of range.
    """
    policy, package, owner = POLICIES.get(name), POLICIES.owner(name), f"policy {name}"
    preset = preset or next(iter(policy.PRESETS))
    check_known(f"preset of policy {name}", preset, policy.PRESETS)
    if unit_bytes not in UNIT_BYTES:
        raise UserError(f"unit_bytes is {unit_bytes}: give one of {UNIT_BYTES}")
    start = policy.PRESETS[preset]

    def changed(**changes: Any) -> Any:
        return replace(start, **changes)

    options = build_options(owner, start, changed, section, package)
    return build_policy(owner, package, policy, options, generator, unit_bytes)
