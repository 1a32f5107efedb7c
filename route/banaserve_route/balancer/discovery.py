"""Replicas by the name of a service: each address of it is a replica.

``dns+http://NAME:PORT`` is for names with an address for each server, such as headless services of
Kubernetes; ``k8s+http://SERVICE.NAMESPACE:PORT`` asks the API of Kubernetes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping

from msgspec import structs

from banaserve.base.errors import UserError
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import BalancerSettings, Endpoint, ReplicaSettings
from banaserve_route.balancer.kubernetes import EndpointSlices
from banaserve_route.balancer.targets.health import run_periodically

LOOK_S = 5.0
"""Time between two lookups of a name, in seconds."""
_ANSWER_S = 5.0
_MAX_ADDRESSES = 256
_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)

Resolve = Callable[[str, int], Awaitable[list[str] | None]]
"""Function that returns the addresses of a host and port; None if the lookup has failed."""


async def resolve(host: str, port: int) -> list[str] | None:
    """Return the addresses of a name, sorted; None if the lookup fails for now."""
    look = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(look, _ANSWER_S)
    except socket.gaierror as error:
        return [] if error.errno in _NO_ADDRESS else None
    except (OSError, TimeoutError):
        return None
    return sorted({str(address[0]) for *_, address in found})[:_MAX_ADDRESSES]


LOOKUPS: Mapping[str, Resolve] = {"dns": resolve, "k8s": EndpointSlices()}
"""Resolvers by the beginning of a URL."""


class Discovery:
    """Settings of a balancer with the addresses of each name in place of the name.

    A lookup that fails changes nothing: replicas that are gone are found by their probes. A name
    without an address has no replicas.

    Args:
        settings: Settings as they were given, perhaps with names.
        lookups: Resolvers by the beginning of a URL.
    """

    def __init__(
        self,
        settings: BalancerSettings,
        log: Callable[[str], None],
        lookups: Mapping[str, Resolve] = LOOKUPS,
    ) -> None:
        self._given, self._log, self._lookups = settings, log, lookups
        self._found: dict[str, list[str]] = {}
        self._problems: dict[str, str] = {}

    @property
    def settings(self) -> BalancerSettings:
        """Return the settings with the addresses that were found last."""
        replicas = [each for one in self._given.replicas for each in self._each(one)]
        return structs.replace(self._given, replicas=tuple(replicas))

    def _each(self, one: ReplicaSettings) -> Iterator[ReplicaSettings]:
        if not one.is_name:
            yield one
            return
        for host in self._found.get(one.url, ()):
            yield structs.replace(one, url=Endpoint(host, one.endpoint.port).url)

    async def look(self) -> bool:
        """Look up every name; return whether an address has come or gone."""
        before = dict(self._found)
        services = [one for one in self._given.replicas if one.is_name]
        answers = await asyncio.gather(*map(self._ask, services))
        for name, found in zip((one.url for one in services), answers, strict=True):
            if isinstance(found, list):
                self._found[name] = found
                problem = "" if found else f"{name} has no address"
            else:
                problem = f"{found}; going on with the addresses as before"
            if problem and problem != self._problems.get(name):
                self._log(problem)
            self._problems[name] = problem
        return self._found != before

    async def _ask(self, one: ReplicaSettings) -> list[str] | str:
        """Return the addresses of a service, or why they cannot be looked up."""
        service = one.endpoint
        try:
            found = await self._lookups[one.lookup](service.host, service.port)
        except UserError as error:
            return f"{one.url}: {error}"
        return f"{service.host} cannot be looked up" if found is None else found

    async def take(self, settings: BalancerSettings, balancer: Balancer) -> None:
        """Apply settings that were given anew.

        Raises:
            UserError: The settings are invalid, or need a restart; nothing is changed.
        """
        before, self._given = self._given, settings
        try:
            await self.look()
            balancer.change(self.settings)
        except UserError:
            self._given = before
            raise

    async def follow(self, balancer: Balancer) -> None:
        """Look up the names again and again, and apply what has changed."""

        async def look() -> None:
            if not await self.look():
                return
            try:
                balancer.change(self.settings)
            except UserError as error:
                self._log(f"{error}; going on as before")
            else:
                self._log(f"addresses of services have changed: {len(balancer.targets)} targets")

        await run_periodically(look, LOOK_S, self._log, "looking up replicas")
