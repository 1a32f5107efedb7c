"""Viewers of a page: one picture is made for all of them, and none if there are no viewers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from banaserve.base.clock import Clock
from banaserve.contracts.control_api import DecisionRecord
from banaserve.frontdoor.page.records import PageSnapshot
from banaserve.frontdoor.page.snapshot import Mark, is_open, mark_of

logger = logging.getLogger(__name__)

INTERVAL_S, MOVING_S = 1.0, 0.25
"""Time from one reading to the next, in seconds, and while a move is under way, whose phases take
less than a second."""
MAX_VIEWERS = 32
_END = b"event: end\r\ndata: {}\r\n\r\n"


class PageState(NamedTuple):
    """State of a server at one reading: the snapshot, and the last decisions, the oldest first."""

    snapshot: PageSnapshot
    decisions: list[DecisionRecord]


class SentDecision(NamedTuple):
    """A decision as an event for browsers, and the mark that differs between its states."""

    mark: Mark
    event: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """State of a server as events for browsers.

    Attributes:
        snapshot: Snapshot as a complete event.
        decisions: Decisions by their numbers, ascending.
    """

    snapshot: bytes
    decisions: dict[int, SentDecision]


def event_of(name: str, value: object) -> bytes:
    """Return a server-sent event with ``value`` as JSON, which has no line breaks."""
    return b"event: %b\r\ndata: %b\r\n\r\n" % (name.encode(), msgspec.json.encode(value))


class Viewers:
    """Viewers of a server, whose state is read every second while there is any viewer.

    A viewer has no queue: when it has taken a picture it gets the newest one, and the decisions
    that differ from those it has been sent. A viewer that reads slowly skips pictures; it delays
    no other viewer and takes no memory.

    Args:
        read_state: Reads the server's state.
        interval_s: Maximum time from one reading to the next, in seconds.

    Attributes:
        num_viewers: Number of viewers at present.
    """

    def __init__(
        self,
        read_state: Callable[[], Awaitable[PageState]],
        clock: Clock,
        interval_s: float = INTERVAL_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        self._read_state = read_state
        self._clock = clock
        self._interval_s = interval_s
        self._max_viewers = max_viewers
        self.num_viewers = 0
        self._is_closed = False
        self._picture: Picture | None = None
        self._newer = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Return whether no further viewer is admitted."""
        return self.num_viewers >= self._max_viewers

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events for one viewer until the viewer disconnects or ``close`` is called.

        Each picture is a ``decision`` event for each decision that is new or has changed, followed
        by a ``snapshot`` event.
        """
        sent: dict[int, Mark] = {}
        picture: Picture | None = None
        self._join()
        try:
            while (picture := await self._newer_than(picture)) is not None:
                for number, decision in picture.decisions.items():
                    if sent.get(number) != decision.mark:
                        yield decision.event
                sent = {number: one.mark for number, one in picture.decisions.items()}
                yield picture.snapshot
            yield _END
        finally:
            self._leave()

    def close(self) -> None:
        """End the events of all viewers, and of later viewers at once."""
        self._is_closed = True
        self._newer.set()
        self._stop_reading()

    def _join(self) -> None:
        self.num_viewers += 1
        if self._reading is None and not self._is_closed:
            self._reading = asyncio.create_task(self._keep_reading())

    def _leave(self) -> None:
        self.num_viewers -= 1
        if not self.num_viewers:
            self._stop_reading()
            self._picture = None

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _newer_than(self, last: Picture | None) -> Picture | None:
        """Return the newest picture once it is another than ``last``; None once closed."""
        while not self._is_closed:
            if self._picture is not None and self._picture is not last:
                return self._picture
            await self._newer.wait()
        return None

    async def _keep_reading(self) -> None:
        while True:
            pause_s = self._interval_s
            try:
                state = await self._read_state()
            except Exception:  # the page reports missing updates; the server goes on
                logger.exception("the page could not be drawn")
            else:
                self._show(state)
                if any(is_open(one.state) for one in state.snapshot.moves):
                    pause_s = min(pause_s, MOVING_S)
            await self._clock.sleep(pause_s)

    def _show(self, state: PageState) -> None:
        before = self._picture.decisions if self._picture is not None else {}
        decisions: dict[int, SentDecision] = {}
        for one in state.decisions:
            mark, known = mark_of(one), before.get(one.number)
            if known is None or known.mark != mark:
                known = SentDecision(mark, event_of("decision", one))
            decisions[one.number] = known
        self._picture = Picture(event_of("snapshot", state.snapshot), decisions)
        self._newer.set()
        self._newer = asyncio.Event()
