"""State of the controller as plain values: in memory, in a file and over HTTP as JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from banaserve.contracts.instances import NodeStatus

DECISION_LOG_VERSION = 1
"""Version of the log format, raised if old readers would misread it; the oldest lines have none."""


class PlacedModule(msgspec.Struct, frozen=True):
    """Layers from ``first_layer`` up to, without, ``end_layer`` that run beside instance ``at``.

    Attributes:
        heads: KV heads of each layer; empty for whole layers.
    """

    first_layer: int
    end_layer: int
    heads: list[int]
    at: str


class Numbers(msgspec.Struct, frozen=True):
    """Smoothed load of one instance as a decision saw it; shares are in [0, 1].

    Attributes:
        compute: Load of compute: busy time multiplied by the fill of a step.
        memory: Share of the KV blocks in use.
        age_s: Age of its report, in seconds.
        away: Modules that run elsewhere, in words; ``placements`` has the same as numbers.
        gpu_busy_fraction: Share of time its GPUs are busy, by NVML; None if its GPUs are not read.
    """

    role: str
    compute: float
    memory: float
    busy_fraction: float
    step_fill_fraction: float
    step_s: float
    step_tokens: float
    num_running: int
    num_waiting: int
    inflight_prefill_tokens: int
    num_kv_blocks: int
    guest_bytes: int
    age_s: float
    away: list[str]
    placements: list[PlacedModule] = []
    gpu_busy_fraction: float | None = None


class Felt(msgspec.Struct, frozen=True):
    """Change on one instance, predicted for a step or measured after it."""

    compute: float
    memory: float
    kv_blocks: int
    step_s: float


class StepRecord(msgspec.Struct):
    """Outcome of a step, to compare with its prediction.

    Attributes:
        ending: Kind of ending: done, refused, failed, aborted or timed out.
        seconds: Duration of the step; ``WantedStep.cost_s`` is the prediction.
        changed: Changes by instance from the decision to some seconds after the end; empty until
            then.
        ended_at_s: Time of the end, in seconds since 1970.
    """

    ending: str
    reason: str
    seconds: float
    num_bytes: int
    stall_s: float
    blocks_gained: int
    reverted: bool
    changed: dict[str, Felt] = {}
    ended_at_s: float = 0.0


class WantedMove(msgspec.Struct, frozen=True):
    """Modules of ``source`` that a step moves.

    Attributes:
        target: Instance beside which the modules will run; ``source`` if they come home.
        heads: KV heads of each layer; empty for whole layers.
    """

    source: str
    target: str
    first_layer: int
    end_layer: int
    heads: list[int]


class WantedStep(msgspec.Struct):
    """A step of a plan.

    Attributes:
        what: Description of the step, in words.
        kind: Kind of step: layers, heads, return, role, chunk or streams.
        held: Reason why the step did not begin; empty if it began.
        predicted: Predicted changes by instance.
        result: Outcome of the step; None until it has ended.
        move: Modules that the step moves; None if it moves none.
    """

    what: str
    kind: str
    cost_s: float
    benefit_s: float
    timeout_s: float
    predicted: dict[str, Felt]
    held: str = ""
    result: StepRecord | None = None
    move: WantedMove | None = None


class Rejection(msgspec.Struct, frozen=True):
    """A candidate that was rejected; ``value`` is the number that decided."""

    candidate: str
    reason: str
    value: float | None = None


class DecisionRecord(msgspec.Struct):
    """One turn of the loop, or several in a row that differ only in their numbers.

    Attributes:
        number: Number of the decision, counted from 1.
        at_s: Time of the decision, or of the last of several turns, in seconds since 1970.
        mode: ``dry-run`` or ``on``; ``paused`` while an operator has paused the loop.
        gap: Gap between the fullest and the emptiest instance, as the policy measures it.
        reason: Reason why there are no more steps than these.
        instances: Loads that the decision saw, by instance.
        left_out: Instances left out of the decision, each with the reason.
        took_s: Duration of the decision itself, in seconds.
        turns: Number of consecutive turns with this decision.
        num_layers, num_kv_heads: Dimensions of the model; 0 if no instance reports them.
        time: Description of how time passes; empty in real time.
        version: Version of the log format.
        back_pressure: Prefill that waits for room in the store, in words; empty if none waits.
    """

    number: int
    at_s: float
    mode: str
    policy: str
    gap: float
    is_balancing: bool
    reason: str
    instances: dict[str, Numbers]
    left_out: dict[str, str]
    steps: list[WantedStep]
    rejected: list[Rejection]
    took_s: float = 0.0
    turns: int = 1
    num_layers: int = 0
    num_kv_heads: int = 0
    time: str = ""
    version: int = DECISION_LOG_VERSION
    back_pressure: str = ""


class ControllerState(StrEnum):
    """Present state of the loop."""

    OFF = "off"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting after a failure"


class ControllerStatus(msgspec.Struct, frozen=True):
    """Summary of the controller's state.

    Attributes:
        error: Message of the last failure; empty if there was none.
        link_bytes_per_s, link_sync_s, link_hop_s: Link properties by which moves are judged, learnt
            from previous moves.
    """

    state: ControllerState
    mode: str
    policy: str
    interval_s: float
    num_decisions: int = 0
    num_restarts: int = 0
    error: str = ""
    last_at_s: float | None = None
    gap: float = 0.0
    reason: str = ""
    left_out: dict[str, str] = {}
    link_bytes_per_s: float = 0.0
    link_sync_s: float = 0.0
    link_hop_s: float = 0.0


class InstanceStatus(msgspec.Struct, frozen=True):
    """Present state of one instance.

    Attributes:
        state: ready, draining, drained, restarting, down, or away with its node.
        compute, memory: Load of the instance, in [0, 1]; None if it has not reported.
        age_s: Age of its report, in seconds.
        kv_blocks: Number of KV blocks of its pool.
        kv_blocks_gained: Number of these blocks gained because modules are away.
        away: Modules that run elsewhere, in words, each with its place.
        guests: Modules of other instances that run beside it, in words, each with its host.
        left_out: Reason why decisions leave the instance out; empty if they do not.
        gpu_busy_fraction, gpu_memory_fraction: Use of its GPUs by NVML; None if they are not read.
        node: Node of the instance; empty for the server's own machine.
    """

    id: str
    role: str
    state: str
    inflight_requests: int
    inflight_prefill_tokens: int
    compute: float | None = None
    memory: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    step_s: float = 0.0
    step_tokens: float = 0.0
    age_s: float | None = None
    kv_blocks: int = 0
    kv_blocks_gained: int = 0
    guest_bytes: int = 0
    epoch: int = 0
    away: list[str] = []
    guests: list[str] = []
    left_out: str = ""
    gpu_busy_fraction: float | None = None
    gpu_memory_fraction: float | None = None
    node: str = ""


class MoveLine(msgspec.Struct, frozen=True):
    """Migration, role switch, scaling, rolling restart or change of nodes, under way or recent."""

    id: str
    what: str
    state: str
    seconds: float = 0.0
    error: str = ""


class ServerStatus(msgspec.Struct, frozen=True):
    """State of a running server, for one screen.

    Attributes:
        routing_policy: Name of the policy that chooses instances for requests.
        routing_package: Name and version of that policy's package; empty for banaserve's own.
        nodes: Nodes that engines run on; empty if engines run on the server's own machine.
        back_pressure: Prefill that waits for room in the store, in words; empty if none waits.
    """

    at_s: float
    instances: list[InstanceStatus]
    moves: list[MoveLine]
    controller: ControllerStatus
    routing_policy: str = ""
    routing_package: str = ""
    nodes: list[NodeStatus] = []
    back_pressure: str = ""


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to pause or resume the controller; steps under way continue to their end."""

    paused: bool


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to give ``instance`` another role once its running requests have ended.

    Attributes:
        role: New role: ``prefill``, ``decode`` or ``both``.
        max_num_batched_tokens: Maximum number of tokens of its steps from then on; 0 is the role's
            default. With another value, ``role`` may be the present role.
    """

    instance: str
    role: str
    timeout_s: float = 300.0
    max_num_batched_tokens: int = 0


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to add or remove instances up to these numbers; a number not given stays unchanged.

    Attributes:
        colocated: Number of instances that serve both legs.
        instances: Number of all instances together; must be the only one if roles follow the load.
        timeout_s: Time limit for the last request of an instance that is removed, in seconds.
    """

    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    instances: int | None = None
    timeout_s: float = 300.0


class NodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to add a node, or to drain a node and release it.

    Attributes:
        action: ``add`` or ``remove``.
        node: ``HOST:PORT`` of the node's agent; with ``--cluster``, the address of the Ray node to
            add.
        timeout_s: Time limit for the last request of each instance of a removed node, in seconds.
        are_replaced: True if as many instances are added on other nodes before the node leaves.
    """

    action: Literal["add", "remove"]
    node: str
    timeout_s: float = 300.0
    are_replaced: bool = True
