"""Values that pass between floors. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)

NOWHERE: Mapping[InstanceId, int] = MappingProxyType({})
"""Tokens by instance, of what lies in none."""


class Distance(NamedTuple):
    """Way from one machine to another, as measured.

    Attributes:
        round_trip_s: Of a small message.
        bytes_per_s: In one direction.
    """

    round_trip_s: float
    bytes_per_s: float


NO_WAYS: Mapping[InstanceId, Distance | None] = MappingProxyType({})
"""Ways to instances on other machines, where there are none."""


class Role(Enum):
    """What the router sends to an instance. The engine itself does not know it."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"

    @classmethod
    def of(cls, word: str) -> Role:
        """The role that people call ``word``; ``both`` is a name of ``colocated``.

        Raises:
            ValueError: There is none.
        """
        return cls.COLOCATED if word == "both" else cls(word)

    @property
    def legs(self) -> frozenset[Role]:
        """The legs that it serves: prefill, decode or both of them."""
        if self is Role.COLOCATED:
            return frozenset((Role.PREFILL, Role.DECODE))
        return frozenset((self,))


@dataclass(frozen=True, slots=True)
class Load:
    """How full an instance is, one number a resource, each in [0, 1].

    Attributes:
        compute: Work done against the work it could do in the same time.
        memory: KV blocks in use against the KV blocks it has.
    """

    compute: float
    memory: float


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What stays as it is while an instance lives.

    Attributes:
        layer_weight_bytes: Weights of one decoder layer.
        layer_token_bytes: K and V of one token in one layer, all heads.
        memory_bytes: What weights, KV blocks, guests and ``fixed_bytes`` share.
        fixed_bytes: What no migration moves: embeddings, output head, the process.
        hidden_bytes: Hidden state of one token between two layers.
        queries_a_head: Query heads of one KV head.
        granule_bytes: The slab of one layer and KV head grows and shrinks in steps of this.
        kv_bytes: Memory of the KV blocks with nothing moved, where it is set apart: then neither
            weights that leave nor guests that come change it. 0 where all share ``memory_bytes``.
        max_kv_blocks: KV blocks that it can never exceed; 0 for no such limit.
        can_move_layers, can_move_heads, can_switch_role: What migrations may do to it.
        profile: Of its device, where that is another one than most instances have: a built-in
            profile's name, or its file. Empty where it is theirs.
        speed: How fast it computes, against theirs.
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
    """Prefill that waits, since the store has no room for the KV that it would hand over.

    More prefill capacity makes it worse: what helps is decode that takes what is held, or a larger
    store.

    Attributes:
        num_prompts: Number of prompts that wait.
        num_tokens: Number of tokens of these prompts.
        longest_s: Time that the prompt which has waited longest has waited.
        held_blocks: Number of blocks that the store holds until decode has read them.
        num_blocks: Number of blocks that the store has room for.
        block_bytes: Size of one of them.
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
    """What an instance last said of itself.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests admitted by the engine and not yet in a batch.
        kv_used_fraction: Share of the KV blocks in use, in [0, 1].
        busy_fraction: Share of wall time spent in forward passes, smoothed, in [0, 1].
        at_s: When the report was made, on the router's clock.
        step_fill_fraction: How full its steps are, smoothed, in [0, 1]: the share of a step's time
            that grows with its work, against that of a full step; 1 where it is not measured.
        step_s: Time of one step, smoothed; 0 where it is not measured.
        num_kv_blocks: KV blocks that it has at present; 0 where it does not say.
        weight_bytes: Weights of the layers that it holds at present.
        guest_bytes: What guests on it hold for others: weights and KV.
        step_tokens: Tokens of one step, smoothed; 0 where they are not measured.
        overlap_fraction: How much of a guest's work it would not wait for with its present steps,
            in [0, 1]; None where that is not known.
        gpu_busy_fraction: Share of time with any kernel running on its GPUs, in [0, 1], by NVML;
            None where there is none.
        gpu_memory_fraction: Of their memory in use, by whomever.
        step_coefficients: Of ``orchestrator/model/calibration.py:StepTime``, as learnt from its
            steps, 0 of work that it has hardly had; empty until there are enough of them.
        fetch_token_s: Time to fetch the KV of one token from the store; 0 where nothing has been
            fetched yet.
        back_pressure: Its prompts that wait for room in the store; None where none does.
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
    """What a migration moves: contiguous layers up to ``end_layer``, which is not among them.

    Attributes:
        heads: KV heads that move, KV only, ascending; empty for whole layers, weights and KV.
    """

    first_layer: int
    end_layer: int
    heads: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    def overlaps(self, other: Module) -> bool:
        """Whether both contain the same head of the same layer."""
        if self.end_layer <= other.first_layer or other.end_layer <= self.first_layer:
            return False
        return not self.heads or not other.heads or bool(set(self.heads) & set(other.heads))


