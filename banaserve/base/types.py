"""Values that pass between the layers of the code. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)

NOWHERE: Mapping[InstanceId, int] = MappingProxyType({})
"""Tokens by instance of a prompt whose KV is in no instance's cache: empty."""


class Distance(NamedTuple):
    """Measured network path from one machine to another.

    Attributes:
        round_trip_s: Round-trip time of a small message, in seconds.
        bytes_per_s: Bandwidth in one direction, in bytes per second.
    """

    round_trip_s: float
    bytes_per_s: float


NO_WAYS: Mapping[InstanceId, Distance | None] = MappingProxyType({})
"""Network paths of an instance that has no instances on other machines: empty."""


class Role(Enum):
    """Legs that the router sends to an instance. The engine itself does not know its role."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"

    @classmethod
    def of(cls, word: str) -> Role:
        """Return the role that ``word`` names; ``both`` is another name of ``colocated``.

        Raises:
            ValueError: ``word`` names no role.
        """
        return cls.COLOCATED if word == "both" else cls(word)

    @property
    def legs(self) -> frozenset[Role]:
        """Legs that an instance of this role serves: prefill, decode or both."""
        if self is Role.COLOCATED:
            return frozenset((Role.PREFILL, Role.DECODE))
        return frozenset((self,))


@dataclass(frozen=True, slots=True)
class Load:
    """Utilisation of an instance, one number for each resource, each in [0, 1].

    Attributes:
        compute: Work done, as a share of the work that it could do in the same time.
        memory: KV blocks in use, as a share of its KV blocks.
    """

    compute: float
    memory: float


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """Facts that do not change while an instance lives.

    Attributes:
        layer_weight_bytes: Size of the weights of one decoder layer.
        layer_token_bytes: Size of K and V of one token in one layer, all heads.
        memory_bytes: Memory that weights, KV blocks, guests and ``fixed_bytes`` share.
        fixed_bytes: Memory that no migration moves: embeddings, output head, the process.
        hidden_bytes: Size of the hidden state of one token between two layers.
        queries_a_head: Query heads of one KV head.
        granule_bytes: Step in which the slab of one layer and KV head grows and shrinks.
        kv_bytes: Memory of the KV blocks with nothing moved, if it is reserved: then neither
            weights that leave nor guests that arrive change it. 0 if all share ``memory_bytes``.
        max_kv_blocks: Number of KV blocks that the instance can never exceed; 0 for no limit.
        can_move_layers, can_move_heads, can_switch_role: True if migrations may do so.
        profile: Profile of the instance's device if it differs from that of most instances: a
            built-in profile's name, or its file. Empty if it is the same.
        speed: Computing speed of the instance, relative to most instances.
    """

    num_layers: int
    num_kv_heads: int
    layer_weight_bytes: int
    layer_token_bytes: int
    block_tokens: int
    memory_bytes: int
    fixed_bytes: int = 0
    hidden_bytes: int = 0
    queries_a_head: int = 1
    granule_bytes: int = 1
    kv_bytes: int = 0
    max_kv_blocks: int = 0
    can_move_layers: bool = True
    can_move_heads: bool = True
    can_switch_role: bool = True
    profile: str = ""
    speed: float = 1.0


class BackPressure(NamedTuple):
    """Prefill that waits because the store has no room for the KV to hand over.

    More prefill capacity makes it worse: more decode capacity, which fetches the held blocks, or a
    larger store helps.

    Attributes:
        num_prompts: Number of prompts that wait.
        num_tokens: Number of tokens of these prompts.
        longest_s: Longest waiting time of a prompt so far, in seconds.
        held_blocks: Number of blocks that the store holds until decode has read them.
        num_blocks: Number of blocks that the store has room for.
        block_bytes: Size of one block.
    """

    num_prompts: int
    num_tokens: int
    longest_s: float
    held_blocks: int
    num_blocks: int
    block_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes that the store holds until decode has read them."""
        return self.held_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """Last report of an instance on its load.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests admitted by the engine and not yet in a batch.
        kv_used_fraction: Share of the KV blocks in use, in [0, 1].
        busy_fraction: Share of wall time spent in forward passes, smoothed, in [0, 1].
        at_s: Time of the report, on the router's clock.
        step_fill_fraction: Fill of a step, smoothed, in [0, 1]: the share of a step's time that
            grows with its work, relative to that share of a full step; 1 if not measured.
        step_s: Time of one step, smoothed, in seconds; 0 if not measured.
        num_kv_blocks: Number of KV blocks at present; 0 if unknown.
        weight_bytes: Size of the weights of the layers that the instance holds at present.
        guest_bytes: Memory that guests beside the instance hold for others: weights and KV.
        step_tokens: Tokens of one step, smoothed; 0 if not measured.
        overlap_fraction: Share of a guest's work that the instance would not wait for, with its
            present steps, in [0, 1]; None if unknown.
        gpu_busy_fraction: Share of time with any kernel running on its GPUs, in [0, 1], by NVML;
            None without NVML.
        gpu_memory_fraction: Share of its GPUs' memory that any process uses; None without NVML.
        step_coefficients: Coefficients of ``control/model/learnt_time.py:step_time`` learnt
            from the instance's steps; 0 for kinds of work that were rare, empty until there are
            enough steps.
        fetch_token_s: Time to fetch the KV of one token from the store, in seconds; 0 before the
            first fetch.
        back_pressure: Prompts of the instance that wait for room in the store; None if none waits.
    """

    num_running: int
    num_waiting: int
    kv_used_fraction: float
    busy_fraction: float
    at_s: float
    step_fill_fraction: float = 1.0
    step_s: float = 0.0
    num_kv_blocks: int = 0
    weight_bytes: int = 0
    guest_bytes: int = 0
    step_tokens: float = 0.0
    gpu_busy_fraction: float | None = None
    gpu_memory_fraction: float | None = None
    overlap_fraction: float | None = None
    step_coefficients: tuple[float, ...] = ()
    fetch_token_s: float = 0.0
    back_pressure: BackPressure | None = None


