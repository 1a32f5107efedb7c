"""Interface of replica policies, which choose a replica or a region for a request.

A balancer fills in views and requests, asks for decisions, and reports the outcome of each request
to the policy. Routing among the instances of one server has another interface,
``orchestrator/control/routing``; docs/adr/0014-two-kinds-of-routing.md gives the reason.

A replica is one OpenAI-compatible server behind a balancer; a peer is the balancer of another
region. Nothing here reads a clock: every time is an argument, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType, Protocol, TypeAlias

import msgspec

from banaserve.base.types import RequestId

ReplicaId = NewType("ReplicaId", str)


class Generator(Protocol):
    """A seeded source of random numbers; ``random.Random`` is one."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Return a normally distributed number."""
        ...


class KnownHit(NamedTuple):
    """Cached part of a prompt at a replica, by the events of its cache.

    Attributes:
        tokens: Number of leading prompt tokens in known blocks.
        is_exact: True if no other block is held; False: ``tokens`` is the minimum.
    """

    tokens: int
    is_exact: bool


class Request(msgspec.Struct, frozen=True):
    """Request of one attempt, as routing may know it.

    Attributes:
        prompt: Prompt for the comparison of prefixes, in units of the policy's ``unit_bytes``:
            UTF-8 text (1), little-endian int32 tokens (4) or digests of token blocks (8). May be
            empty.
        num_tokens: Number of prompt tokens, counted or estimated; at least 1.
        expected_output_tokens: Expected output tokens; ``max_tokens`` without a better estimate.
        session: User or conversation of the request; empty if unknown.
        model: Requested model; empty for any model.
        allowed_regions: Regions in which the request may be served; None for all.
        was_forwarded: True if another balancer forwarded the request, to be served in this region.
        arrived_s: Time of arrival at this balancer.
        blocks: Keys of the prompt's blocks that a cache may hold, by block size
            (``caches/cache_view.py:block_keys``); empty if its tokens are unknown.
        known_hits: Hits at the replicas whose caches are known from their events.
        is_streamed: True if the client asked for a stream, whose first byte is its first token.
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
    blocks: Mapping[int, Sequence[bytes]] = msgspec.field(default_factory=dict)
    known_hits: Mapping[ReplicaId, KnownHit] = msgspec.field(default_factory=dict)
    is_streamed: bool = False


@dataclass(slots=True)
class ReplicaView:
    """A replica as its balancer sees it. Policies only read it.

    The first group of fields is fixed, the second is counted by this balancer and live, the third
    is the replica's last report, made at ``reported_at_s``.

    Attributes:
        models: Models that the replica serves; empty for any.
        max_prompt_tokens: Length above which the replica refuses prompts; 0: unknown.
        is_available: True if the replica may get requests: it is healthy, its circuit is closed,
            and it is not draining.
        outstanding: Number of requests sent and not ended.
        prefilling: Number of outstanding requests without a first token.
        outstanding_tokens: Prompt tokens of the outstanding requests.
        uncached_tokens: Prompt tokens of the prefilling requests not expected in its cache.
        output_tokens: Expected output tokens of the outstanding requests.
        num_sent: Number of requests ever sent.
        sent_since_report: Number of requests sent since ``reported_at_s``.
        round_trip_ms: Smoothed round-trip time, in milliseconds.
        pending: Reported number of requests not yet in a batch (vLLM's ``num_requests_waiting``).
        running: Reported number of requests in the batch.
        kv_used_fraction: Reported share of KV memory in use, in [0, 1].
        reported_at_s: Time of the last report, or of the step that it is of if the replica counts
            its steps; None before the first report.
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

    ``pending`` and ``running`` are sums over its replicas.

    Attributes:
        queue_length: Reported number of requests held in its queue.
        num_available: Reported number of its replicas that can start a request at once.
        num_replicas: Reported number of its replicas.
    """

    queue_length: int = 0
    num_available: int = 0
    num_replicas: int = 0


class FleetView(msgspec.Struct, frozen=True):
    """All that a policy may read, at one moment.

    Attributes:
        region: Region of this balancer.
        queue_length: Number of requests held by this balancer, without the present one.
        replicas: Replicas in the order of their ids; views may be stale on purpose (``Fleet``).
        peers: Peers in the order of their ids.
        by_id: Replicas by id.
    """

    now_s: float
    region: str
    queue_length: int
    replicas: Sequence[ReplicaView]
    peers: Sequence[PeerView]
    by_id: Mapping[ReplicaId, ReplicaView]


class RoutingReason(StrEnum):
    """Reason of a decision, for the log and as a metric's label."""

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


class RoutingDecision(msgspec.Struct, frozen=True):
    """Target of a request, or the decision that it waits.

    Attributes:
        target: Replica or peer; None if the request stays in the balancer's queue, to be decided
            again when something changes. With ``NONE_MAY``, waiting is useless: no replica known
            here may ever serve the request.
        hit_tokens: Prompt tokens that the target is expected to have in its cache.
        scores_ms: Predicted cost of each candidate, less is better; empty without predictions.
    """

    target: ReplicaId | None
    reason: RoutingReason
    hit_tokens: int = 0
    scores_ms: Mapping[ReplicaId, float] = msgspec.field(default_factory=dict)


class Flight(msgspec.Struct):
    """One attempt to serve a request, from its sending to its end. The balancer fills it in.

    Attributes:
        backlog_tokens: ``uncached_tokens`` of the target before this request was added.
        outstanding_tokens: ``outstanding_tokens`` of the target before this request was added.
        outstanding: ``outstanding`` of the target before this request was added.
        round_trip_ms: Round-trip time of the target when the request was sent.
        cached_tokens: Cached prompt tokens that the replica reports; None without a report.
        is_fault: True if a failure is the target's fault: not that of a client that disconnected,
            nor of an invalid request.
    """

    request: Request
    decision: RoutingDecision
    target: ReplicaId
    sent_s: float
    backlog_tokens: int = 0
    outstanding_tokens: int = 0
    outstanding: int = 0
    round_trip_ms: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    is_fault: bool = False


State: TypeAlias = dict[str, float | int | str | list[float]]
"""State of a policy that survives a restart: plain values, for any format."""


class Need(StrEnum):
    """Input that a balancer provides only to a policy that declares the need."""

    REQUEST = "request"
    """Prompt, lengths, session and model: the body of each request is parsed."""
    REPORTS = "reports"
    """``pending``, ``running`` and ``kv_used_fraction``: the replicas' metrics are read."""
    CACHES = "caches"
    """``Request.known_hits``: the KV cache events of the replicas that publish them are read."""
    PEERS = "peers"
    """Balancers of other regions are among the candidates."""
    PEER_PREFIXES = "peer_prefixes"
    """Balancers exchange the prefixes that their replicas hold (``SharesPrefixes``)."""


class ReplicaPolicy(Protocol):
    """Policy that chooses a replica for each request, and learns from the outcome.

    Policies with equal arguments and equal calls give equal answers. Their memory is bounded,
    whatever the requests.

    Attributes:
        needs: Needs declared by the class; an instance may declare fewer if its options disable
            something. Input that is not declared may be missing from requests and views.
        unit_bytes: Size of a unit of prompts, see ``Request.prompt``.
    """

    needs: frozenset[Need]
    unit_bytes: int

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        """Return the decision for ``request``. Counts nothing as sent: ``on_sent`` does."""
        ...

    def on_sent(self, flight: Flight) -> None:
        """Record that the request has been sent to ``flight.target``."""
        ...

    def on_first_token(self, flight: Flight) -> None:
        """Record that the first byte of the answer has arrived."""
        ...

    def on_finished(self, flight: Flight) -> None:
        """Record that the answer is complete."""
        ...

    def on_failed(self, flight: Flight) -> None:
        """Record that the attempt ended without an answer: refused, interrupted or cancelled."""
        ...

    def on_replica_gone(self, target: ReplicaId) -> None:
        """Forget the cache of a replica or peer that has left, or lost its cache."""
        ...

    def tick(self, now_s: float) -> None:
        """Do periodic work; called about once a second."""
        ...

    def hold_safe(self, is_held: bool) -> None:
        """Return to the weights from before tuning and stop tuning; False lets tuning continue."""
        ...

    def state(self) -> State:
        """Return the state that should survive a restart; empty if none should."""
        ...

    def restore(self, state: State) -> None:
        """Restore what ``state`` of the same policy returned.

        Raises:
            UserError: The value is not such a state.
        """
        ...
