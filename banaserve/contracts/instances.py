"""Executor interface: steps ordered by a control loop, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from banaserve.base.types import ClusterView, Step
from banaserve.orchestrator.control.model.moving import Link


class Ending(StrEnum):
    """Result of a step: shown to people, and used as the label of a metric."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of carrying out a step.

    Attributes:
        reason: Reason why the step is not done; empty if it is done.
        seconds: Duration of the step, in seconds.
        num_bytes: Number of bytes transferred: KV and weights.
        stall_s: Time for which the host could not run engine steps, in seconds.
        blocks_gained: Growth of the host's pool, in blocks; negative if the pool has shrunk.
        reverted: True if the step was not done in time and its finished part was undone.
    """

    ending: Ending
    reason: str = ""
    seconds: float = 0.0
    num_bytes: int = 0
    stall_s: float = 0.0
    blocks_gained: int = 0
    reverted: bool = False


class RoleChange(msgspec.Struct):
    """Role switch of an instance; sent over HTTP as JSON.

    Attributes:
        old, role: Old and new role: ``prefill``, ``decode`` or ``colocated``, which does both.
        state: State: draining, done, aborted, failed or timed out.
        num_left: Number of requests still on the instance; once the switch is done, the number of
            requests of the old role that still run.
    """

    id: str
    instance: str
    old: str
    role: str
    state: str
    reason: str = ""
    num_left: int = 0
    seconds: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.state == "draining"

    def __str__(self) -> str:
        """Return the progress of the switch, for people."""
        left = f", {self.num_left} left" if self.is_open else ""
        return f"{self.instance} from {self.old} to {self.role}{left}"


class DrainState(msgspec.Struct, frozen=True):
    """Drain state of an instance; sent over HTTP as JSON.

    Attributes:
        is_held: True if the instance is drained: it receives no requests.
        num_left: Number of requests still on the instance.
    """

    instance: str
    is_held: bool
    num_left: int


class Scaling(msgspec.Struct):
    """Change of the number of instances; sent over HTTP as JSON.

    Attributes:
        wanted: Description of the wanted instances, for people.
        state: State: starting, draining, done, failed or aborted.
        added: Instances that are starting or have started; they serve once all have started.
        removed: Instances that have been removed.
        leaving: Instance that is being drained; empty for none.
        num_left: Number of requests still on the instance ``leaving``.
        now: Description of the event being waited for, for people.
        why: Load that triggered the scaling; empty if a person requested it.
        reason: Reason of the failure; empty if the scaling has not failed.
    """

    id: str
    wanted: str
    state: str
    added: list[str] = []
    removed: list[str] = []
    leaving: str = ""
    num_left: int = 0
    now: str = ""
    why: str = ""
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_open(self) -> bool:
        return self.state in ("starting", "draining")

    def __str__(self) -> str:
        """Return the progress of the scaling, for people."""
        return f"to {self.wanted}{_why_and_now(self)}"


class NodeStatus(msgspec.Struct, frozen=True):
    """State of a node: a machine, other than the server's own, that runs engines.

    Sent over HTTP as JSON.

    Attributes:
        state: State: ready, leaving or away.
        instances: Ids of the node's instances.
        num_free: Number of further instances that fit; negative if the node has too many.
        num_gpus: Number of GPUs available to instances; 0 on CPU.
        memory_bytes: Memory that was available when the server took the node, in bytes.
        problem: Reason why the node is away; empty if it is not.
    """

    name: str
    state: str
    instances: list[str] = []
    num_free: int = 0
    num_gpus: int = 0
    memory_bytes: int = 0
    problem: str = ""


class NodeChange(msgspec.Struct):
    """Change of a server's nodes: one node joins or leaves; sent over HTTP as JSON.

    Attributes:
        node: Node as named in the request; once it has joined, its name as in ``status``.
        action: Action: add or remove.
        state: State: joining, leaving, done, failed or aborted.
        why: Reason of a change that no person requested; empty otherwise.
        now: Description of the event being waited for, for people.
        reason: Reason of the failure; empty if the change has not failed.
    """

    id: str
    node: str
    action: str
    state: str
    why: str = ""
    now: str = ""
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_open(self) -> bool:
        return self.state in ("joining", "leaving")

    def __str__(self) -> str:
        """Return the progress of the change, for people."""
        return f"{self.action} node {self.node}{_why_and_now(self)}"


def _why_and_now(change: Scaling | NodeChange) -> str:
    why = f" ({change.why})" if change.why else ""
    return why + (f": {change.now}" if change.now else "")


class Executor(Protocol):
    """Executor of the steps of migration plans, on real or simulated instances."""

    async def discover(self) -> None:
        """Ask the instances for their placements, unknown to a control loop that just started."""
        ...

    def view(self) -> ClusterView:
        """Return all instances with facts and placements, and all running steps; never blocks."""
        ...

    async def carry_out(self, step: Step) -> StepOutcome:
        """Carry out one step and return when it has ended; never raise for an impossible step.

        A step that takes longer than ``step.timeout_s`` is aborted, and the part of it that is
        already in place is undone. Cancelling this call aborts the step, too.
        """
        ...

    def link(self) -> Link:
        """Return the link that sets the costs of migrations and remote modules.

        The link is measured if possible, otherwise a guess.
        """
        ...