@dataclass(frozen=True, slots=True, order=True)
class Module:
    """Module that a migration moves: the layers from ``first_layer`` up to, without, ``end_layer``.

    Attributes:
        heads: KV heads that move (KV only), ascending; empty for whole layers (weights and KV).
    """

    first_layer: int
    end_layer: int
    heads: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    def overlaps(self, other: Module) -> bool:
        """Return whether both modules contain the same head of the same layer."""
        if self.end_layer <= other.first_layer or other.end_layer <= self.first_layer:
            return False
        return not self.heads or not other.heads or bool(set(self.heads) & set(other.heads))


@dataclass(frozen=True, slots=True)
class ModulePlacement:
    """A module that serves the requests of ``host`` and runs at ``guest``.

    Attributes:
        epoch: Epoch of the host in which the module moved to the guest.
        since_s: Time of that move, on the router's clock.
        guest_bytes: Memory that the module takes at the guest: KV slabs, and weights that were not
            there before.
    """

    module: Module
    host: InstanceId
    guest: InstanceId
    epoch: int
    since_s: float
    guest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MoveModule:
    """Run ``module`` of ``host`` at ``guest``; ``num_bytes`` travel there."""

    host: InstanceId
    guest: InstanceId
    module: Module
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReturnModule:
    """Take ``module`` of ``host`` home from ``guest``; ``num_bytes`` travel back."""

    host: InstanceId
    guest: InstanceId
    module: Module
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Send ``instance`` the legs of ``role``; nothing restarts.

    Attributes:
        step_tokens: Maximum number of tokens of its steps from then on; 0 is the role's default.
    """

    instance: InstanceId
    old: Role
    role: Role
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SetStepTokens:
    """Limit the steps of ``instance`` to ``tokens`` (its chunk size) from its next step on."""

    instance: InstanceId
    old: int
    tokens: int


Action = MoveModule | ReturnModule | SwitchRole | SetStepTokens


class Attempt(NamedTuple):
    """Kind, source and target of an action: actions that share these fail for the same cause.

    Attributes:
        target: Instance, role or step size, according to ``kind``.
    """

    kind: str
    source: str
    target: str

    @classmethod
    def of(cls, action: Action) -> Attempt:
        """Return the attempt of ``action``, which ignores the size of the module."""
        if isinstance(action, SwitchRole):
            return cls("role", action.instance, action.role.value)
        if isinstance(action, SetStepTokens):
            return cls("chunk", action.instance, str(action.tokens))
        if isinstance(action, ReturnModule):
            return cls("return", action.guest, action.host)
        return cls("heads" if action.module.heads else "layers", action.host, action.guest)


class Influence(NamedTuple):
    """Predicted change of one instance by a step.

    Attributes:
        compute: Change of ``Load.compute``.
        kv_blocks: Change of the number of KV blocks.
        guest_bytes: Change of the memory that guests hold there.
        step_s: Change of the time of a step, in seconds.
        waiting_s: Change of the work that waits there, in seconds.
        memory: Change of ``Load.memory`` due to its requests, not to its number of blocks.
    """

    compute: float = 0.0
    kv_blocks: int = 0
    guest_bytes: int = 0
    step_s: float = 0.0
    waiting_s: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a plan with its predicted benefit and cost.

    Attributes:
        influence: Predicted changes by instance, in the order of ids.
        cost_s: Predicted time of the transfer and the synchronisation.
        benefit_s: Predicted saving within the policy's horizon.
        timeout_s: Time after which the step is aborted and reverted.
    """

    action: Action
    influence: tuple[tuple[InstanceId, Influence], ...]
    cost_s: float
    benefit_s: float
    timeout_s: float

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """Instances that take part in the action, without those that it only influences."""
        if isinstance(self.action, SwitchRole | SetStepTokens):
            return (self.action.instance,)
        return (self.action.host, self.action.guest)

    def is_finished(self, cluster: ClusterView) -> bool:
        """Return whether ``cluster`` shows the step's result; False if the instance is lost."""
        action = self.action
        if isinstance(action, SwitchRole):
            view = cluster.instances.get(action.instance)
            if view is None or view.role is not action.role:
                return False
            return action.step_tokens in (0, view.step_tokens)
        if isinstance(action, SetStepTokens):
            view = cluster.instances.get(action.instance)
            return view is not None and view.step_tokens == action.tokens
        host = cluster.instances.get(action.host)
        if host is None:
            return False
        is_there = any(
            (placement.module, placement.guest) == (action.module, action.guest)
            for placement in host.placements
        )
        return is_there is isinstance(action, MoveModule)


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as a policy sees it: its last report and the router's own counts.

    Attributes:
        report: Last report; None until the first report of this incarnation.
        inflight_requests: Requests that the router has sent there and that have not ended.
        inflight_prefill_tokens: Prompt tokens of these requests that are neither cached nor
            computed yet, by the router's own knowledge; live, never stale.
        prefill_tokens_per_s: Measured prefill speed, for converting tokens to seconds.
        facts: Facts of the instance; None if it cannot take part in migrations.
        placements: Modules of the instance that run elsewhere; modules not listed are at home.
        epoch: Epoch of the instance, which rises with each change of its placements.
        changed_s: Time of the last change of its placements, guests or role; None before the first.
        step_tokens: Maximum number of tokens in a step; 0 if unknown.
        inflight_tokens: Prompt tokens of ``inflight_requests``, including cached ones; for a leg
            that continues elsewhere, also the tokens generated so far.
        inflight_prefill_requests: Number of ``inflight_requests`` whose prompt is not computed yet.
        inflight_prefill_pairs: Attention pairs of those prompts, as ``StepWork.prefill_pairs``.
        kv_tokens: Number of tokens whose KV the instance has room for; 0 if unknown.
        far: Network paths to the instances on other machines, None for a path not measured;
            instances not listed are on the same machine.
        kv_token_bytes: Size of K and V of one token in all layers; 0 if unknown.
        coming_requests: Requests that will decode there and whose prompt is still computed
            elsewhere; they are not among ``inflight_requests``.
    """

    id: InstanceId
    role: Role
    ready: bool
    report: InstanceReport | None
    inflight_requests: int
    inflight_prefill_tokens: int
    prefill_tokens_per_s: float
    facts: InstanceFacts | None = None
    placements: tuple[ModulePlacement, ...] = ()
    epoch: int = 0
    changed_s: float | None = None
    step_tokens: int = 0
    inflight_tokens: int = 0
    inflight_prefill_requests: int = 0
    inflight_prefill_pairs: int = 0
    kv_tokens: int = 0
    far: Mapping[InstanceId, Distance | None] = field(default_factory=dict)
    kv_token_bytes: int = 0
    coming_requests: int = 0

    @property
    def computable_prefill_tokens(self) -> int:
        """Part of ``inflight_prefill_tokens`` that waits for compute, not for room in the store."""
        pressure = None if self.report is None else self.report.back_pressure
        num_waiting = 0 if pressure is None else pressure.num_tokens
        return max(0, self.inflight_prefill_tokens - num_waiting)

    def report_age_s(self, now_s: float) -> float | None:
        """Return the age of the report in seconds; None without a report."""
        return None if self.report is None else now_s - self.report.at_s


def total_back_pressure(views: Iterable[InstanceView]) -> BackPressure | None:
    """Return the prompts of all ``views`` that wait for room in a store; None if none waits.

    The store's numbers are those of the store with the longest wait."""
    reports = (view.report for view in views if view.report is not None)
    found = [one.back_pressure for one in reports if one.back_pressure is not None]
    if not found:
        return None
    return max(found, key=lambda one: one.longest_s)._replace(
        num_prompts=sum(one.num_prompts for one in found),
        num_tokens=sum(one.num_tokens for one in found),
    )


