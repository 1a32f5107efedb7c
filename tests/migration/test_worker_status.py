"""Status of a migration host while threads attach guests to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from banaserve.migration.host import worker_rpc
from banaserve.migration.host.host import MigrationHost
from banaserve.migration.worker_api import GuestLinkStatus, LinkState


class Link:
    """Link of a guest that is attached; while its state is read, another guest is, too."""

    lost = None
    num_saved = 0
    way, lane = "", None
    share = 1.0

    def __init__(self, links: dict[str, Link]) -> None:
        self._links = links

    @property
    def round_trips(self) -> int:
        self._links.setdefault("late", Link(self._links))
        return 0


def test_a_guest_that_is_attached_while_the_status_is_read_is_in_the_next_one() -> None:
    links: dict[str, Link] = {}
    links["early"] = Link(links)
    waiting = {"other": GuestLinkStatus(LinkState.CONNECTING)}
    host = cast(MigrationHost, SimpleNamespace(attaching=waiting, links=links))
    for expected in ({"early"}, {"early", "late"}):
        found = worker_rpc.guests_of(host)
        assert {name for name, told in found.items() if told.state is LinkState.READY} == expected
        assert found["other"].state is LinkState.CONNECTING
