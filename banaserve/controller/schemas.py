"""State of the controller as plain values: in memory, in a file and over HTTP as JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from banaserve.engine.interface import NodeStatus

DECISION_LOG_VERSION = 1
"""Grows when readers of the log would misread it; lines of before it was counted have none."""


class PlacedModule(msgspec.Struct, frozen=True):
    """Layers ``first_layer`` to ``end_layer``, without ``end_layer``, that run beside ``at``.

    Attributes:
        heads: KV heads of each; empty for whole layers.
    """

    first_layer: int
    end_layer: int
    heads: list[int]
    at: str


class Numbers(msgspec.Struct, frozen=True):
    """Load of one instance as a decision saw it; smoothed, the shares in [0, 1].

    Attributes:
        compute: Load of compute: busy time times the fill of a step.
        memory: KV blocks in use.
        age_s: Of its report.
        away: Modules that run elsewhere, in words; ``placements`` are the same as numbers.
        gpu_busy_fraction: By NVML; None where its GPUs are not read.
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
    """Change on one instance: as predicted of a step, or as measured after it."""

    compute: float
    memory: float
    kv_blocks: int
    step_s: float


class StepRecord(msgspec.Struct):
    """End of a step, beside the prediction.

    Attributes:
        ending: done, refused, failed, aborted or timed out.
        seconds: It took; ``WantedStep.cost_s`` were predicted.
        changed: By instance, some seconds after the end against the decision; empty until then.
        ended_at_s: Seconds since 1970.
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
        target: Where they will run; ``source`` itself where they come home.
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
        what: In words.
        kind: layers, heads, return or role.
        held: Why it did not begin; empty where it did.
        predicted: By instance.
        result: None until it has ended.
        move: What it moves; None for one that moves no modules.
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
    """A candidate that was not taken; ``value`` is the number that decided."""

    candidate: str
    reason: str
    value: float | None = None


class DecisionRecord(msgspec.Struct):
    """One turn of the loop, or several in a row that differ only in their numbers.

    Attributes:
        number: Counts decisions from 1 on.
        at_s: Seconds since 1970; of the last turn where there were several.
        mode: dry-run or on; ``paused`` where a person has paused it.
        gap: Between the fullest and the emptiest instance, as the policy measures it.
        reason: Why there are no more steps than these.
        instances: What was seen, by id.
        left_out: Instances that took no part, each with the reason.
        took_s: Time of the decision itself.
        turns: So many came to the same.
        num_layers, num_kv_heads: Of the model; 0 where no instance says.
        time: How time passes, in words; empty where it is real.
        version: Of the log.
        back_pressure: Prefill that waits for room in the store, in words; empty where none does.
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
    """The controller in a few words.

    Attributes:
        error: Of its last failure; empty where it never failed.
        link_bytes_per_s, link_sync_s, link_hop_s: What moves are weighed with: learnt from those
            that were made.
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
    """One instance at this moment.

    Attributes:
        state: ready, draining, drained, restarting, down, or away with its node.
        compute, memory: Its load; None where it has not reported.
        age_s: Of its report.
        kv_blocks: Of its pool; ``kv_blocks_gained`` due to what is away.
        away: What runs elsewhere, in words with the place.
        guests: Whose modules run beside it, in words.
        left_out: Why no decision counts on it; empty where they do.
        gpu_busy_fraction, gpu_memory_fraction: By NVML; None where its GPUs are not read.
        node: That it runs on; empty for the server's own machine.
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
    """A migration, role switch, scaling, rolling restart or change of nodes that is under way, or
    has ended lately."""

    id: str
    what: str
    state: str
    seconds: float = 0.0
    error: str = ""


class ServerStatus(msgspec.Struct, frozen=True):
    """State of a running server, for one screen.

    Attributes:
        routing_policy: Name of the policy that chooses instances for requests.
        routing_package: Name and version of the package that it is from; empty for banaserve's own.
        nodes: That engines run on; empty where that is the server's own machine.
        back_pressure: Prefill that waits for room in the store, in words; empty where none does.
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
    """Pause the controller, or let it go on; what is under way comes to its end."""

    paused: bool


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give ``instance`` another role once what it runs has ended.

    Attributes:
        role: ``prefill``, ``decode`` or ``both``.
        max_num_batched_tokens: Most tokens of its steps from then on; 0 is what its role has. With
            it ``role`` may be the one that it has.
    """

    instance: str
    role: str
    timeout_s: float = 300.0
    max_num_batched_tokens: int = 0


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Add and remove instances until there are so many; a number that is not given stays.

    Attributes:
        colocated: Instances that do both.
        instances: Of all together; where roles follow the load, alone.
        timeout_s: For the last request of an instance that is removed.
    """

    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    instances: int | None = None
    timeout_s: float = 300.0


class NodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take one more node, or drain one and give it back.

    Attributes:
        action: ``add`` or ``remove``.
        node: ``HOST:PORT`` of its agent; with ``--cluster`` the address of one of Ray's nodes that
            is to be added.
        timeout_s: For the last request of each instance of a node that is removed.
        are_replaced: As many instances are added on other nodes before it leaves.
    """

    action: Literal["add", "remove"]
    node: str
    timeout_s: float = 300.0
    are_replaced: bool = True
