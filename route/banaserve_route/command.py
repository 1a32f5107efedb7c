"""``banaserve route``: a balancer in front of OpenAI-compatible replicas."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from banaserve.base.access.key_files import key_option
from banaserve.base.arguments import Formatter, Options, Parser, option, pairs, values_of
from banaserve.base.errors import UserError
from banaserve.base.net.sockets import raise_descriptor_limit
from banaserve.base.plugins.discovery import PluginGroup
from banaserve.cli.plugins import use_plugins, warn_of_rivalries
from banaserve.cli.terminal.console import print_error, timed
from banaserve.frontdoor.lifecycle.listening_socket import bind
from banaserve_route.balancer.balancer import Balancer, max_connections
from banaserve_route.balancer.config import (
    BalancerSettings,
    HealthSettings,
    HedgeSettings,
    LimitSettings,
    PolicySettings,
    ReplicaSettings,
    ShadowSettings,
)
from banaserve_route.balancer.config_file import read_settings
from banaserve_route.balancer.discovery import Discovery
from banaserve_route.balancer.relays.supervisor import Supervision, supervise
from banaserve_route.policies import registry

_DEFAULTS = BalancerSettings()
_LIMITS = _DEFAULTS.limits


@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """Options of ``banaserve route``; fields have the names of the balancer's settings."""

    config: Path | None = option(
        "TOML or YAML file, instead of all other options", None, Path, metavar="FILE"
    )
    replica: tuple[str, ...] = option(
        "one server, or dns+http://NAME:PORT or k8s+http://SERVICE.NAMESPACE:PORT; repeat for more",
        (),
        metavar="URL",
    )
    kv_events: str = option(
        "address of each replica's KV cache events, such as tcp://*:5557 (*: its own host)",
        "",
        metavar="ADDRESS",
    )
    kv_replay: str = option("address that replays missed events", "", metavar="ADDRESS")
    tokenizer: str = option(
        "folder with the model's tokenizer: counts tokens, and compares texts with those events",
        "",
        metavar="DIR",
    )
    policy: str = option("one of {names}", _DEFAULTS.policy.name)
    preset: str = option("set of the policy's options to start from", "")
    policy_options: Options = pairs(
        "option of the policy; repeat for several",
        name="--policy-option",
    )
    seed: int = option("seed of the policy's random choices", 0)
    shadow_policy: str = option(
        "second policy that decides too; its decisions are only compared, in the metrics", ""
    )
    host: str = option("address to listen at; other than loopback needs --api-key", _DEFAULTS.host)
    port: int = option("port to listen at", _DEFAULTS.port, metavar="PORT")
    api_keys: tuple[str, ...] = key_option(
        "--api-key",
        "key that clients must give; repeat for several ($BANASERVE_API_KEY)",
        "file with API keys, one a line",
        "BANASERVE_API_KEY",
        is_repeated=True,
    )
    admin_key: str = key_option(
        "--admin-key",
        "key that opens the page under /ui ($BANASERVE_ADMIN_KEY)",
        "file with that key",
        "BANASERVE_ADMIN_KEY",
    )
    replica_key: str = key_option(
        "--replica-key",
        "key sent to replicas ($BANASERVE_REPLICA_KEY)",
        "file with that key",
        "BANASERVE_REPLICA_KEY",
    )
    max_body: str = option("size of a request's body", _LIMITS.max_body, name="--max-body-size")
    max_connections: int = option("maximum number of client connections", _LIMITS.max_connections)
    max_connections_per_address: int = option(
        "maximum number of these from one address without a key (0: a quarter)", 0
    )
    max_requests: int = option(
        "requests under way at once", _LIMITS.max_requests, name="--max-concurrent-requests"
    )
    max_queue: int = option("maximum number of waiting requests", _LIMITS.max_queue)
    max_outstanding: int = option("requests at a replica at once (0: no limit)", 0)
    queue_timeout_s: float = option("time to wait for a replica", _LIMITS.queue_timeout_s)
    request_timeout_s: float = option("time for a whole request", _LIMITS.request_timeout_s)
    body_timeout_s: float = option("time for a request's body", _LIMITS.body_timeout_s)
    ssl_certfile: str = option("certificate for HTTPS; read again on change", "", metavar="FILE")
    ssl_keyfile: str = option("key of the certificate, if elsewhere", "", metavar="FILE")
    replica_ca: str = option("certificate authorities of https:// replicas", "", metavar="FILE")
    processes: int = option(
        "processes that relay bytes; with 2 or more, one more decides", _DEFAULTS.processes
    )
    decision_log: str = option("file to append a JSON line to for each request", "", metavar="FILE")
    traces: str = option("OTLP collector, such as http://HOST:4318", "", metavar="URL")
    health_path: str = option("path that probes of replicas ask for", _DEFAULTS.health.path)
    health_interval_s: float = option("time between two probes", _DEFAULTS.health.interval_s)
    hedge_after: str = option(
        "time (300ms) or quantile (p95) after which a late request goes to a second replica too", ""
    )

    def settings(self) -> BalancerSettings:
        """Return the settings of the balancer."""
        own = {"policy", "limits", "health", "hedge", "replicas"}
        return BalancerSettings(
            **self._alike(BalancerSettings, own),
            policy=PolicySettings(
                name=self.policy,
                preset=self.preset,
                options=dict(self.policy_options),
                seed=self.seed,
                shadow=ShadowSettings(name=self.shadow_policy) if self.shadow_policy else None,
            ),
            replicas=tuple(
                ReplicaSettings(url=url, kv_events=self.kv_events, kv_replay=self.kv_replay)
                for url in self.replica
            ),
            limits=LimitSettings(**self._alike(LimitSettings)),
            health=HealthSettings(path=self.health_path, interval_s=self.health_interval_s),
            hedge=HedgeSettings(after=self.hedge_after),
        )

    def _alike(self, kind: Any, without: Set[str] = frozenset()) -> dict[str, Any]:
        """Return the values of the fields that ``kind`` has too."""
        names = set(kind.__struct_fields__) - without
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def route_command(argv: Sequence[str]) -> int:
    """Balance until SIGINT or SIGTERM; return the exit code.

    Raises:
        UserError: An error that the user can correct.
    """
    use_plugins(PluginGroup.REPLICA_POLICIES)
    asked = parse(argv)
    settings = _from_file(argv, asked.config) if asked.config else asked.settings()
    settings.check()
    warn_of_rivalries((PluginGroup.REPLICA_POLICIES, settings.policy.name))
    if not settings.replicas and not settings.peers:
        raise UserError("route: no replica: give --replica URL, once for each, or --config FILE")
    from banaserve_route.balancer import server

    say = timed(sys.stdout)
    balancers: list[Balancer] = []

    def make(found: BalancerSettings) -> Balancer:
        balancers.append(Balancer(found, print_error))
        return balancers[0]

    raise_descriptor_limit()
    if (allowed := max_connections(settings)) < settings.limits.max_connections:
        say(f"{allowed} connections of clients at most: file descriptors (ulimit -n) allow no more")
    host, port, processes = settings.host, settings.port, settings.processes
    if processes > 1:
        # Sockets that can be shared would be bound beside those of a balancer that runs already.
        bind(host, port).close()
    # Bound early: a port found in use only later would cost minutes.
    with ExitStack() as stack:
        listening = [
            stack.enter_context(bind(host, port, is_shared=processes > 1)) for _ in range(processes)
        ]
        say(f"looking at {len(settings.replicas)} replicas and {len(settings.peers)} peers")

        def run(supervision: Supervision | None = None) -> int:
            found = settings
            if supervision is not None and asked.config is not None:
                found = _read_again(asked.config, settings)
            discovery, ready = Discovery(found, print_error), partial(_banner, balancers)
            return server.run(make, discovery, listening, ready, asked.config, supervision)

        code = run() if processes == 1 else supervise(run, listening, print_error)
    say("ended")
    return code


