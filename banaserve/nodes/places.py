"""Places of the agents of nodes: addresses that were given, or where Ray has started them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from banaserve.net.addresses import host_and_port


class AgentPlace(msgspec.Struct, frozen=True):
    """Where an agent listens."""

    host: str
    port: int


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
        return self._places

    async def find(self, number: int) -> AgentPlace:
        return self._places[number]

    async def close(self) -> None:
        """They stay."""
