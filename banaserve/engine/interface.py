"""Executor interface: steps that a control loop orders, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from banaserve.orchestrator.model.moving import Link
from banaserve.types import ClusterView, Step


class Ending(StrEnum):
    """How a step has ended: shown to people, and a metric's label."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What carrying out a step has come to.

    Attributes:
        reason: Why it is not done; empty where it is.
        seconds: From the beginning to the end.
        num_bytes: That travelled: KV and weights.
        stall_s: How long it kept its host from stepping.
        blocks_gained: By how much the host's pool has grown; negative where it has shrunk.
        reverted: It was over its time with a part of it in place, which was taken back.
    """

    ending: Ending
    reason: str = ""
    seconds: float = 0.0
    num_bytes: int = 0
    stall_s: float = 0.0
    blocks_gained: int = 0
    reverted: bool = False


class RoleChange(msgspec.Struct):
    """An instance on its way to another role; over HTTP as JSON.

    Attributes:
        old, role: ``prefill``, ``decode`` or ``colocated``, which does both.
        state: draining, done, aborted, failed or timed out.
        num_left: Requests that are still on it; when it is done, those that run on beside the role.
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


class DrainState(msgspec.Struct, frozen=True):
    """An instance that is drained, or was; over HTTP as JSON.

    Attributes:
        is_held: It is sent nothing.
        num_left: Requests that are still on it.
    """

    instance: str
    is_held: bool
    num_left: int


class Scaling(msgspec.Struct):
    """A change of the number of instances; over HTTP as JSON.

    Attributes:
        wanted: What there is to be, in words.
        state: starting, draining, done, failed or aborted.
        added: Instances that start, or have started; they serve once all of them have.
        removed: Instances that have been removed.
        leaving: The instance that is drained at present; empty for none.
        num_left: Requests that are still on it.
        now: What is waited for, in words.
        why: The load that it answers; empty where a person has asked for it.
        reason: Why it failed; empty where it did not.
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


class NodeStatus(msgspec.Struct, frozen=True):
    """A machine that engines run on, other than the server's own; over HTTP as JSON.

    Attributes:
        state: ready, leaving or away.
        instances: That it has.
        num_free: How many more it has room for; negative where it has too many.
        num_gpus: That instances may have; 0 on CPU.
        memory_bytes: That was available when the server took it.
        problem: Why it is away; empty where it is not.
    """

    name: str
    state: str
    instances: list[str] = []
    num_free: int = 0
    num_gpus: int = 0
    memory_bytes: int = 0
    problem: str = ""


class NodeChange(msgspec.Struct):
    """A node that joins a server, or leaves it; over HTTP as JSON.

    Attributes:
        node: As whoever asked for it names it; once it has joined, as ``status`` does.
        action: add or remove.
        state: joining, leaving, done, failed or aborted.
        why: Who wants it, where that is no person.
        now: What is waited for, in words.
        reason: Why it failed; empty where it did not.
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


class Executor(Protocol):
    """Carries out the steps of migration plans on real or simulated instances."""

    async def discover(self) -> None:
        """Ask the instances for their placements, since the control loop may have just begun."""
        ...

    def view(self) -> ClusterView:
        """All instances with facts and placements, and every step under way; never blocks."""
        ...

    async def carry_out(self, step: Step) -> StepOutcome:
        """Carry out one step and return when it has ended; never raises for a step that cannot be.

        One that takes longer than ``step.timeout_s`` is aborted; where a part of it is in place by
        then, that is taken back. Cancelling it aborts it too.
        """
        ...

    def link(self) -> Link:
        """What migrations cost and remote modules add to steps: as measured, else a guess."""
        ...