def _from_file(argv: Sequence[str], path: Path) -> BalancerSettings:
    """Return the file's settings; other options are refused, so that the file can be reloaded."""
    if len(argv) > (1 if argv[0].startswith("--config=") else 2):
        raise UserError(f"--config goes alone: write the other options into {path}")
    return read_settings(path)


def _read_again(path: Path, first: BalancerSettings) -> BalancerSettings:
    """Return the file's settings of now, for a process that starts in place of a killed one.

    The sockets stay as they are, and ``first`` is returned if the file has a mistake.
    """
    try:
        found = structs.replace(
            read_settings(path), host=first.host, port=first.port, processes=first.processes
        )
        found.check()
    except UserError as error:
        print_error(f"{error}; going on with the settings of the start")
        return first
    return found


def parse(argv: Sequence[str]) -> RouteOptions:
    """Return the options in the words after ``banaserve route``.

    Raises:
        UserError: A word is invalid.
    """
    return RouteOptions(**values_of(RouteOptions, make_parser().parse_args(list(argv))))


def make_parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="banaserve route",
        usage="banaserve route [options]",
        description="Balance requests over OpenAI-compatible replicas (banaserve, vLLM, SGLang).",
        epilog="banaserve route --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000",
        allow_abbrev=False,
        formatter_class=Formatter,
    )
    parser.add_options(RouteOptions, {"--policy": registry.names()})
    return parser


def _banner(balancers: Sequence[Balancer]) -> None:
    [balancer] = balancers
    settings = balancer.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http{'s' * bool(settings.ssl_certfile)}://{host}:{settings.port}"
    lines = ["", f"  banaserve routes by {registry.POLICIES.label(settings.policy.name)}"]
    for target in balancer.targets.values():
        state = "ready" if target.is_healthy else target.complaint
        lines.append(f"  {target.endpoint.url:<32} {state}")
    lines += [f"  API      {url}/v1", f"  metrics  {url}/metrics"]
    if settings.admin_key:
        lines.append(f"  page     {url}/ui/")
    lines += ["", "  Ctrl-C ends it.", ""]
    print("\n".join(lines), flush=True)
