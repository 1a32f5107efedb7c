"""Three regions as real processes: balancers, replicas and the distances between them.

Replicas, balancers and clients are on one machine; links between regions delay what passes by half
of a measured round trip each way. Clients reach the balancer of their region, and another one when
theirs is gone, as clients of one DNS name would.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from banaserve_bench.loadgen.servers import end_with_parent, free_port
from benchmarks.location import environment
from region_link import RegionLink
from waiting import until

ROUND_TRIP_MS = {("us", "asia"): 145.4, ("us", "eu"): 99.1, ("asia", "eu"): 222.5}
"""Round trips between us-east-2, ap-northeast-1 and eu-central-1 of AWS, SkyWalker's regions;
from profiles/latency.csv of skyplane-project/skyplane (Apache-2.0)."""

REGIONS = ("us", "eu", "asia")
HOME_ONLY = "eu"
"""Region that alone may serve every third of its clients."""

_REPLICA = Path(__file__).with_name("simulated_replica.py")
_NUM_REPLICAS = 2
"""Number of replicas of each region."""
_START_S = 60.0
ANSWER_S = 60.0
KEYS: dict[str, tuple[str, ...]] = {"any": (), "home": (HOME_ONLY,)}
"""Keys of clients, and the regions that may serve their requests; empty for all regions."""


def round_trip_ms(one: str, other: str) -> float:
    """Return the round-trip time between two regions in milliseconds."""
    if one == other:
        return 0.0
    return ROUND_TRIP_MS.get((one, other)) or ROUND_TRIP_MS[other, one]


class Process:
    """A process that can be killed and started again on the same port."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.port = port
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the process; return when it listens."""
        process = self._begin()
        await until(lambda: process.poll() is not None or _listens(self.port), _START_S)
        assert process.poll() is None, self._log.read_text()[-300:]

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env={"OMP_NUM_THREADS": "1", **environment()},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        return self._process

    def kill(self) -> None:
        """Kill the process and all processes that it started, without warning."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class World:
    """The regions, started by ``async with``.

    Attributes:
        replicas: Replicas by region.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.balancers: dict[str, Process] = {}
        self.replicas: dict[str, list[Process]] = {}
        self.links: dict[tuple[str, str], RegionLink] = {}

    async def __aenter__(self) -> World:
        try:
            await self._start()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def served(self) -> dict[str, Counter[str]]:
        """Return by region how often each request was answered whole by a replica."""
        found: dict[str, Counter[str]] = {name: Counter() for name in REGIONS}
        for name in REGIONS:
            for path in self.folder.glob(f"served-{name}-*"):
                found[name].update(path.read_text().split())
        return found

    def port(self, home: str, name: str) -> int:
        """Return the port at which clients of ``home`` reach the balancer of ``name``."""
        return self.balancers[name].port if home == name else self.links[home, name].port

    async def _start(self) -> None:
        ports = {name: free_port() for name in REGIONS}
        for one in REGIONS:
            for other in REGIONS:
                if one != other:
                    delay_s = round_trip_ms(one, other) / 2000
                    self.links[one, other] = await RegionLink(ports[other], delay_s).start()
        for name in REGIONS:
            self.replicas[name] = [self._replica(name, n) for n in range(_NUM_REPLICAS)]
        await asyncio.gather(*(one.start() for each in self.replicas.values() for one in each))
        for name in REGIONS:
            self.balancers[name] = self._balancer(name, ports[name])
        await asyncio.gather(*(one.start() for one in self.balancers.values()))

    def _stop(self) -> None:
        for process in [*self.balancers.values(), *(o for e in self.replicas.values() for o in e)]:
            process.kill()
        for link in self.links.values():
            link.stop()

    def _replica(self, region: str, number: int) -> Process:
        port, served = free_port(), self.folder / f"served-{region}-{number}"
        command = [sys.executable, str(_REPLICA), str(port), str(served)]
        return Process(command, port, self.folder / f"replica-{region}-{number}.log")

    def _balancer(self, region: str, port: int) -> Process:
        path = self.folder / f"{region}.yaml"
        path.write_text(json.dumps(self._settings(region, port)))
        command = [sys.executable, "-m", "banaserve", "route", "--config", str(path)]
        return Process(command, port, self.folder / f"balancer-{region}.log")

    def _settings(self, region: str, port: int) -> dict[str, Any]:
        def replicas(name: str) -> list[dict[str, str]]:
            return [
                {"url": f"http://127.0.0.1:{one.port}", "id": f"{name}-{number}"}
                for number, one in enumerate(self.replicas[name])
            ]

        return {
            "region": region,
            "port": port,
            "peer_key": "between-us",
            "tenants": [{"key": key, "regions": list(where)} for key, where in KEYS.items()],
            "policy": {"name": "skywalker"},
            "replicas": replicas(region),
            "peers": [
                {"region": other, "url": self.links[region, other].url, "replicas": replicas(other)}
                for other in REGIONS
                if other != region
            ],
            # Longer than a dead region's clients wait for its return: they try elsewhere.
            "limits": {"queue_timeout_s": 5.0},
            "health": {"interval_s": 0.2, "breaker_pause_s": 0.2},
        }
