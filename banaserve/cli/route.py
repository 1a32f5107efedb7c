"""``banaserve route``: a balancer in front of OpenAI-compatible replicas."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from banaserve.access.key_files import key_of, keys_of
from banaserve.arguments import Parser, read_pair
from banaserve.balancer.balancer import Balancer, max_connections
from banaserve.balancer.config import (
    BalancerSettings,
    HealthSettings,
    LimitSettings,
    PolicySettings,
    ReplicaSettings,
)
from banaserve.balancer.config_file import read_settings
from banaserve.cli.console import print_error, timed
from banaserve.cli.plugins import use_plugins, warn_of_rivalries
from banaserve.cli.sockets import listening
from banaserve.errors import UserError
from banaserve.net.descriptors import raise_descriptor_limit
from banaserve.orchestrator.replicas import registry
from banaserve.plugins import PluginGroup

_DEFAULTS = BalancerSettings()


def route_command(argv: Sequence[str]) -> int:
    """Balance until SIGINT or SIGTERM; return the exit code.

    Raises:
        UserError: An error that the user can correct.
    """
    use_plugins(PluginGroup.REPLICA_POLICIES)
    known = make_parser().parse_args(argv)
    settings = _from_file(argv, known.config) if known.config else _from_words(known)
    settings.check()
    warn_of_rivalries((PluginGroup.REPLICA_POLICIES, settings.policy.name))
    if not settings.replicas and not settings.peers:
        raise UserError("route: no replica: give --replica URL, once for each, or --config FILE")
    from banaserve.balancer import server

    say = timed(sys.stdout)
    balancers: list[Balancer] = []

    def make() -> Balancer:
        balancers.append(Balancer(settings, print_error))
        return balancers[0]

    raise_descriptor_limit()
    if (allowed := max_connections(settings)) < settings.limits.max_connections:
        say(f"{allowed} connections of clients at most: file descriptors (ulimit -n) allow no more")
    with listening(settings.host, settings.port) as sock:
        say(f"looking at {len(settings.replicas)} replicas and {len(settings.peers)} peers")
        code = server.run(make, sock, lambda: _banner(balancers[0]), known.config)
    say("ended")
    return code


def _from_file(argv: Sequence[str], path: Path) -> BalancerSettings:
    """Return the file's settings; other options are refused, so that the file can be reloaded."""
    if len(argv) > (1 if argv[0].startswith("--config=") else 2):
        raise UserError(f"--config goes alone: write the other options into {path}")
    return read_settings(path)


def _from_words(known: argparse.Namespace) -> BalancerSettings:
    from_env = [key for key in [os.environ.get("BANASERVE_API_KEY", "")] if key]
    options = dict(read_pair("--policy-option", text) for text in known.policy_option)
    return BalancerSettings(
        host=known.host,
        port=known.port,
        api_keys=keys_of("--api-key", known.api_key, known.api_key_file, from_env),
        replica_key=key_of(
            "--replica-key",
            known.replica_key,
            known.replica_key_file,
            os.environ.get("BANASERVE_REPLICA_KEY", ""),
        ),
        policy=PolicySettings(
            name=known.policy, preset=known.preset, options=options, seed=known.seed
        ),
        decision_log=known.decision_log,
        traces=known.traces,
        ssl_certfile=known.ssl_certfile,
        ssl_keyfile=known.ssl_keyfile,
        replica_ca=known.replica_ca,
        replicas=tuple(ReplicaSettings(url=url) for url in known.replica),
        limits=LimitSettings(
            max_body=known.max_body_size,
            max_connections=known.max_connections,
            max_connections_per_address=known.max_connections_per_address,
            max_requests=known.max_concurrent_requests,
            max_queue=known.max_queue,
            max_outstanding=known.max_outstanding,
            queue_timeout_s=known.queue_timeout,
            request_timeout_s=known.request_timeout,
            body_timeout_s=known.body_timeout,
        ),
        health=HealthSettings(path=known.health_path, interval_s=known.health_interval),
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    limits, health = _DEFAULTS.limits, _DEFAULTS.health
    parser = Parser(
        prog="banaserve route",
        description="Balance requests over OpenAI-compatible replicas (banaserve, vLLM, SGLang).",
        epilog="banaserve route --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML or YAML, instead of all other options")
    add("--replica", action="append", default=[], metavar="URL", help="one server; repeat")
    add("--policy", default=_DEFAULTS.policy.name, help=", ".join(registry.names()))
    add("--preset", default="", help="the policy's set of options to start from")
    add("--policy-option", action="append", default=[], metavar="KEY=VALUE", help="repeat")
    add("--seed", type=int, default=0, help="of the policy's random choices")
    add("--host", default=_DEFAULTS.host, help="other than loopback needs --api-key (%(default)s)")
    add("--port", type=int, default=_DEFAULTS.port, help="(%(default)s)")
    add("--api-key", action="append", default=[], help="clients need one; BANASERVE_API_KEY")
    add("--api-key-file", type=Path, metavar="FILE", help="holds such keys, one a line")
    add("--replica-key", help="sent to replicas; BANASERVE_REPLICA_KEY")
    add("--replica-key-file", type=Path, metavar="FILE", help="holds that key")
    add("--max-body-size", default=limits.max_body, help="of one request (%(default)s)")
    add("--max-connections", type=int, default=limits.max_connections, help="(%(default)s)")
    add(
        "--max-connections-per-address",
        type=int,
        default=0,
        help="of these, from one address without a key (0: a quarter)",
    )
    add("--max-concurrent-requests", type=int, default=limits.max_requests, help="(%(default)s)")
    add("--max-queue", type=int, default=limits.max_queue, help="waiting requests (%(default)s)")
    add("--max-outstanding", type=int, default=0, help="at a replica at a time; 0: no limit")
    add("--queue-timeout", type=float, default=limits.queue_timeout_s, help="s (%(default)s)")
    add("--request-timeout", type=float, default=limits.request_timeout_s, help="s (%(default)s)")
    add("--body-timeout", type=float, default=limits.body_timeout_s, help="s (%(default)s)")
    add("--ssl-certfile", default="", metavar="FILE", help="serve HTTPS; read again on change")
    add("--ssl-keyfile", default="", metavar="FILE", help="its key, where in a file of its own")
    add("--replica-ca", default="", metavar="FILE", help="authorities of https:// replicas")
    add("--decision-log", default="", metavar="FILE", help="one JSON line a request")
    add("--traces", default="", metavar="URL", help="OTLP collector, such as http://HOST:4318")
    add("--health-path", default=health.path, help="of replicas (%(default)s)")
    add("--health-interval", type=float, default=health.interval_s, help="s (%(default)s)")
    return parser


def _banner(balancer: Balancer) -> None:
    settings = balancer.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http{'s' * bool(settings.ssl_certfile)}://{host}:{settings.port}"
    lines = ["", f"  banaserve routes by {registry.POLICIES.label(settings.policy.name)}"]
    for target in balancer.targets.values():
        state = "ready" if target.is_healthy else "does not answer yet"
        lines.append(f"  {target.endpoint.url:<32} {state}")
    lines += [f"  API      {url}/v1", f"  metrics  {url}/metrics", "", "  Ctrl-C ends it.", ""]
    print("\n".join(lines), flush=True)
