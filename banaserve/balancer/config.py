"""Settings of a balancer: one frozen schema for the command line and the file."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit

import msgspec

from banaserve.access.quotas import KeyLimits
from banaserve.config import is_loopback
from banaserve.errors import UserError
from banaserve.kvstore.sizes import parse_size
from banaserve.names import check_known
from banaserve.net.tls import ClientTls, ServerTls

MAX_TOLD_REPLICAS = 256
"""That one balancer tells another of."""
MAX_NAME_CHARS = 256
"""Of an id or a model."""


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One replica.

    Attributes:
        url: ``http://HOST:PORT``.
        id: In metrics and logs; host and port where empty.
        models: Served model names; none: any.
        key: Sent to the replica instead of the client's key.
        max_outstanding: Requests it is sent at most at a time; 0: the balancer's setting.
        max_prompt_tokens: Longer prompts go elsewhere; 0: unknown.
    """

    url: str
    id: str = ""
    models: tuple[str, ...] = ()
    key: str = ""
    max_outstanding: int = 0
    max_prompt_tokens: int = 0

    def check(self) -> None:
        """Returns if the URL is one.

        Raises:
            UserError: It is not.
        """
        parse_endpoint(self.url)


class PeerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The balancer of another region.

    Attributes:
        distance_ms: Round trip from here, until it is measured.
        replicas: Of that region, for the case that it is dead before it has told them itself.
        adopt: Where replicas may be that it tells of: URLs, or networks such as ``10.1.0.0/16``.
            Others are not looked after when it is dead, but at its own host, and get no key.
    """

    region: str
    url: str
    distance_ms: float = 0.0
    replicas: tuple[ReplicaSettings, ...] = ()
    adopt: tuple[str, ...] = ()

    def check(self) -> None:
        """Return if what may be adopted are addresses.

        Raises:
            UserError: One is none.
        """
        for one in self.replicas:
            one.check()
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
    """One holder of an API key.

    Attributes:
        key: What clients of this tenant show.
        regions: Where their requests may be served; none: everywhere.
        max_requests: Under way at once; 0: no limit, here and below.
        requests_per_minute: A key that has been idle may send a minute's at once.
        tokens_per_minute: Of prompts and answers, counted when they are known.
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


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The routing policy, its preset and its own options.

    Attributes:
        preset: The policy's default where empty.
        seed: Of its random choices.
        state_file: Where what it has learned survives a restart; empty for nowhere.
        staleness_s: How old the counters may get that the policy sees; 0: live. What balancers do
            that read metrics, for comparison.
        hold_safe: Weights that tuning has found are taken back, and no others are tried as long
            as this holds. It may change while serving.
    """

    name: str = "round_robin"
    preset: str = ""
    options: dict[str, Any] = {}
    seed: int = 0
    state_file: str = ""
    staleness_s: float = 0.0
    hold_safe: bool = False


_MAY_BE_0 = ("max_outstanding", "max_connections_per_address", "drain_s")


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of sizes, numbers and times.

    Attributes:
        max_body: Of one request.
        max_buffered: Bodies held in memory, all together.
        max_connections: Of clients; beyond, the oldest without a key makes way. No more than the
            limit of file descriptors leaves room for.
        max_connections_per_address: Of these, from one address without a key; 0: a quarter.
        max_requests: Under way at once; more are answered 429.
        max_queue: Of these, waiting for a replica.
        max_outstanding: At one replica at a time; 0: no limit.
        queue_timeout_s: Longest wait for a replica.
        request_timeout_s: From the whole request to the last byte of the answer.
        body_timeout_s: For all of a body; a second more for each 64 KiB that have come.
        max_attempts: Replicas tried before the first byte.
        drain_s: How long requests under way may take when the balancer ends.
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
        """Returns if every limit makes sense.

        Raises:
            UserError: One does not.
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
    """Probes of replicas: how often, and when one is taken out and brought back.

    Attributes:
        interval_s: Between two looks at a replica's ``path``.
        report_interval_s: Between two looks at its metrics, for policies that read them.
        snapshot_interval_s: Between two looks at which prefixes a peer's replicas were sent.
        failures: Failed looks in a row until it is taken out; one good look brings it back.
        breaker_failures: Failed requests in a row until its circuit opens.
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

    def check(self) -> None:
        """Returns if every number makes sense.

        Raises:
            UserError: One does not.
        """
        if not self.path.startswith("/") or not self.path.isascii() or " " in self.path:
            raise UserError(f"health.path is {self.path!r}: give a path such as /health")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "path" and not 0 < value < 1e6:
                raise UserError(f"health.{name} is {value}: give more than 0")


class BalancerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one balancer.

    Attributes:
        region: Where this balancer and its replicas are.
        api_keys: One of them is needed from clients; none: no key is needed.
        tenants: Further keys, each with the regions that its requests may be served in.
        peer_key: What balancers show to each other; needed with ``peers``.
        decision_log: File that gets one JSON line a request; empty for none.
        traces: URL of an OTLP collector (``http://HOST:4318``); empty for none.
        ssl_certfile: Certificate to serve HTTPS with; empty: plain HTTP. It and its key are read
            again when they change.
        ssl_keyfile: Its key; where empty, in the same file.
        replica_ca: File of authorities for replicas and peers with ``https://``; the system's
            where empty.
        forward_to: Regions that requests may be sent on to; None: all of ``peers``.
    """

    region: str = "local"
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
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
    limits: LimitSettings = LimitSettings()
    health: HealthSettings = HealthSettings()

    def check(self) -> None:
        """Returns if the settings make sense together.

        Raises:
            UserError: They do not; names the key.
        """
        self.limits.check()
        self.health.check()
        if not 0 < self.port < 65536:
            raise UserError(f"port is {self.port}: give 1 to 65535")
        self._check_keys()
        self._check_servers()
        self._check_tls()

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
        if not is_loopback(self.host) and not client_keys:
            raise UserError(
                f"host {self.host} lets other machines in: set an API key (--api-key, "
                "BANASERVE_API_KEY), or stay on 127.0.0.1"
            )
        others = (self.replica_key, self.peer_key, *(one.key for one in self.replicas))
        for key in (*others, *client_keys):
            if not key.isascii() or not key.isprintable() or " " in key:
                raise UserError("a key has characters that no header may carry")

    @property
    def server_tls(self) -> ServerTls | None:
        """What clients are served with; None for plain HTTP."""
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
            check_name("the id of a replica", one.id)
            for model in one.models:
                check_name("a model", model)
        seen: set[Endpoint] = set()
        for url in [one.url for one in self.replicas] + [one.url for one in self.peers]:
            endpoint = parse_endpoint(url)
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
    """Return if ``name`` is short and printable: it goes into logs, metrics and to peers.

    Raises:
        UserError: It is not.
    """
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise UserError(
            f"{what} is {name[:20]!r}...: give {MAX_NAME_CHARS} printable characters at most"
        )


def replica_id(one: ReplicaSettings) -> str:
    """Returns the id of a replica: its own, or host and port."""
    return one.id or parse_endpoint(one.url).authority


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One HTTP server.

    Attributes:
        host: A name or an address; an IPv6 address without brackets.
    """

    host: str
    port: int
    is_tls: bool = False

    @property
    def authority(self) -> str:
        """As in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"


def parse_endpoint(url: str) -> Endpoint:
    """Returns what ``url`` names.

    Raises:
        UserError: It is not ``http[s]://HOST[:PORT]``; a path, a query or a password is too much.
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
    """Whether the resolver takes ``host``: it raises another error than for one it cannot find."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
