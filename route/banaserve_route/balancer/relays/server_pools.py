"""Connections of a relay to the servers that it is told of."""

from __future__ import annotations

from collections.abc import Callable

from banaserve.base.net.tls import Certificates, ClientTls
from banaserve_route.balancer.config import BalancerSettings, parse_endpoint
from banaserve_route.balancer.http.replica_connection import ConnectionPool


class ServerPools:
    """Pools of connections by the URL of their server."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._settings = BalancerSettings()
        self._pools: dict[str, ConnectionPool] = {}
        self._tls: Certificates | None = None

    def take_settings(self, settings: BalancerSettings) -> None:
        """Apply ``settings`` from now on."""
        self._settings = settings
        for url, pool in list(self._pools.items()):
            pool.connect_timeout_s = settings.limits.connect_timeout_s
            if not pool.is_open:  # its server may be gone
                self._pools.pop(url).retire()

    def of(self, url: str) -> ConnectionPool:
        """Return the connections to a server."""
        if (pool := self._pools.get(url)) is None:
            endpoint, settings = parse_endpoint(url), self._settings
            if endpoint.is_tls and self._tls is None:
                self._tls = Certificates(ClientTls(settings.replica_ca), self._log)
            pool = ConnectionPool(endpoint, settings.limits.connect_timeout_s, self._tls)
            self._pools[url] = pool
        return pool

    def drop_idle(self) -> None:
        """Close idle connections: there are too few descriptors for new ones."""
        for pool in self._pools.values():
            pool.drop_idle()

    def sweep(self, now_s: float) -> None:
        """Do the periodic work."""
        for pool in self._pools.values():
            pool.sweep(now_s)
        if self._tls is not None:
            self._tls.look()
