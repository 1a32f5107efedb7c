"""Settings of a balancer: one frozen schema for the command line and the file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit

import msgspec

from banaserve.base.access.tenants import KeyLimits
from banaserve.base.config.serve_config import is_loopback
from banaserve.base.errors import UserError
from banaserve.base.net.tls import ClientTls, ServerTls
from banaserve.base.text.names import check_known
from banaserve.kvstore.sizes import parse_size

_LOOKUP = re.compile(r"(dns|k8s)\+")
"""Beginning of the URL of a service: each address of it is a replica."""
MAX_TOLD_REPLICAS = 256
"""Maximum number of replicas that one balancer reports to another."""
OWN_HOST = "*"
"""Host of a KV event address that stands for the host of the replica's URL."""
_MAX_RANKS = 256
_ZMQ_ADDRESS = re.compile(r"tcp://(\*|[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", re.ASCII)
MAX_NAME_CHARS = 256
"""Maximum length of an id or a model name, in characters."""


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a replica.

    Attributes:
        url: URL of the replica, ``http://HOST:PORT``. Or, looked up every five seconds,
            ``dns+http://HOST:PORT`` for a replica at each address of the name, and
            ``k8s+http://SERVICE.NAMESPACE:PORT`` for one at each ready server of a service.
        id: Name of the replica in metrics and logs; empty for host and port.
        models: Names of the models that the replica serves; empty for any model.
        key: Key sent to the replica instead of the client's key.
        max_outstanding: Maximum number of requests at the replica at once; 0 for the balancer's
            setting.
        max_prompt_tokens: Maximum prompt length in tokens; 0 if unknown. Longer prompts go to other
            replicas.
        kv_events: Address at which the replica publishes its KV cache events (vLLM's
            ``--kv-events-config``), such as ``tcp://*:5557``, where ``*`` is the host of ``url``;
            empty if it publishes none.
        kv_replay: Address that replays missed batches of events, such as ``tcp://*:5558``; empty if
            there is none.
        kv_ranks: Number of data-parallel engines of the replica; each publishes on the ports above
            plus its number.
    """

    url: str
    id: str = ""
    models: tuple[str, ...] = ()
    key: str = ""
    max_outstanding: int = 0
    max_prompt_tokens: int = 0
    kv_events: str = ""
    kv_replay: str = ""
    kv_ranks: int = 1

    def check(self) -> None:
        """Check that the URL and the addresses of events are valid.

        Raises:
            UserError: One of them is invalid.
        """
        endpoint = self.endpoint
        if self.is_name and endpoint.is_tls:
            raise UserError(f"{self.url}: certificates are for one name: list the servers' URLs")
        if self.is_name and self.id:
            raise UserError(f"{self.url} has the id {self.id}: several servers need several ids")
        self._check_events()

    def _check_events(self) -> None:
        if self.kv_replay and not self.kv_events:
            raise UserError(f"{self.url} has kv_replay alone: give kv_events too")
        if not 1 <= self.kv_ranks <= _MAX_RANKS:
            raise UserError(f"kv_ranks is {self.kv_ranks}: give 1 to {_MAX_RANKS}")
        for address in filter(None, (self.kv_events, self.kv_replay)):
            found = _ZMQ_ADDRESS.fullmatch(address)
            if found is None or not 0 < int(found[2]) < 65537 - self.kv_ranks:
                raise UserError(f"{address!r} is no address of KV events: write tcp://HOST:PORT")
            if self.is_name and found[1] != OWN_HOST:
                raise UserError(f"{self.url} is several servers: write tcp://{OWN_HOST}:{found[2]}")

    @property
    def kv_endpoints(self) -> KvEndpoints | None:
        """Return the addresses of the replica's KV events; None if it publishes none."""
        if not self.kv_events:
            return None
        host = self.endpoint.authority.rpartition(":")[0]
        events, replay = (one.replace(OWN_HOST, host) for one in (self.kv_events, self.kv_replay))
        return KvEndpoints(events, replay, self.kv_ranks)

    @property
    def lookup(self) -> str:
        """How the addresses of a service are found, ``dns`` or ``k8s``; empty for one address."""
        found = _LOOKUP.match(self.url)
        return found[1] if found else ""

    @property
    def is_name(self) -> bool:
        """True if each address of the host's name is a replica."""
        return bool(self.lookup)

    @property
    def endpoint(self) -> Endpoint:
        """Return the address in the URL.

        Raises:
            UserError: The URL is invalid.
        """
        return parse_endpoint(self.url.removeprefix(f"{self.lookup}+"))


class PeerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a peer, the balancer of another region.

    Attributes:
        distance_ms: Round trip to the peer in milliseconds, used until it is measured.
        replicas: Replicas of that region, in case the peer dies before it has reported them.
        adopt: Allowed places of the replicas that the peer reports: URLs, or networks such as
            ``10.1.0.0/16``. When the peer is dead, replicas elsewhere are not adopted, except those
            at the peer's own host, which get no key.
    """

    region: str
    url: str
    distance_ms: float = 0.0
    replicas: tuple[ReplicaSettings, ...] = ()
    adopt: tuple[str, ...] = ()

    def check(self) -> None:
        """Check the addresses of the replicas and of the places in ``adopt``.

        Raises:
            UserError: One of them is not an address.
        """
        for one in self.replicas:
            one.check()
            if one.is_name:
                raise UserError(f"{one.url} of the peer {self.region}: list the servers' addresses")
        for place in self.adopt:
            if "://" in place:
                parse_endpoint(place)
                continue
            try:
                ip_network(place)
            except ValueError:
                raise UserError(
                    f"adopt {place!r}: write http://HOST:PORT, or a network such as 10.1.0.0/16"
                ) from None


class TenantSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a tenant, the holder of an API key.

    Attributes:
        key: API key that the tenant's clients show.
        regions: Regions in which the tenant's requests may be served; empty for all.
        max_requests: Maximum number of requests under way at once; 0: no limit, here and below.
        requests_per_minute: Maximum number of requests per minute; a key that has been idle may
            send a minute's requests at once.
        tokens_per_minute: Maximum number of tokens of prompts and answers per minute, counted when
            they are known.
    """

    key: str
    regions: tuple[str, ...] = ()
    max_requests: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    @property
    def limits(self) -> KeyLimits:
        return KeyLimits(
            max_requests=self.max_requests,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class ShadowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a second policy that decides too, and whose decisions are only compared.

    Attributes:
        preset: Name of the preset; empty for the policy's default.
        seed: Seed of the policy's random choices.
    """

    name: str
    preset: str = ""
    options: dict[str, Any] = {}
    seed: int = 0


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the routing policy: its name, its preset and its own options.

    Attributes:
        preset: Name of the preset; empty for the policy's default.
        seed: Seed of the policy's random choices.
        state_file: File in which the learned state survives a restart; empty for none.
        staleness_s: Maximum age of the counters that the policy sees, in seconds; 0: live counters.
            Stale counters imitate balancers that read metrics, for comparison.
        hold_safe: True if weights found by tuning are taken back, and no others are tried. May
            change while serving.
        shadow: Second policy that decides each request too; its decisions are only compared.
    """

    name: str = "predicted_latency"
    preset: str = ""
    options: dict[str, Any] = {}
    seed: int = 0
    state_file: str = ""
    staleness_s: float = 0.0
    hold_safe: bool = False
    shadow: ShadowSettings | None = None


_OFF_AT_0 = ("slow_start_s", "outlier_latency_factor")
MAX_COMPARED = 32
"""Maximum number of requests by which a replica is compared with others."""
_MAY_BE_0 = ("max_outstanding", "max_connections_per_address", "drain_s")


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of sizes, numbers and times.

    Attributes:
        max_body: Maximum size of the body of a request.
        max_buffered: Maximum total size of the bodies held in memory.
        max_connections: Maximum number of client connections; beyond it, the oldest without a key
            makes way. The limit of file descriptors may lower the number.
        max_connections_per_address: Maximum number of client connections from one address without a
            key; 0: a quarter of ``max_connections``.
        max_requests: Maximum number of requests under way at once; more are answered 429.
        max_queue: Maximum number of requests that wait for a replica.
        max_outstanding: Maximum number of requests at one replica at a time; 0: no limit.
        queue_timeout_s: Maximum time of each wait for a replica, in seconds.
        request_timeout_s: Maximum time from the whole request to the last byte of the answer, in
            seconds.
        body_timeout_s: Maximum time for a body, in seconds; a second more for each 64 KiB received.
        max_attempts: Maximum number of replicas tried before the first byte of the answer.
        drain_s: Maximum time for requests under way when the balancer ends, in seconds.
    """

    max_body: str = "32MiB"
    max_buffered: str = "1GiB"
    max_connections: int = 16384
    max_connections_per_address: int = 0
    max_requests: int = 4096
    max_queue: int = 1024
    max_outstanding: int = 0
    queue_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    connect_timeout_s: float = 2.0
    max_attempts: int = 3
    drain_s: float = 10.0

    def check(self) -> None:
        """Check every limit.

        Raises:
            UserError: A limit is invalid.
        """
        parse_size(self.max_body)
        parse_size(self.max_buffered)
        for name in _MAY_BE_0:
            if getattr(self, name) < 0:
                raise UserError(f"limits.{name} is {getattr(self, name)}: give 0 or more")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in _MAY_BE_0 or isinstance(value, str):
                continue
            if not 0 < value < 1e9:
                raise UserError(f"limits.{name} is {value}: give more than 0")


class HealthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Probes of replicas: how often, and when a replica is taken out and brought back.

    Attributes:
        interval_s: Time between two probes of a replica's ``path``, in seconds.
        report_interval_s: Time between two reads of a replica's metrics, in seconds, for policies
            that use them.
        snapshot_interval_s: Time between two reads of the prefixes that a peer's replicas were
            sent, in seconds.
        failures: Number of failed probes in a row that take a replica out; one successful probe
            brings it back.
        breaker_failures: Number of failed requests in a row that open a replica's circuit.
        slow_start_s: Time in which a replica that comes back, or joins while the balancer serves,
            takes ever more requests at once, in seconds; 0 for no limit.
        outlier_interval_s: Time between two comparisons of the replicas with each other, in
            seconds; outcomes of requests count for six intervals.
        outlier_request_volume: Number of recent requests without which a replica is not compared.
        outlier_failure_fraction: Difference between the share of requests that a replica has failed
            and that of the other replicas at which it is ejected; 0 for never.
        outlier_latency_factor: Ratio of a replica's times to first token to the other replicas' at
            which it is ejected; 0 for never. Give more than the ratio between slow and fast models
            of GPUs, if replicas differ.
        outlier_base_ejection_s: Duration of a first ejection, in seconds; the second one in a row
            takes twice as long, and so on.
        outlier_max_ejection_s: Maximum duration of an ejection, in seconds.
        outlier_max_ejection_fraction: Maximum share of replicas that are ejected at once; 0 for
            none. The last replica is never ejected.
    """

    path: str = "/health"
    interval_s: float = 1.0
    timeout_s: float = 2.0
    report_interval_s: float = 0.1
    snapshot_interval_s: float = 10.0
    failures: int = 2
    breaker_failures: int = 3
    breaker_pause_s: float = 1.0
    breaker_longest_pause_s: float = 30.0
    slow_start_s: float = 0.0
    outlier_interval_s: float = 10.0
    outlier_request_volume: int = 20
    outlier_failure_fraction: float = 0.3
    outlier_latency_factor: float = 5.0
    outlier_base_ejection_s: float = 30.0
    outlier_max_ejection_s: float = 300.0
    outlier_max_ejection_fraction: float = 0.5

    def check(self) -> None:
        """Check the path and every number.

        Raises:
            UserError: A value is invalid.
        """
        if not self.path.startswith("/") or not self.path.isascii() or " " in self.path:
            raise UserError(f"health.path is {self.path!r}: give a path such as /health")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "path":
                continue
            if name.endswith("_fraction"):
                if not 0 <= value <= 1:
                    raise UserError(f"health.{name} is {value}: give 0 to 1")
            elif not (0 < value < 1e6 or (name in _OFF_AT_0 and value == 0)):
                raise UserError(f"health.{name} is {value}: give more than 0")
        if 0 < self.outlier_latency_factor <= 1:
            raise UserError(
                f"health.outlier_latency_factor is {self.outlier_latency_factor}: give more than "
                "1, or 0 for no such ejections"
            )
        if self.outlier_request_volume > MAX_COMPARED:
            raise UserError(
                f"health.outlier_request_volume is {self.outlier_request_volume}: give "
                f"{MAX_COMPARED} at most"
            )
        if self.outlier_base_ejection_s > self.outlier_max_ejection_s:
            raise UserError(
                f"health.outlier_base_ejection_s is {self.outlier_base_ejection_s}: give "
                f"outlier_max_ejection_s, {self.outlier_max_ejection_s}, at most"
            )


_AFTER = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)|(\d{1,6}(?:\.\d{1,3})?)ms", re.ASCII)


class HedgeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of hedged requests, which are sent to a second replica if the first token is late.

    Attributes:
        after: Time after which a first token is late: milliseconds, such as ``300ms``, or a
            quantile of recent requests, such as ``p95``; empty for no hedged requests.
        max_fraction: Maximum share of requests that are sent to a second replica.
    """

    after: str = ""
    max_fraction: float = 0.05

    def check(self) -> None:
        """Check both values.

        Raises:
            UserError: A value is invalid.
        """
        if self.after and not (self.after_ms or self.quantile):
            raise UserError(
                f"hedge.after is {self.after!r}: give a time such as 300ms, or a quantile such as "
                "p95"
            )
        if not 0 < self.max_fraction <= 1:
            raise UserError(f"hedge.max_fraction is {self.max_fraction}: give more than 0, up to 1")

    @property
    def after_ms(self) -> float | None:
        """Return the fixed time in milliseconds; None if there is none."""
        found = _AFTER.fullmatch(self.after)
        return float(found[2]) if found and found[2] else None

    @property
    def quantile(self) -> float | None:
        """Return the quantile of recent requests, between 0 and 1; None if there is none."""
        found = _AFTER.fullmatch(self.after)
        return float(found[1]) / 100 if found and found[1] else None


_MAX_PROCESSES = 64
_MAX_TOLD_BODY_BYTES = 2**30


class BalancerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one balancer.

    Attributes:
        region: Region of this balancer and its replicas.
        api_keys: Keys of which a client must show one; empty if no key is needed.
        tenants: Further keys, each with limits and the regions that may serve its requests.
        admin_key: Key that opens the page; empty for no page.
        peer_key: Key that balancers show to each other; needed with ``peers``.
        decision_log: File that gets one JSON line per request; empty for none.
        traces: URL of an OTLP collector (``http://HOST:4318``); empty for none.
        ssl_certfile: Certificate file for HTTPS; empty: plain HTTP. The certificate and its key are
            read again when they change.
        ssl_keyfile: Key file of the certificate; empty if the certificate file contains the key.
        replica_ca: File of authorities for replicas and peers with ``https://``; empty for the
            system's authorities.
        forward_to: Regions to which requests may be forwarded; None: all of ``peers``.
        processes: Number of processes that accept clients and relay bytes; with 2 or more, one more
            process decides for all of them. 1: one process does both.
        tokenizer: Folder with the ``tokenizer.json`` of the served model, and its chat template:
            policies get the number of a prompt's tokens, and texts are compared with the KV events
            of replicas too; empty: four bytes count as a token.
    """

    region: str = "local"
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    admin_key: str = ""
    replica_key: str = ""
    policy: PolicySettings = PolicySettings()
    replicas: tuple[ReplicaSettings, ...] = ()
    tenants: tuple[TenantSettings, ...] = ()
    peers: tuple[PeerSettings, ...] = ()
    peer_key: str = ""
    forward_to: tuple[str, ...] | None = None
    decision_log: str = ""
    traces: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    replica_ca: str = ""
    processes: int = 1
    tokenizer: str = ""
    limits: LimitSettings = LimitSettings()
    health: HealthSettings = HealthSettings()
    hedge: HedgeSettings = HedgeSettings()

    def check(self) -> None:
        """Check the settings, each by itself and all together.

        Raises:
            UserError: The settings are invalid; the message names the key.
        """
        self.limits.check()
        self.health.check()
        self.hedge.check()
        if not 0 < self.port < 65536:
            raise UserError(f"port is {self.port}: give 1 to 65535")
        self._check_processes()
        self._check_keys()
        self._check_servers()
        self._check_tls()

    def _check_processes(self) -> None:
        if not 1 <= self.processes <= _MAX_PROCESSES:
            raise UserError(f"processes is {self.processes}: give 1 to {_MAX_PROCESSES}")
        if self.processes == 1:
            return
        limits = self.limits
        if parse_size(limits.max_body) > _MAX_TOLD_BODY_BYTES:
            raise UserError(
                f"limits.max_body is {limits.max_body}: give 1GiB at most with processes, which "
                "tell each other of bodies"
            )
        if parse_size(limits.max_body) > self.buffered_bytes_of_relay:
            raise UserError(
                f"limits.max_buffered is {limits.max_buffered}, of which each of {self.processes} "
                f"processes has a part that limits.max_body, {limits.max_body}, exceeds: change one"
            )

    @property
    def buffered_bytes_of_relay(self) -> int:
        """Return the maximum size of the bodies in the memory of one of several processes.

        The process that decides has a copy of each.
        """
        return parse_size(self.limits.max_buffered) // (2 * self.processes)

    def _check_keys(self) -> None:
        tenants = [one.key for one in self.tenants]
        for one in self.tenants:
            one.limits.check()
        client_keys = [*self.api_keys, *tenants]
        if not all(client_keys):
            raise UserError("an API key is empty: give a key, or none")
        if len(set(client_keys)) < len(client_keys):
            raise UserError("an API key is there twice: remove one")
        if self.peer_key and self.peer_key in client_keys:
            raise UserError("peer_key is one of the API keys: give it a key of its own")
        if self.admin_key and self.admin_key in (*client_keys, self.peer_key):
            raise UserError("admin_key is one of the other keys: give it a key of its own")
        if not is_loopback(self.host) and not client_keys:
            raise UserError(
                f"host {self.host} lets other machines in: set an API key (--api-key, "
                "BANASERVE_API_KEY), or stay on 127.0.0.1"
            )
        others = (self.replica_key, self.peer_key, *(one.key for one in self.replicas))
        for key in (*others, *client_keys, self.admin_key):
            if not key.isascii() or not key.isprintable() or " " in key:
                raise UserError("a key has characters that no header may carry")

    @property
    def compares_replicas(self) -> bool:
        """Return whether outcomes of requests are kept, to compare them."""
        is_learnt = self.hedge.quantile is not None
        return self.health.outlier_max_ejection_fraction > 0 or is_learnt

    @property
    def server_tls(self) -> ServerTls | None:
        """Return the TLS settings for serving clients; None for plain HTTP."""
        return ServerTls(self.ssl_certfile, self.ssl_keyfile) if self.ssl_certfile else None

    def _check_tls(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UserError("ssl_keyfile alone: give its certificate too, in ssl_certfile")
        for key, tls in (
            ("ssl_certfile", self.server_tls),
            ("replica_ca", ClientTls(self.replica_ca) if self.replica_ca else None),
        ):
            try:
                if tls is not None:
                    tls.context()
            except UserError as error:
                raise UserError(f"{key}: {error}") from None

    def _check_servers(self) -> None:
        if self.peers and not self.peer_key:
            raise UserError("peers need a peer_key: the same secret for all of them")
        regions = [self.region, *(one.region for one in self.peers)]
        for region in regions:
            if not region or not region.isascii() or not region.isprintable() or "," in region:
                raise UserError(f"region {region!r}: give a plain name without commas")
        twice = {region for region in regions if regions.count(region) > 1}
        if twice:
            raise UserError(f"region {min(twice)} is there twice: one balancer a region")
        for peer in self.peers:
            peer.check()
        if self.peers and len(self.replicas) > MAX_TOLD_REPLICAS:
            raise UserError(
                f"{len(self.replicas)} replicas: peers are told of {MAX_TOLD_REPLICAS} at most"
            )
        for one in self.replicas:
            one.check()
            check_name("the id of a replica", one.id)
            for model in one.models:
                check_name("a model", model)
        seen: set[Endpoint] = set()
        places = [(one.url, one.endpoint) for one in self.replicas]
        places += [(one.url, parse_endpoint(one.url)) for one in self.peers]
        for url, endpoint in places:
            if endpoint in seen:
                raise UserError(f"replica {url} is there twice: remove one")
            seen.add(endpoint)
        ids = [replica_id(one) for one in self.replicas]
        for name in ids:
            if ids.count(name) > 1 or name in regions:
                raise UserError(f"the id {name} is there twice: give each replica its own")
        for key in self.forward_to or ():
            check_known("region in forward_to", key, regions)


def check_name(what: str, name: str) -> None:
    """Check that ``name`` is short and printable: names go into logs, metrics and to peers.

    Raises:
        UserError: ``name`` is too long or not printable.
    """
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise UserError(
            f"{what} is {name[:20]!r}...: give {MAX_NAME_CHARS} printable characters at most"
        )


def replica_id(one: ReplicaSettings) -> str:
    """Return the id of a replica: the one in its settings, or host and port."""
    return one.id or one.endpoint.authority


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Addresses of a replica's KV cache events, of its data-parallel rank 0.

    Attributes:
        replay: Address that replays missed batches; empty for none.
        ranks: Number of ranks; the ports of a rank are those of rank 0 plus its number.
    """

    events: str
    replay: str
    ranks: int

    def of_rank(self, rank: int) -> tuple[str, str]:
        """Return the addresses of a rank."""
        return _with_port(self.events, rank), _with_port(self.replay, rank)


def _with_port(address: str, offset: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + offset}" if address else ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an HTTP server.

    Attributes:
        host: Name or address of the host; an IPv6 address without brackets.
    """

    host: str
    port: int
    is_tls: bool = False

    @property
    def authority(self) -> str:
        """Return host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def host_field(self) -> str:
        """Return the value of a Host header: some servers know no name with a default port."""
        return self.authority.removesuffix(":443" if self.is_tls else ":80")

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"


def parse_endpoint(url: str) -> Endpoint:
    """Return the endpoint that ``url`` names.

    Raises:
        UserError: ``url`` is not ``http[s]://HOST[:PORT]``, without a path, query or password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    odd = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or odd or not url.isascii():
        raise UserError(f"{url!r} is no address of a server: write http://HOST:PORT")
    is_odd = any(char in parts.hostname for char in " \t\r\n\\%") or not url.isprintable()
    if is_odd or not _is_host(parts.hostname):
        raise UserError(f"{url!r} is no address of a server: write http://HOST:PORT")
    if parts.path not in ("", "/"):
        raise UserError(f"{url} has a path: write {parts.scheme}://{parts.netloc} alone")
    is_tls = parts.scheme == "https"
    if port == 0:
        raise UserError(f"{url!r} has port 0: write the port that the server listens on")
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), is_tls)


def _is_host(host: str) -> bool:
    """Return whether the resolver accepts ``host``; its error is not that of a failed lookup."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
