"""Interface of replica policies, which choose a replica or a region for a request.

A balancer fills in the views and the requests, asks, and tells the policy what became of each
request. Instances of one server are routed over by another interface, ``orchestrator/routing``;
docs/adr/0014-two-kinds-of-routing.md says why.

A replica is one OpenAI-compatible server behind a balancer, a peer the balancer of another region.
Nothing here reads a clock: every time is an argument, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol, TypeAlias

from banaserve.types import RequestId

ReplicaId = NewType("ReplicaId", str)


class Generator(Protocol):
    """A seeded source of random numbers; ``random.Random`` is one."""

    def random(self) -> float:
        """Returns a number in [0, 1)."""
        ...

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Returns a normally distributed number."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt's request, as far as routing may know it.

    Attributes:
        prompt: What prefixes are compared on, in units of the policy's ``unit_bytes``: UTF-8 text
            (1), little-endian int32 tokens (4) or digests of token blocks (8). May be empty.
        num_tokens: Prompt tokens, counted or estimated; at least 1.
        expected_output_tokens: Of this request; ``max_tokens`` where nothing better is known.
        session: The user or the conversation that asks. Empty where it is not known.
        model: Empty where any will do.
        allowed_regions: Where the request may be served, or None for everywhere.
        was_forwarded: It came from another balancer and is served in this region.
        arrived_s: At this balancer.
    """

    id: RequestId
    num_tokens: int
    prompt: bytes = b""
    expected_output_tokens: int = 0
    session: str = ""
    model: str = ""
    allowed_regions: frozenset[str] | None = None
    was_forwarded: bool = False
    arrived_s: float = 0.0


@dataclass(slots=True)
class ReplicaView:
    """A replica as its balancer sees it. Policies read it and never write.

    The first group is fixed, the second is counted by this balancer and live, the third is what
    the replica last reported of itself, at ``reported_at_s``.

    Attributes:
        models: Those it serves; empty: any.
        max_prompt_tokens: Longer prompts it refuses; 0: unknown.
        is_available: Healthy, its circuit closed, not draining: it may be sent requests.
        outstanding: Requests sent and not ended.
        prefilling: Of these, without a first token.
        outstanding_tokens: Prompt tokens of the outstanding requests.
        uncached_tokens: Prompt tokens not expected in its cache, of the prefilling requests.
        output_tokens: Expected output tokens of the outstanding requests.
        num_sent: Requests ever sent.
        sent_since_report: Requests sent since ``reported_at_s``.
        round_trip_ms: Smoothed.
        pending: Reported: requests not yet in a batch (vLLM's ``num_requests_waiting``).
        running: Reported: requests in the batch.
        kv_used_fraction: Reported.
        reported_at_s: None before the first report.
    """

    id: ReplicaId
    region: str = ""
    models: frozenset[str] = frozenset()
    max_prompt_tokens: int = 0

    is_available: bool = True
    outstanding: int = 0
    prefilling: int = 0
    outstanding_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0
    num_sent: int = 0
    sent_since_report: int = 0
    round_trip_ms: float = 0.0

    pending: int = 0
    running: int = 0
    kv_used_fraction: float = 0.0
    reported_at_s: float | None = None


@dataclass(slots=True)
class PeerView(ReplicaView):
    """The balancer of another region, which chooses among its own replicas.

    ``pending`` and ``running`` are sums over them.

    Attributes:
        queue_length: Reported: requests held in its queue.
        num_available: Reported: its replicas that may be sent a request at once.
    """

    queue_length: int = 0
    num_available: int = 0


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything a policy may look at, at one moment.

    Attributes:
        region: Of this balancer.
        queue_length: Requests held by this balancer, the one asked about not counted.
        replicas: In the order of their ids; views may be stale on purpose (``Fleet``).
        peers: In the order of their ids.
        by_id: The replicas once more.
    """

    now_s: float
    region: str
    queue_length: int
    replicas: Sequence[ReplicaView]
    peers: Sequence[PeerView]
    by_id: Mapping[ReplicaId, ReplicaView]


class RoutingReason(StrEnum):
    """Reason of a decision: for the log and as a metric's label."""

    ONLY_CHOICE = "only_choice"
    TURN = "turn"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    SESSION = "session"
    PREFIX = "prefix"
    IMBALANCE = "imbalance"
    EXPLORE = "explore"
    REBALANCED = "rebalanced"
    LOWEST_COST = "lowest_cost"
    FORWARDED = "forwarded"
    ALL_BUSY = "all_busy"
    NONE_AVAILABLE = "none_available"
    NONE_MAY = "none_may"


