"""Distances between the nodes of a server, measured and kept up to date."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from banaserve.base.types import Distance
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.measuring import measured_from
from banaserve.nodes.server.client import NodeClient
from banaserve.serving.monitoring import metrics

logger = logging.getLogger(__name__)
AGAIN_S = 300.0
"""Age at which a link is measured again, in seconds; that takes 0.3 s of the link's bandwidth."""
_LOOK_S = 2.0
_GAUGES = (metrics.NODE_ROUND_TRIP, metrics.NODE_BYTES)

Pair = tuple[str, str]


class NodeWays:
    """Distances between nodes, by the names of the nodes.

    The distance of a link that cannot be measured is unknown, and nothing may be moved over that
    link. A node that has come back at another address has new links.
    """

    def __init__(self, credentials: ClusterCredentials) -> None:
        self._credentials = credentials
        self._measured: dict[Pair, tuple[Distance | None, float]] = {}
        self._measuring = asyncio.Lock()

    def distance(self, source: str, target: str) -> Distance | None:
        """Return the distance of one ordered pair of nodes; None if it is unknown."""
        found, _ = self._measured.get((source, target), (None, 0.0))
        return found

    async def measure_to(self, client: NodeClient, others: Sequence[NodeClient]) -> None:
        """Measure the links between a node that joins and others, in both directions."""
        for source, target in [(client, one) for one in others] + [(one, client) for one in others]:
            async with self._measuring:
                names = (source.name, target.name)
                if self.distance(*names) is None or self._is_due(names):
                    await self._measure(names, source, target)

    async def keep_measuring(self, nodes: Callable[[], Sequence[NodeClient]]) -> None:
        """Measure new links, and all links again every few minutes; one link at a time.

        Args:
            nodes: Function that returns the present nodes.
        """
        while True:
            clients = nodes()
            pairs = {
                (source.name, target.name): (source, target)
                for source, target in itertools.permutations(clients, 2)
                if source.is_ready and target.is_ready
            }
            names = {client.name for client in clients}
            for pair in [pair for pair in self._measured if not names.issuperset(pair)]:
                self._forget(pair)
            for pair, (source, target) in pairs.items():
                async with self._measuring:
                    if self._is_due(pair):
                        await self._measure(pair, source, target)
            await asyncio.sleep(_LOOK_S)

    def _is_due(self, pair: Pair) -> bool:
        _, at_s = self._measured.get(pair, (None, -AGAIN_S))
        return time.monotonic() - at_s >= AGAIN_S

    async def _measure(self, pair: Pair, source: NodeClient, target: NodeClient) -> None:
        way = await measured_from(source.place, target.place, self._credentials)
        if way.problem:
            logger.warning("way from node %s to %s: %s", *pair, way.problem)
            self._forget(pair)
            self._measured[pair] = (None, time.monotonic())
            return
        self._measured[pair] = (Distance(way.round_trip_s, way.bytes_per_s), time.monotonic())
        for gauge, value in zip(_GAUGES, (way.round_trip_s, way.bytes_per_s), strict=True):
            gauge.labels(*pair).set(value)

    def _forget(self, pair: Pair) -> None:
        found, _ = self._measured.pop(pair, (None, 0.0))
        if found is not None:
            for gauge in _GAUGES:
                gauge.remove(*pair)
