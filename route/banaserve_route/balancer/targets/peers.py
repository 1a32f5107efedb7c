"""State that balancers of different regions exchange ten times a second, behind a shared key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Annotated

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.net.sockets import is_own_fault
from banaserve_route.balancer.auth import PREFIXES_PATH, STATE_PATH
from banaserve_route.balancer.config import (
    MAX_NAME_CHARS,
    MAX_TOLD_REPLICAS,
    BalancerSettings,
    HealthSettings,
    PeerSettings,
    check_name,
    parse_endpoint,
)
from banaserve_route.balancer.targets.health import fetch, run_periodically
from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.fleet import Fleet, Report
from banaserve_route.policies.interface import ReplicaView
from banaserve_route.policies.prefixes.peers import PeerPrefixes

PEER_PREFIX = "region:"
"""Prefix of the names of peers among targets."""

PROTOCOL = 1
DEAD_AFTER_S = 2.0
"""Silence after which a peer is dead, in seconds: twenty probes, longer than a pause of the garbage
collector or the network."""

_FAILED_LOOKS = 3

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Url = Annotated[str, msgspec.Meta(max_length=512)]


class ReplicaState(msgspec.Struct, frozen=True):
    """Replica as reported to peers, so that they can adopt it. Keys are never reported."""

    url: _Url
    id: _Name
    models: Annotated[list[_Name], msgspec.Meta(max_length=256)] = []
    max_prompt_tokens: _Count = 0

    def check(self) -> None:
        """Check that the names are printable and the URL is valid.

        Raises:
            UserError: A name or the URL is invalid.
        """
        parse_endpoint(self.url)
        for name in (self.id, *self.models):
            check_name("the name of a replica or model", name)
        if self.id.startswith(PEER_PREFIX):
            raise UserError(f"the id of a replica begins with {PEER_PREFIX}")


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a balancer, as reported to its peers.

    Attributes:
        num_available: Number of replicas that would batch a request at once.
        distances_ms: Smoothed round trips to the other regions, in milliseconds.
    """

    region: _Name
    queue_length: _Count = 0
    num_available: _Count = 0
    pending: _Count = 0
    running: _Count = 0
    replicas: Annotated[list[ReplicaState], msgspec.Meta(max_length=MAX_TOLD_REPLICAS)] = []
    distances_ms: Annotated[dict[_Name, float], msgspec.Meta(max_length=1000)] = {}
    protocol: int = PROTOCOL


_decode = msgspec.json.Decoder(PeerState).decode
encode_state = msgspec.json.Encoder().encode


def is_free(view: ReplicaView) -> bool:
    """Return whether a replica would batch a request at once."""
    return view.is_available and view.pending == 0


class PeerProber:
    """Periodic probes of one peer.

    Attributes:
        state: Last state that the peer has reported.
        distance_ms: Round trip to the peer, in milliseconds.
    """

    def __init__(
        self,
        settings: PeerSettings,
        target: Target,
        fleet: Fleet,
        health: HealthSettings,
        on_change: Callable[[Target], None],
        on_report: Callable[[], None],
        log: Callable[[str], None],
        prefixes: PeerPrefixes | None = None,
    ) -> None:
        """``prefixes`` takes the prefixes of the peer's replicas; None: the peer is not asked."""
        self._settings, self._target, self._fleet, self._health = settings, target, fleet, health
        self._on_change, self._on_report, self._log = on_change, on_report, log
        self._prefixes = prefixes
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at_s = monotonic()
        self._complaint = ""
        self.state = PeerState(region=settings.region)
        self.distance_ms = settings.distance_ms

    def start(self) -> None:
        name, health = self._target.name, self._health
        self._repeat(self.look, health.report_interval_s, f"looking at {name}")
        if self._prefixes is not None:
            self._repeat(self.read_prefixes, health.snapshot_interval_s, f"prefixes of {name}")

    def _repeat(self, step: Callable[[], Awaitable[None]], interval_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(run_periodically(step, interval_s, self._log, what)))

    def stop(self) -> None:
        while self._tasks:
            self._tasks.pop().cancel()

    @property
    def settings(self) -> PeerSettings:
        """Return the settings of the peer."""
        return self._settings

    def take_settings(self, settings: BalancerSettings) -> None:
        """Apply the limits of ``settings`` from now on."""
        self._target.take_settings("", 0, settings)
        is_same, self._health = self._health == settings.health, settings.health
        if self._tasks and not is_same:
            self.stop()
            self.start()

    def is_dead(self, now_s: float) -> bool:
        """Return whether the peer has been silent for long although it was probed."""
        has_failed = self._target.num_failed_looks >= _FAILED_LOOKS
        return has_failed and now_s - self._heard_at_s > DEAD_AFTER_S

    async def look(self) -> None:
        """Probe the peer once."""
        target, asked_s = self._target, monotonic()
        try:
            answer = await fetch(
                target.pool, "GET", STATE_PATH.decode(), target.fields, self._health.timeout_s
            )
            state = self._read(answer.status, answer.body)
        except OSError as error:
            if is_own_fault(error):
                return
            state = None
        now_s = monotonic()
        if state is not None:
            self._take(state, asked_s, answer.took_ms)
        if target.looked(state is not None, self._health.failures, now_s):
            self._on_change(target)

    async def read_prefixes(self) -> None:
        """Ask the peer once which prefixes its replicas were sent.

        Raises:
            ProtocolError: The peer's answer is not a snapshot.
        """
        target, prefixes = self._target, self._prefixes
        if prefixes is None or not target.is_healthy:
            return
        try:
            answer = await fetch(
                target.pool, "GET", PREFIXES_PATH.decode(), target.fields, self._health.timeout_s
            )
        except OSError:
            return
        if answer.status == 200:
            prefixes.take(target.view.id, answer.body)

    def _read(self, status: int, body: bytes) -> PeerState | None:
        """Return the peer's state, or None if it is invalid; log each new complaint in one line."""
        complaint, state = "", None
        try:
            if status != 200:
                complaint = f"answers {status}" + (": is peer_key the same?" * (status == 401))
            else:
                state = _decode(body)
                check_name("its region", state.region)
                for one in state.replicas:
                    one.check()
                if state.protocol != PROTOCOL:
                    complaint = f"speaks protocol {state.protocol}, not {PROTOCOL}: update one"
                elif state.region != self._settings.region:
                    complaint = f"says it is {state.region}: correct the settings"
        except (msgspec.DecodeError, UnicodeDecodeError, UserError) as error:
            complaint = f"makes no sense: {error}"
        if complaint and complaint != self._complaint:
            self._log(f"peer {self._settings.region} at {self._settings.url} {complaint}")
        self._complaint = complaint
        return None if complaint else state

    def _take(self, state: PeerState, asked_s: float, took_ms: float) -> None:
        target_id = self._target.view.id
        self._heard_at_s, self.state = monotonic(), state
        self._fleet.measured_round_trip(target_id, took_ms)
        self.distance_ms = self._target.view.round_trip_ms or took_ms
        self._fleet.reported(
            target_id,
            Report(
                asked_s,
                pending=state.pending,
                running=state.running,
                queue_length=state.queue_length,
                num_available=state.num_available,
                num_replicas=len(state.replicas),
            ),
        )
        self._on_report()