@dataclass(frozen=True, slots=True)
class ModulePlacement:
    """A module that serves the requests of ``host`` and runs at ``guest``.

    Attributes:
        epoch: The host's epoch in which it moved there.
        since_s: When it did, on the router's clock.
        guest_bytes: Memory that it takes there: KV slabs, and weights that were not there yet.
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
        step_tokens: Most tokens of its steps from then on; 0 is what the role has.
    """

    instance: InstanceId
    old: Role
    role: Role
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SetStepTokens:
    """Let ``instance`` take at most ``tokens`` in a step from its next one on: its chunk size."""

    instance: InstanceId
    old: int
    tokens: int


Action = MoveModule | ReturnModule | SwitchRole | SetStepTokens


class Attempt(NamedTuple):
    """What actions have in common that fail for the same cause: their kind and their ends.

    Attributes:
        target: An instance, or a role.
    """

    kind: str
    source: str
    target: str

    @classmethod
    def of(cls, action: Action) -> Attempt:
        """The attempt that ``action`` is, whatever its size."""
        if isinstance(action, SwitchRole):
            return cls("role", action.instance, action.role.value)
        if isinstance(action, SetStepTokens):
            return cls("chunk", action.instance, str(action.tokens))
        if isinstance(action, ReturnModule):
            return cls("return", action.guest, action.host)
        return cls("heads" if action.module.heads else "layers", action.host, action.guest)


@dataclass(frozen=True, slots=True)
class Influence:
    """What a step is predicted to change on one instance.

    Attributes:
        compute: Added to ``Load.compute``.
        kv_blocks: Added to the number of KV blocks.
        guest_bytes: Added to what guests hold there.
        step_s: Added to the time of a step.
        waiting_s: Added to the work that waits there.
        memory: Added to ``Load.memory`` where its requests change, not its blocks.
    """

    compute: float = 0.0
    kv_blocks: int = 0
    guest_bytes: int = 0
    step_s: float = 0.0
    waiting_s: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a plan with what it should bring and take.

    Attributes:
        influence: By instance, in the order of ids.
        cost_s: Predicted time of the transfer and the synchronisation.
        benefit_s: What it saves within the policy's horizon.
        timeout_s: After this it is aborted and reverted.
    """

    action: Action
    influence: tuple[tuple[InstanceId, Influence], ...]
    cost_s: float
    benefit_s: float
    timeout_s: float

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """Those that take part, and not those that only feel it."""
        if isinstance(self.action, SwitchRole | SetStepTokens):
            return (self.action.instance,)
        return (self.action.host, self.action.guest)

    def is_finished(self, cluster: ClusterView) -> bool:
        """Whether ``cluster`` shows what the step is meant to reach; never of a lost instance."""
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
    """One instance as a policy sees it: its last report with the router's own counts on top.

    Attributes:
        report: None until the first report of this incarnation.
        inflight_requests: Requests that the router has sent there and that have not ended.
        inflight_prefill_tokens: Prompt tokens of those that were neither cached nor computed yet,
            by the router's own knowledge; live, never stale.
        prefill_tokens_per_s: Measured prefill speed, for turning tokens into seconds.
        facts: None where the instance cannot take part in migrations.
        placements: Its modules that run elsewhere; what is not listed is at home.
        epoch: Rises with each change of its placements.
        changed_s: When its placements, guests or role last changed; None where never.
        step_tokens: Most tokens that it takes in a step; 0 where that is not known.
        inflight_tokens: Prompt tokens of ``inflight_requests``, cached ones among them; a leg that
            goes on elsewhere brings what was generated so far.
        inflight_prefill_requests: Those of ``inflight_requests`` whose prompt is not computed yet.
        inflight_prefill_pairs: What their attention costs, as ``StepWork.prefill_pairs``.
        kv_tokens: Room for the KV of so many tokens; 0 where that is not known.
        far: Instances on other machines, None where the way has not been measured; those that are
            not listed are on the same.
        kv_token_bytes: K and V of one token in all layers; 0 where that is not known.
        coming_requests: Requests that will decode there and whose prompt is computed elsewhere as
            yet; they are not among ``inflight_requests``.
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
        """Those of ``inflight_prefill_tokens`` that wait for compute, not for room in the store."""
        pressure = None if self.report is None else self.report.back_pressure
        num_waiting = 0 if pressure is None else pressure.num_tokens
        return max(0, self.inflight_prefill_tokens - num_waiting)

    def report_age_s(self, now_s: float) -> float | None:
        """Seconds since the report was made; None where there is none."""
        return None if self.report is None else now_s - self.report.at_s


