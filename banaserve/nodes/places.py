"""Places of the agents of nodes: addresses given by the user, or agents started by Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.net.addresses import host_and_port, written
from banaserve.nodes.credentials import check_key


class AgentPlace(msgspec.Struct, frozen=True):
    """Address at which an agent listens."""

    host: str
    port: int

    @property
    def name(self) -> str:
        """Display name of the node, ``HOST:PORT``."""
        return written(self.host, self.port)


class NumberedPlace(NamedTuple):
    """Place of an agent, and the number by which ``Places.find`` finds the agent again."""

    number: int
    place: AgentPlace


class Places(Protocol):
    """Source of the agents of nodes."""

    async def open(self, say: Callable[[str], None]) -> list[AgentPlace]:
        """Return the places of all agents.

        Raises:
            UserError: The agents are not available.
        """
        ...

    async def find(self, number: int) -> AgentPlace:
        """Return the present place of an agent, which may have been lost and started elsewhere.

        Raises:
            UserError: The agent runs nowhere.
        """
        ...

    async def add(self, address: str) -> NumberedPlace:
        """Return the place of a joining node's agent; no other agent ever gets its number.

        Args:
            address: Address of the node, as given by the user.

        Raises:
            UserError: The agent is not available.
        """
        ...

    async def drop(self, number: int) -> None:
        """Release an agent that is no longer needed."""
        ...

    async def gained(self) -> list[str]:
        """Return the names of nodes that have appeared since the last call; ``add`` takes them."""
        ...

    async def close(self) -> None:
        """Release all agents."""
        ...


def check_places(config: ServeConfig) -> None:
    """Check the options of a server that name its nodes.

    Raises:
        UserError: An address is invalid or given twice, addresses and Ray are combined, or the key
            is missing or too short.
    """
    GivenPlaces(config.nodes)
    if len(set(config.nodes)) < len(config.nodes):
        raise UserError("--node: a node is given twice")
    if config.nodes and config.cluster:
        raise UserError("--node and --cluster exclude each other: Ray starts the nodes' agents")
    if config.nodes:
        check_key(config.cluster_key)


class GivenPlaces:
    """Agents that are started externally, for example by Kubernetes.

    Args:
        addresses: ``HOST:PORT`` of each agent.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._places = [AgentPlace(*host_and_port("--node", address)) for address in addresses]

    async def open(self, say: Callable[[str], None]) -> list[AgentPlace]:
        return list(self._places)

    async def find(self, number: int) -> AgentPlace:
        return self._places[number]

    async def add(self, address: str) -> NumberedPlace:
        place = AgentPlace(*host_and_port("node", address))
        self._places.append(place)
        return NumberedPlace(len(self._places) - 1, place)

    async def drop(self, number: int) -> None:
        """Do nothing: the agent belongs to the external system that started it."""

    async def gained(self) -> list[str]:
        return []

    async def close(self) -> None:
        """Do nothing: the agents keep running."""
