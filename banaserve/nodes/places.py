"""Places of the agents of nodes: addresses that were given, or where Ray has started them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from banaserve.net.addresses import host_and_port


class AgentPlace(msgspec.Struct, frozen=True):
    """Where an agent listens."""

    host: str
    port: int


class NumberedPlace(NamedTuple):
    """An agent, and the number that ``Places.find`` knows it by."""

    number: int
    place: AgentPlace


class Places(Protocol):
    """Agents of nodes."""

    async def open(self, say: Callable[[str], None]) -> list[AgentPlace]:
        """Where they are.

        Raises:
            UserError: They cannot be had.
        """
        ...

    async def find(self, number: int) -> AgentPlace:
        """Where the agent of that number is now: it may have been lost, and be elsewhere.

        Raises:
            UserError: It is nowhere.
        """
        ...

    async def add(self, address: str) -> NumberedPlace:
        """Where the agent of a node that joins is; its number is another's never.

        Args:
            address: As a user names the node.

        Raises:
            UserError: It cannot be had.
        """
        ...

    async def drop(self, number: int) -> None:
        """The agent of that number is needed no more."""
        ...

    async def gained(self) -> list[str]:
        """Nodes that have come since this was asked last, to be added by these names."""
        ...

    async def close(self) -> None:
        """They are needed no more."""
        ...


class GivenPlaces:
    """Agents that somebody else starts, such as Kubernetes.

    Args:
        addresses: ``HOST:PORT`` of each.
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
        """Its agent is whoever's who has started it."""

    async def gained(self) -> list[str]:
        return []

    async def close(self) -> None:
        """They stay."""