class ObservedRequest(NamedTuple):
    """A request as the router has seen it so far.

    Attributes:
        arrival_s: Time of arrival, on the router's clock.
        cached_tokens: Prompt tokens that were found in a cache and not computed.
        output_tokens: Output tokens generated so far; all of them once the request has ended.
        instance: Instance that computes the prompt or decodes at present; None once the request has
            ended.
        first_s: Time of the first output token; None before it.
        end_s: Time at which the request ended; None before.
    """

    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    instance: InstanceId | None
    first_s: float | None
    end_s: float | None


class OutputLengths(NamedTuple):
    """Output lengths, in tokens, of requests that have ended recently.

    Attributes:
        arriving_tokens: Medians of the four quarters of the lengths, ascending.
        present_tokens: Medians of the four quarters of the lengths of requests that decode at one
            moment: a request is among them with a probability that grows with its length.
    """

    mean_tokens: float
    arriving_tokens: tuple[int, ...]
    present_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All instances at one moment of the router's clock.

    Attributes:
        under_way: Steps that have begun and are not finished.
        is_balancing: ``is_balancing`` of the last migration plan; see its thresholds.
        failed: Attempts that have failed recently and are not to be repeated yet.
        requests: Recent requests, in the order of their arrivals; empty if they are not collected.
        memory: Value that the last plan of the same policy asked to be handed back.
        output_lengths: Output lengths of recently ended requests; None before the first has ended.
    """

    now_s: float
    instances: Mapping[InstanceId, InstanceView]
    under_way: tuple[Step, ...] = ()
    is_balancing: bool = False
    failed: frozenset[Attempt] = frozenset()
    requests: Sequence[ObservedRequest] = ()
    memory: object = None
    output_lengths: OutputLengths | None = None

    @property
    def back_pressure(self) -> BackPressure | None:
        """Prompts of all instances that wait for room in a store; see ``total_back_pressure``."""
        return total_back_pressure(self.instances.values())

    def serving(self, role: Role) -> tuple[InstanceView, ...]:
        """Return the ready instances of ``role``, in the order of their ids."""
        found = [view for view in self.instances.values() if view.ready and view.role is role]
        return tuple(sorted(found, key=lambda view: view.id))


class RequestLimits(NamedTuple):
    """Latency limits that a request sets for itself, in seconds; None for the server's limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as a routing policy sees it.

    Attributes:
        cached_tokens: Prompt tokens whose KV the store holds.
        max_output_tokens: Maximum number of output tokens; 0 if unknown.
        limits: Limits that the request sets for itself.
        is_splittable: True if two instances may serve the request.
        first_token_waits: True if, of two instances, the second one samples the first token, after
            the hand-over.
        resident_tokens: Prompt tokens whose KV is probably in an instance's own cache, by instance;
            empty without a lookup.
    """

    id: RequestId
    prompt_tokens: int
    cached_tokens: int = 0
    max_output_tokens: int = 0
    limits: RequestLimits = NO_LIMITS
    is_splittable: bool = True
    first_token_waits: bool = False
    resident_tokens: Mapping[InstanceId, int] = field(default_factory=lambda: NOWHERE)

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)

    def to_compute_at(self, instance: InstanceId) -> int:
        """Return the number of prompt tokens that the instance has to compute."""
        resident_tokens = self.resident_tokens.get(instance, 0)
        return min(self.prompt_tokens - self.cached_tokens, self.prompt_tokens - resident_tokens)


@dataclass(frozen=True, slots=True)
class Route:
    """Instances that serve a request.

    Attributes:
        prefill: Instance of the prefill leg; None if one instance serves both legs.
        ttft_s, tpot_s: Latencies that the policy predicts, in seconds; None without a prediction.
    """

    prefill: InstanceId | None
    decode: InstanceId
    reason: str
    ttft_s: float | None = None
    tpot_s: float | None = None