HELD = frozenset({RoutingReason.ALL_BUSY, RoutingReason.NONE_AVAILABLE, RoutingReason.NONE_MAY})
"""Reasons of decisions without a target."""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Target of a request, or the decision that it waits.

    Attributes:
        target: A replica or a peer, or None: the request stays in the balancer's queue and is
            asked about again when something changes. ``NONE_MAY`` will not change by waiting: no
            replica known here may ever serve it.
        hit_tokens: Prompt tokens that the target is expected to have in its cache.
        scores_ms: Predicted cost of each candidate, where the policy predicts one; less is better.
    """

    target: ReplicaId | None
    reason: RoutingReason
    hit_tokens: int = 0
    scores_ms: Mapping[ReplicaId, float] = field(default_factory=dict)


@dataclass(slots=True)
class Flight:
    """One attempt to serve a request, from its sending to its end. The balancer fills it in.

    Attributes:
        backlog_tokens: ``uncached_tokens`` of the target before this request was added.
        outstanding_tokens: The target's, likewise.
        round_trip_ms: The target's when the request was sent.
        cached_tokens: What the replica says it found in its cache; None where it does not say.
        is_fault: A failure says something of the target: not a client that went away, nor a
            request that was wrong.
    """

    request: Request
    decision: RoutingDecision
    target: ReplicaId
    sent_s: float
    backlog_tokens: int = 0
    outstanding_tokens: int = 0
    round_trip_ms: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    is_fault: bool = False


State: TypeAlias = dict[str, float | int | str | list[float]]
"""What a policy remembers over a restart: plain values, for any format."""


class Need(StrEnum):
    """Input of a policy that a balancer provides only where the policy declares to need it."""

    REQUEST = "request"
    """Prompt, lengths, session and model: the body of each request is parsed."""
    REPORTS = "reports"
    """``pending``, ``running`` and ``kv_used_fraction``: the replicas' metrics are read."""
    PEERS = "peers"
    """Balancers of other regions are among the candidates."""
    PEER_PREFIXES = "peer_prefixes"
    """Balancers tell each other which prefixes their replicas hold (``SharesPrefixes``)."""


class ReplicaPolicy(Protocol):
    """Chooses a replica for each request, and learns from what becomes of it.

    Policies that are built alike and told alike answer alike. What they remember is bounded,
    whatever is asked of them.

    Attributes:
        needs: Declared by the class; an instance may declare less, where its options switch
            something off. What is not declared may be missing from requests and views.
        unit_bytes: See ``Request.prompt``.
    """

    needs: frozenset[Need]
    unit_bytes: int

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        """Returns where ``request`` goes. Counts nothing as sent: ``on_sent`` does."""
        ...

    def on_sent(self, flight: Flight) -> None:
        """The request has been sent to ``flight.target``."""
        ...

    def on_first_token(self, flight: Flight) -> None:
        """The first byte of the answer has come."""
        ...

    def on_finished(self, flight: Flight) -> None:
        """The answer is complete."""
        ...

    def on_failed(self, flight: Flight) -> None:
        """The attempt ended without an answer: refused, broken off or cancelled."""
        ...

    def on_replica_gone(self, target: ReplicaId) -> None:
        """The replica or peer has left, or lost its cache: forget what it held."""
        ...

    def tick(self, now_s: float) -> None:
        """Does periodic work; called about once a second."""
        ...

    def hold_safe(self, is_held: bool) -> None:
        """Goes back to what tuning started from and stays there; False: tuning may go on."""
        ...

    def state(self) -> State:
        """Returns what should survive a restart; empty where nothing should."""
        ...

    def restore(self, state: State) -> None:
        """Takes up what ``state`` of the same policy returned.

        Raises:
            UserError: It is not such a state.
        """
        ...
