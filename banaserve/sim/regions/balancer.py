"""Simulated balancer: the counters and policies of the real one, and its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from banaserve.orchestrator.replicas.fleet import Fleet, Report
from banaserve.orchestrator.replicas.interface import (
    Need,
    PeerView,
    ReplicaId,
    ReplicaPolicy,
    ReplicaView,
    RoutingDecision,
)
from banaserve.sim.regions.replica import ReplicaJob, SimReplica
from banaserve.sim.timeline import Timeline

PROBE_S = 0.1

RoundTrips = dict[tuple[str, str], float]
"""Milliseconds between two regions."""


class SimBalancer:
    """One balancer of one region, with replicas anywhere and peers."""

    def __init__(
        self,
        region: str,
        policy: ReplicaPolicy,
        replicas: Sequence[SimReplica],
        round_trips_ms: RoundTrips,
        timeline: Timeline,
        staleness_s: float = 0.0,
    ) -> None:
        self.region = region
        self.id = ReplicaId(f"balancer-{region}")
        self.fleet = Fleet(policy, region, staleness_s)
        self.queue: deque[ReplicaJob] = deque()
        self._replicas = {replica.id: replica for replica in replicas}
        self._peers: dict[ReplicaId, SimBalancer] = {}
        self._round_trips_ms = round_trips_ms
        self._timeline = timeline
        for replica in replicas:
            view = ReplicaView(replica.id, replica.region)
            view.round_trip_ms = round_trips_ms[region, replica.region]
            self.fleet.add(view)
        timeline.after(PROBE_S, self._probe)

    def connect(self, peers: Sequence[SimBalancer]) -> None:
        """Makes ``peers`` known to this balancer, where its policy needs peers."""
        if Need.PEERS not in self.fleet.policy.needs:
            return
        for peer in peers:
            self._peers[peer.id] = peer
            view = PeerView(peer.id, peer.region)
            view.round_trip_ms = self._round_trips_ms[self.region, peer.region]
            self.fleet.add(view)

    def take(self, job: ReplicaJob) -> None:
        """Takes in a request, of a client or forwarded by a peer."""
        self.queue.append(job)
        self._pump()

    def report(self) -> Report:
        """Returns what this balancer tells its peers."""
        replicas = self._replicas.values()
        return Report(
            self._timeline.now_s,
            pending=sum(len(replica.waiting) for replica in replicas),
            running=sum(len(replica.running) for replica in replicas),
            queue_length=len(self.queue),
            num_available=sum(not replica.waiting for replica in replicas),
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

        def first(_: object = None) -> None:
            self.fleet.first_token(flight, self._timeline.now_s)
            job.on_first()

        def done(_: object = None) -> None:
            job.hit_tokens = sent.hit_tokens
            num_output = len(job.output) // 8 * 16
            self.fleet.finished(flight, self._timeline.now_s, num_output, sent.hit_tokens)
            job.on_done()
            self._pump()

        request = replace(job.request, was_forwarded=peer is not None or job.request.was_forwarded)
        sent = ReplicaJob(
            request,
            job.output,
            lambda: self._timeline.after(one_way_s, first),
            lambda: self._timeline.after(one_way_s, done),
        )
        arrive = peer.take if peer is not None else self._replicas[target].submit
        self._timeline.after(one_way_s, arrive, sent)

    def _probe(self, _: object) -> None:
        now_s = self._timeline.now_s
        self._read_reports(now_s)
        self.fleet.policy.tick(now_s)
        self._timeline.after(PROBE_S, self._probe)

    def _read_reports(self, now_s: float) -> None:
        if Need.REPORTS not in self.fleet.policy.needs:
            return
        for replica in self._replicas.values():
            one_way_s = self._round_trips_ms[self.region, replica.region] / 2000
            report = Report(
                now_s, len(replica.waiting), len(replica.running), replica.kv_used_fraction
            )
            self._timeline.after(one_way_s, self._told, (replica.id, report))
        for peer in self._peers.values():
            one_way_s = self._round_trips_ms[self.region, peer.region] / 2000
            self._timeline.after(one_way_s, self._told, (peer.id, peer.report()))

    def _told(self, what: tuple[ReplicaId, Report]) -> None:
        self.fleet.reported(*what)
        self._pump()
