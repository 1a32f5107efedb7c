"""Simulated balancer, with the counters and policies of the real one, and its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import structs

from banaserve.sim.timeline import Timeline
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import (
    Need,
    PeerView,
    ReplicaId,
    ReplicaPolicy,
    ReplicaView,
    RoutingDecision,
)
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES, BalancedReplica, ReplicaJob

PROBE_S = 0.1

RoundTrips = dict[tuple[str, str], float]
"""Round trips between two regions, in milliseconds."""


class SimBalancer:
    """Balancer of a region, with replicas anywhere and peers.

    Attributes:
        num_requests: Number of messages with requests sent and with answers received: one for the
            first token, one for the last.
        num_reports: Number of messages with reports received.
        num_forwarded: Number of requests sent to peers.
        num_refused: Number of requests that a replica has sent back.

    Args:
        goes_on: Function that returns whether to keep probing the replicas; None: for ever.
    """

    def __init__(
        self,
        region: str,
        policy: ReplicaPolicy,
        replicas: Sequence[BalancedReplica],
        round_trips_ms: RoundTrips,
        timeline: Timeline,
        staleness_s: float = 0.0,
        goes_on: Callable[[], bool] | None = None,
    ) -> None:
        self.region = region
        self.id = ReplicaId(f"balancer-{region}")
        self.fleet = Fleet(policy, region, staleness_s)
        self.queue: deque[ReplicaJob] = deque()
        self._replicas = {replica.id: replica for replica in replicas}
        self._peers: dict[ReplicaId, SimBalancer] = {}
        self._round_trips_ms = round_trips_ms
        self._timeline = timeline
        self._goes_on = goes_on
        self.num_requests = self.num_reports = self.num_forwarded = self.num_refused = 0
        for replica in replicas:
            view = ReplicaView(replica.id, replica.region)
            view.round_trip_ms = round_trips_ms[region, replica.region]
            self.fleet.add(view)
        timeline.after(PROBE_S, self._probe)

    def connect(self, peers: Sequence[SimBalancer]) -> None:
        """Make ``peers`` known to this balancer, if its policy needs peers."""
        if Need.PEERS not in self.fleet.policy.needs:
            return
        for peer in peers:
            self._peers[peer.id] = peer
            view = PeerView(peer.id, peer.region)
            view.round_trip_ms = self._round_trips_ms[self.region, peer.region]
            self.fleet.add(view)

    def take(self, job: ReplicaJob) -> None:
        """Take a request, from a client or forwarded by a peer."""
        self.queue.append(job)
        self._pump()

    def report(self) -> Report:
        """Return the report of this balancer to its peers."""
        replicas = self._replicas.values()
        return Report(
            self._timeline.now_s,
            pending=sum(replica.num_waiting for replica in replicas),
            running=sum(replica.num_running for replica in replicas),
            queue_length=len(self.queue),
            num_available=sum(replica.has_room for replica in replicas),
            num_replicas=len(replicas),
        )

    def _pump(self) -> None:
        while self.queue:
            self.fleet.queue_length = len(self.queue) - 1
            decision = self.fleet.choose(self.queue[0].request, self._timeline.now_s)
            if decision.target is None:
                return
            self._send(self.queue.popleft(), decision)

    def _send(self, job: ReplicaJob, decision: RoutingDecision) -> None:
        target = decision.target
        assert target is not None
        flight = self.fleet.sent(job.request, decision, self._timeline.now_s)
        peer = self._peers.get(target)
        region = peer.region if peer is not None else self._replicas[target].region
        one_way_s = self._round_trips_ms[self.region, region] / 2000
        self.num_requests += 1
        self.num_forwarded += peer is not None

        def first(_: object = None) -> None:
            self.num_requests += 1
            self.fleet.first_token(flight, self._timeline.now_s)
            job.on_first()

        def done(_: object = None) -> None:
            self.num_requests += 1
            job.hit_tokens = sent.hit_tokens
            num_output = len(job.output) // UNIT_BYTES * BLOCK_TOKENS
            self.fleet.finished(flight, self._timeline.now_s, num_output, sent.hit_tokens)
            forget()
            job.on_done()
            self._pump()

        def refused(_: object = None) -> None:
            self.num_refused += 1
            self.fleet.failed(flight, self._timeline.now_s)
            self.fleet.set_available(target, False)
            forget()
            self.queue.appendleft(job)
            self._pump()

        def forget() -> None:
            # Breaks the reference cycles of millions of requests, too many for a collector.
            sent.on_first = sent.on_done = _nothing
            sent.on_refused = None

        request = structs.replace(
            job.request, was_forwarded=peer is not None or job.request.was_forwarded
        )
        sent = ReplicaJob(
            request,
            job.output,
            lambda: self._timeline.after(one_way_s, first),
            lambda: self._timeline.after(one_way_s, done),
            lambda: self._timeline.after(one_way_s, refused),
        )
        arrive = peer.take if peer is not None else self._replicas[target].submit
        self._timeline.after(one_way_s, arrive, sent)

    def _probe(self, _: object) -> None:
        now_s = self._timeline.now_s
        self._read_reports(now_s)
        self.fleet.policy.tick(now_s)
        if self._goes_on is None or self._goes_on():
            self._timeline.after(PROBE_S, self._probe)

    def _read_reports(self, now_s: float) -> None:
        for replica in self._replicas.values():
            view = self.fleet.get(replica.id)
            if view is not None and view.is_available is not replica.is_ready:
                one_way_s = self._round_trips_ms[self.region, replica.region] / 2000
                self._timeline.after(one_way_s, self._probed, (replica.id, replica.is_ready))
        if Need.REPORTS not in self.fleet.policy.needs:
            return
        for replica in self._replicas.values():
            one_way_s = self._round_trips_ms[self.region, replica.region] / 2000
            report = Report(
                now_s, replica.num_waiting, replica.num_running, replica.kv_used_fraction
            )
            self._timeline.after(one_way_s, self._told, (replica.id, report))
        for peer in self._peers.values():
            one_way_s = self._round_trips_ms[self.region, peer.region] / 2000
            self._timeline.after(one_way_s, self._told, (peer.id, peer.report()))

    def _probed(self, what: tuple[ReplicaId, bool]) -> None:
        self.fleet.set_available(*what)
        self._pump()

    def _told(self, what: tuple[ReplicaId, Report]) -> None:
        self.num_reports += 1
        self.fleet.reported(*what)
        self._pump()


def _nothing() -> None:
    """Do nothing: stands for a callback that is never called again."""
