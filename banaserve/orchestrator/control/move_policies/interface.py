"""Interface of migration policies, which plan the moves of modules and roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from banaserve.base.types import ClusterView, InstanceId, Step
from banaserve.orchestrator.control.measure import LeftOut


class RejectReason(StrEnum):
    """Reason that a candidate was rejected: shown to users, and a metric's label."""

    NOT_SUPPORTED = "the instance does not support it"
    OTHER_MODEL = "host and guest run different models"
    NOT_MEASURED = "the way between their machines has not been measured"
    TOO_FAR = "messages between their machines would cost each step these seconds, for too little"
    FAILED = "it failed a moment ago"
    BUSY = "an instance takes part in as many moves as it may"
    DWELL = "an instance changed too recently"
    GUEST_SHEDS = "the guest has given away modules itself"
    HOST_IS_GUEST = "the host holds modules of others"
    NO_MODULE = "no module of this size is free to move"
    TOO_MUCH_AWAY = "too much of the host would be away"
    GAP_TOO_SMALL = "the gap is too small for this kind of move"
    NO_OVERLAP = "host and guest would take turns: no relief of compute"
    NO_BLOCK_FREED = "the bytes that it frees make no KV block"
    NO_ROOM = "no room: KV blocks in use would not fit"
    TTFT_BUDGET = "time to first token would be over its budget"
    TPOT_BUDGET = "time per output token would be over its budget"
    MIGRATION_BUDGET = "the migration time budget is spent"
    NO_BENEFIT = "it does not lower the pressure"
    NOT_WORTH_IT = "benefit over cost is below rho"
    SWITCH_LIMIT = "enough instances have changed roles for now"
    WORSE = "another candidate brings more for its cost"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that was considered and rejected.

    Attributes:
        candidate: Description of the candidate: module or role, source and target.
        value: Number that decided (efficiency, seconds, load); None without one.
    """

    candidate: str
    reason: RejectReason
    value: float | None = None


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Steps to take, in this order, and the rejected candidates with their reasons.

    Attributes:
        left_out: Instances left out of the decision, each with the reason.
        gap: Greatest difference of load between two instances, as the policy measures it.
        is_balancing: State of balancing, handed back in the next ``ClusterView``.
        memory: Immutable state of the policy, handed back in the next ``ClusterView``.
        reason: Reason why there are no more steps than these.
        is_ordered: True if each step begins only after the previous one is done; if one is not
            done, no later step begins.
    """

    steps: tuple[Step, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    left_out: Mapping[InstanceId, LeftOut] = field(default_factory=dict)
    gap: float = 0.0
    is_balancing: bool = False
    reason: str = ""
    memory: object = None
    is_ordered: bool = False


class MigrationPolicy(Protocol):
    """Policy that chooses the modules to move, and the roles to change.

    A policy moves nothing, reads no clock, draws no random number and keeps no state between calls:
    equal views give equal plans.

    The class of a policy is in the registry, or an entry point of the group
    ``banaserve.migration_policies``. It is built as ``policy(options)`` and has an attribute
    ``Options``: a frozen dataclass of its own options, each with a default, that raises
    ``UserError`` for a value out of range. Names of options end in their unit: with time dilation,
    options that end in ``_s`` and ``_per_s`` are scaled, too. Options of a policy that are named
    ``link_bytes_per_s``, ``link_sync_s`` and ``link_hop_s`` get what migrations have taught, where
    they are not given.
    """

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        """Return the next steps for ``cluster``; must not change ``cluster``."""
        ...
