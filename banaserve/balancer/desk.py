"""What a client's connection needs of its balancer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from banaserve.balancer.message import Message, RefusedError

if TYPE_CHECKING:
    from banaserve.balancer.client import Client


class Exchange(Protocol):
    """One request on its way, as its connection sees it."""

    def cancel(self) -> None:
        """The client has gone."""
        ...

    def pause(self) -> None:
        """The client reads more slowly than the answer comes."""
        ...

    def resume(self) -> None: ...


class Desk(Protocol):
    """Who takes the requests.

    Attributes:
        max_body_bytes: Of one request.
    """

    max_body_bytes: int

    def opened(self, client: Client) -> bool:
        """Returns whether another connection may be open."""
        ...

    def closed(self, client: Client) -> None: ...

    def check_head(self, message: Message) -> None:
        """Returns if the body of ``message`` may come.

        Raises:
            RefusedError: It may not.
        """
        ...

    def hold(self, num_bytes: int) -> None:
        """Counts bytes of bodies in memory; a negative number gives them back.

        Raises:
            RefusedError: There is no room for them.
        """
        ...

    def take(self, client: Client, message: Message) -> Exchange | None:
        """Takes a whole request; None where it is answered already."""
        ...

    def refused(self, error: RefusedError) -> None: ...