def total_back_pressure(views: Iterable[InstanceView]) -> BackPressure | None:
    """Returns all prompts of ``views`` that wait for room, and the store that is waited for the
    longest; None where none waits."""
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
        arrival_s: On the router's clock.
        cached_tokens: Of the prompt, those that were found and not computed.
        output_tokens: Generated so far; of one that has ended, all of them.
        instance: Where it is at present: whoever computes its prompt, or decodes it; None when it
            has ended.
        first_s: When its first token came; None before.
        end_s: When it ended; None before.
    """

    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    instance: InstanceId | None
    first_s: float | None
    end_s: float | None


class OutputLengths(NamedTuple):
    """Output tokens of requests that have ended lately.

    Attributes:
        arriving_tokens: The middles of four equal parts of them, ascending.
        present_tokens: The same of those that decode at one moment: the longer a request is, the
            likelier it is among them.
    """

    mean_tokens: float
    arriving_tokens: tuple[int, ...]
    present_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All instances at one moment of the router's clock.

    Attributes:
        under_way: Steps that have begun and are not finished.
        is_balancing: What the last migration plan said of itself; see its thresholds.
        failed: What has failed a moment ago and is not to be tried again yet.
        requests: Those of the last while, in the order of their arrivals; empty where nobody
            collects them.
        memory: What the last plan of the same policy asked to be handed back.
        output_lengths: Of requests that have ended lately; None before the first has.
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
        """All prompts that wait for room, and the store that one of them waits for the longest."""
        return total_back_pressure(self.instances.values())

    def serving(self, role: Role) -> tuple[InstanceView, ...]:
        """Ready instances of ``role``, in the order of their ids."""
        found = [view for view in self.instances.values() if view.ready and view.role is role]
        return tuple(sorted(found, key=lambda view: view.id))


class RequestLimits(NamedTuple):
    """Limits that a request names for itself; None where those of the server hold."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a routing policy may know of a request.

    Attributes:
        cached_tokens: Of the prompt, those that the store holds.
        max_output_tokens: It generates at most so many; 0 where that is not known.
        limits: Of its own.
        is_splittable: Whether two instances may serve it.
        first_token_waits: Of two instances the second one samples its first token, when it has
            been handed over.
        resident_tokens: Of the prompt, those whose KV probably lies in an instance's own cache, by
            instance; empty where nobody has looked.
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


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request runs.

    Attributes:
        prefill: None where one instance does both legs.
        ttft_s, tpot_s: What the policy predicts; None where it predicts nothing.
    """

    prefill: InstanceId | None
    decode: InstanceId
    reason: str
    ttft_s: float | None = None
    tpot_s: float | None = None
