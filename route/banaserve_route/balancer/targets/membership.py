"""Registry of a balancer's targets: its own replicas, those of dead balancers, and its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic

from banaserve.base.net.tls import Certificates, ClientTls
from banaserve_route.balancer.config import (
    BalancerSettings,
    Endpoint,
    PeerSettings,
    ReplicaSettings,
    parse_endpoint,
    replica_id,
)
from banaserve_route.balancer.targets.adoption import AdoptableReplica, adoptable
from banaserve_route.balancer.targets.health import Prober
from banaserve_route.balancer.targets.kv_events.subscriber import KvEventSubscriber
from banaserve_route.balancer.targets.peers import (
    PEER_PREFIX,
    PeerProber,
    PeerState,
    ReplicaState,
    is_free,
)
from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import (
    Need,
    PeerView,
    ReplicaId,
    ReplicaPolicy,
    ReplicaView,
    Request,
)
from banaserve_route.policies.policy import may_serve
from banaserve_route.policies.prefixes.peers import PeerPrefixes, SharesPrefixes


class TargetRegistry:
    """Targets that requests may be sent to, and their probers.

    Attributes:
        adopted: Ids of the adopted replicas, by the region whose balancer is dead.
        tls: Authorities that are trusted for targets with TLS; None while there is no such target.
    """

    def __init__(
        self,
        fleet: Fleet,
        log: Callable[[str], None],
        on_change: Callable[[], None],
        prefixes: PeerPrefixes | None = None,
    ) -> None:
        self.targets: dict[str, Target] = {}
        self.adopted: dict[str, list[str]] = {}
        self.tls: Certificates | None = None
        self._fleet, self._log, self._on_change = fleet, log, on_change
        self._prefixes = prefixes
        self._probers: dict[str, Prober] = {}
        self._subscribers: dict[str, KvEventSubscriber] = {}
        self._peers: dict[str, PeerProber] = {}
        self._own: tuple[ReplicaSettings, ...] = ()
        self._settings = BalancerSettings()
        self._is_started = False

    def take_settings(self, settings: BalancerSettings) -> None:
        """Bring the targets in line with ``settings``.

        A replica whose id and address stay the same keeps its counts, its connections and what is
        known of its cache.
        """
        self._settings = settings
        stays = {place_of(one) for one in settings.replicas} & {place_of(one) for one in self._own}
        for one in self._own:
            if place_of(one) not in stays:
                self._remove(replica_id(one))
        for one in settings.replicas:
            if place_of(one) in stays:
                self._adjust(one)
            else:
                self._disown(replica_id(one))
                self._add(one, settings.region)
        self._own = settings.replicas
        for name, ids in self.adopted.items():
            for told in self._adoptable(self._peers[name])[0]:
                if replica_id(told.replica) in ids:
                    self._adjust(told.replica, told.takes_keys)
        for peer in settings.peers:
            if peer.region not in self._peers:
                self._add_peer(peer)
            else:
                self._peers[peer.region].take_settings(settings)

    async def start(self) -> None:
        """Probe every target once, then keep probing."""
        probers: list[Prober | PeerProber] = [*self._probers.values(), *self._peers.values()]
        await asyncio.gather(*(prober.look() for prober in probers))
        for target in self.targets.values():
            if target.num_failed_looks:
                target.is_healthy = False
                target.refresh(monotonic())
                self._log(f"{target.name} {target.complaint}; looking again")
        self._is_started = True
        for prober in probers:
            prober.start()
        for subscriber in self._subscribers.values():
            subscriber.start()

    def stop(self) -> None:
        """Stop probing, and close every connection."""
        for prober in self._probers.values():
            prober.stop()
        for subscriber in self._subscribers.values():
            subscriber.stop()
        for peer in self._peers.values():
            peer.stop()
        for target in self.targets.values():
            target.pool.close()

    def others(self, request: Request, tried: set[str]) -> list[Target]:
        """Return targets not in ``tried`` that may serve ``request``, now or at another time."""
        return [
            one
            for one in self.targets.values()
            if one.view.id not in tried
            and not (one.is_peer and request.was_forwarded)
            and may_serve(one.view, request)
        ]

    @property
    def is_ready(self) -> bool:
        """Return whether a request would find a target."""
        return any(one.is_up for one in self.targets.values())

    def state(self, queue_length: int) -> PeerState:
        """Return the state that this balancer reports to its peers."""
        views = [one.view for one in self.targets.values() if not one.is_peer]
        return PeerState(
            region=self._settings.region,
            queue_length=queue_length,
            num_available=sum(map(is_free, views)),
            pending=sum(view.pending for view in views),
            running=sum(max(view.running, view.outstanding) for view in views),
            replicas=[
                ReplicaState(one.url, replica_id(one), list(one.models), one.max_prompt_tokens)
                for one in self._own
            ],
            distances_ms={name: peer.distance_ms for name, peer in self._peers.items()},
        )

    def look_after(self, now_s: float) -> None:
        """Adopt the replicas of dead balancers; give back those of balancers that live again."""
        alive = {name for name, peer in self._peers.items() if not peer.is_dead(now_s)}
        own = self._settings.region
        for name, peer in self._peers.items():
            if name in alive:
                for one in self.adopted.pop(name, ()):
                    self._remove(one)
                    self._log(f"replica {one} is returned to {name}")
                continue
            distances = {own: peer.distance_ms} | {
                other: self._peers[other].state.distances_ms.get(name, float("inf"))
                for other in alive
            }
            if failover_owner(distances) == own and name not in self.adopted:
                self._adopt(name, peer)

    def _adopt(self, region: str, peer: PeerProber) -> None:
        self.adopted[region] = []
        allowed, refused = self._adoptable(peer)
        for one in allowed:
            if (name := replica_id(one.replica)) not in self.targets:
                self._add(one.replica, region, one.takes_keys)
                self.adopted[region].append(name)
        if refused:
            self._log(
                f"{len(refused)} replicas that {region} has told of are not served from here, "
                f"{refused[0]} among them: allow their addresses with adopt"
            )
        shown = ", ".join(self.adopted[region]) or "none are known"
        self._log(f"the balancer of {region} is dead; its replicas are served from here: {shown}")
        self._on_change()

    def _adoptable(self, peer: PeerProber) -> tuple[list[AdoptableReplica], list[str]]:
        return adoptable(peer.settings, peer.state.replicas)

    def _add(self, one: ReplicaSettings, region: str, takes_keys: bool = True) -> None:
        settings = self._settings
        view = ReplicaView(ReplicaId(replica_id(one)), region)
        self._fleet.add(view)
        endpoint = parse_endpoint(one.url)
        self.targets[view.id] = Target(view, endpoint, settings, tls=self._tls_for(endpoint))
        if self._is_started:
            self.targets[view.id].begin_slowly(monotonic())
        self._adjust(one, takes_keys)

    def _adjust(self, one: ReplicaSettings, takes_keys: bool = True) -> None:
        """Apply the settings of a replica from now on.

        Args:
            takes_keys: True if the replica may be shown keys, the balancer's and the clients'.
        """
        settings = self._settings
        target = self.targets[replica_id(one)]
        target.view.models = frozenset(one.models)
        target.view.max_prompt_tokens = one.max_prompt_tokens
        target.take_settings(
            (one.key or settings.replica_key) if takes_keys else "",
            one.max_outstanding or settings.limits.max_outstanding,
            settings,
        )
        target.takes_keys = takes_keys
        self._subscribe(one, target)
        before = self._probers.get(target.view.id)
        if before is not None and before.health == settings.health:
            return
        if before is not None:
            before.stop()
        self._probers[target.view.id] = prober = Prober(
            target,
            self._fleet,
            settings.health,
            self._changed,
            self._on_change,
            self._log,
            # Peers are told the reported load, even if the policy does not read it.
            reads_reports=Need.REPORTS in self._fleet.policy.needs or bool(settings.peers),
        )
        if self._is_started:
            prober.start()

    def _subscribe(self, one: ReplicaSettings, target: Target) -> None:
        """Follow the KV events of a replica, if it publishes any and the policy uses them."""
        name, endpoints = target.view.id, one.kv_endpoints
        before = self._subscribers.get(name)
        if before is not None and before.endpoints == endpoints:
            return
        self._unsubscribe(name)
        if endpoints is None or Need.CACHES not in self._fleet.policy.needs:
            return
        self._subscribers[name] = made = KvEventSubscriber(
            name,
            endpoints,
            self._fleet.caches,
            lambda: self._fleet.restarted(name),
            self._log,
        )
        if self._is_started:
            made.start()

    def _unsubscribe(self, name: ReplicaId) -> None:
        if (before := self._subscribers.pop(name, None)) is not None:
            before.stop()
            self._fleet.caches.remove(name)

    def _tls_for(self, endpoint: Endpoint) -> Certificates | None:
        if endpoint.is_tls and self.tls is None:
            self.tls = Certificates(ClientTls(self._settings.replica_ca), self._log)
        return self.tls

    def _add_peer(self, peer: PeerSettings) -> None:
        settings = self._settings
        view = PeerView(ReplicaId(PEER_PREFIX + peer.region), peer.region)
        view.round_trip_ms = peer.distance_ms
        own_fields = b"X-Banaserve-Peer: %b\r\n" % settings.peer_key.encode()
        endpoint = parse_endpoint(peer.url)
        target = Target(view, endpoint, settings, own_fields, self._tls_for(endpoint))
        may_forward = settings.forward_to is None or peer.region in settings.forward_to
        if may_forward and Need.PEERS in self._fleet.policy.needs:
            self._fleet.add(view)
            self.targets[view.id] = target
        self._peers[peer.region] = PeerProber(
            peer,
            target,
            self._fleet,
            settings.health,
            self._changed,
            self._on_change,
            self._log,
            self._prefixes,
        )

    def _disown(self, target_id: str) -> None:
        """Drop an adopted replica that the settings now name as this balancer's own."""
        for ids in self.adopted.values():
            if target_id in ids:
                ids.remove(target_id)
                self._remove(target_id)

    def _remove(self, target_id: str) -> None:
        target = self.targets.pop(target_id)
        self._probers.pop(target_id).stop()
        self._unsubscribe(target.view.id)
        self._fleet.remove(target.view.id)
        target.pool.retire()

    def _changed(self, target: Target) -> None:
        self._log(f"{target.name} {'is back' if target.is_healthy else target.complaint}")
        if target.is_healthy and target.was_refused:
            # The replica has been restarted, so the contents of its cache are gone.
            target.was_refused = False
            self._fleet.restarted(target.view.id)
            if (subscriber := self._subscribers.get(target.view.id)) is not None:
                subscriber.restarted()
        self._on_change()


def failover_owner(distances_ms: Mapping[str, float]) -> str:
    """Return the region that is nearest to the dead one; the first by name among equals.

    Every living balancer calls this with the same distances and so gets the same answer. If the
    distances differ for a moment, two balancers serve a replica, which loses and doubles nothing.

    Args:
        distances_ms: Distance from each living region to the dead one in milliseconds, as the
            living region measured it; at least one.
    """
    return min(distances_ms, key=lambda region: (distances_ms[region], region))


def shared_prefixes(policy: ReplicaPolicy, settings: BalancerSettings) -> PeerPrefixes | None:
    """Return the prefixes shared with peers, also given to the policy; None if it shares none."""
    if not settings.peers or Need.PEER_PREFIXES not in policy.needs:
        return None
    assert isinstance(policy, SharesPrefixes), "checked when the policy is registered"
    prefixes = PeerPrefixes(settings.peer_key)
    policy.share_prefixes(prefixes)
    return prefixes


def place_of(one: ReplicaSettings) -> tuple[str, Endpoint]:
    """Return the identity of a replica: its id and its address."""
    return replica_id(one), parse_endpoint(one.url)
