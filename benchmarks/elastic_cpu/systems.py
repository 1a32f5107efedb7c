"""Systems of the comparison, started and waiting for requests.

The two plain vLLM servers run behind two balancers, one for each policy. Between two passes their
prefix caches are emptied, so that each policy gets prompts that are new to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.models import ResolvedModel
from banaserve_bench.loadgen.servers import (
    Balanced,
    Running,
    Server,
    banaserve_server,
    command_server,
    route_command,
    vllm_server,
)
from benchmarks.elastic_cpu.figures import OURS, PEERS, Work
from benchmarks.router.peers import peer_command

NUM_INSTANCES = 2
_POLICIES = dict(zip(PEERS, ("round_robin", "cache_aware"), strict=True))
_ROUTER = "vllm-router"
EMPTIES_CACHES = {"VLLM_SERVER_DEV_MODE": "1"}
_STEPS = "vllm:iteration_tokens_total_count"
_CACHED = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
_QUIET_CORES = 0.1
_LOOK_S = 0.5
_LONGEST_LOOK_S = 20.0
_RESET_S = 30.0


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """A system that runs; ``plain`` are the vLLM servers below it, whose caches are emptied."""

    name: str
    running: Running
    plain: tuple[Server, ...] = ()

    def decisions(self) -> dict[str, float]:
        """Return the elastic policy's counts so far; empty for systems without such a policy."""
        server = self.running
        if not isinstance(server, Server):
            return {}
        return {
            "changes": server.metric("banaserve_orchestrator_steps_total", ending="done"),
            "requests": server.metric("banaserve_requests_total"),
            "two_legs": server.metric("banaserve_requests_total", way="two_legs"),
        }

    def work(self) -> Work:
        """Return the work of the system's engines so far. Blocking."""
        servers = (self.running,) if isinstance(self.running, Server) else self.plain
        return Work(
            steps=sum(server.metric(_STEPS) for server in servers),
            cached_tokens=sum(server.metric(name) for server in servers for name in _CACHED),
        )

    async def settled_cpu_s(self) -> float:
        """Return CPU seconds so far, once the effects of the last requests have ended."""
        until_s = time.monotonic() + _LONGEST_LOOK_S
        before_s = self.running.cpu_s()
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = self.running.cpu_s()
            if now_s - before_s < _QUIET_CORES * _LOOK_S or time.monotonic() > until_s:
                return now_s
            before_s = now_s


def empty_caches(servers: Iterable[Server]) -> None:
    """Empty the prefix caches of plain servers. Blocking.

    Raises:
        UserError: A server does not empty its cache.
    """
    for server in servers:
        asked = urllib.request.Request(f"{server.url}/reset_prefix_cache", method="POST")
        try:
            urllib.request.urlopen(asked, timeout=_RESET_S).close()
        except (urllib.error.URLError, OSError) as error:
            raise UserError(f"a vLLM server keeps its prefix cache: {error}") from error


@contextlib.contextmanager
def alone(one: SystemUnderTest, all_of_them: Iterable[SystemUnderTest]) -> Iterator[None]:
    """Suspend all processes of other systems: a user has one system, and idle engines take time."""
    own = {process.pid for process in one.running.processes()}
    others = {
        process.pid: process for other in all_of_them for process in other.running.processes()
    }
    stopped = [process for pid, process in others.items() if pid not in own]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(stopped):
            process.resume()


@contextlib.contextmanager
def systems(
    model: ResolvedModel, same: Sequence[str], serve_options: Sequence[str], routers: Path | None
) -> Iterator[Mapping[str, SystemUnderTest]]:
    """Start all systems.

    Args:
        same: Options of every engine.
        serve_options: Options of banaserve, in addition to ``same``.
        routers: Folder of other routers' environments; None takes ``banaserve route``.

    Raises:
        UserError: A system does not start.
    """
    found = {}
    with contextlib.ExitStack() as stack:
        ours = banaserve_server(
            model.served_name,
            *("--instances", str(NUM_INSTANCES), "--elastic", "--threads-per-instance", "1"),
            *same,
            *serve_options,
        )
        found[OURS] = SystemUnderTest(OURS, stack.enter_context(ours))
        plain = tuple(
            stack.enter_context(
                vllm_server(model.path_or_id, model.served_name, *same, environment=EMPTIES_CACHES)
            )
            for _ in range(NUM_INSTANCES)
        )
        for name, policy in _POLICIES.items():
            command = _balancer(routers, policy, [server.url for server in plain])
            balancer = stack.enter_context(command_server(command, name))
            found[name] = SystemUnderTest(name, Balanced(balancer, plain), plain)
        yield found


def _balancer(routers: Path | None, policy: str, urls: Sequence[str]) -> list[str]:
    if routers is not None:
        return peer_command(routers, _ROUTER, policy, urls)
    return route_command(policy, urls)
