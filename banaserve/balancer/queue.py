"""The waiting line: first come, first served among requests that may go to the same places.

When the requests of the line are asked about.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Protocol

from banaserve.orchestrator.replicas.fleet import Fleet

REFUSALS_AT_A_TIME = 64
"""Decisions in vain before the event loop has its turn: a few milliseconds."""


class Waiting(Protocol):
    """A request that waits for a replica.

    Attributes:
        kind: Requests of one kind may go to the same places.
        is_over: It needs no place any more.
        waits_until_s: When waiting has no point any more.
    """

    is_over: bool
    waits_until_s: float

    @property
    def kind(self) -> Hashable: ...

    def place(self) -> bool:
        """Returns whether the request has been sent somewhere, or answered."""
        ...

    def waited_too_long(self) -> None: ...


class RequestQueue:
    """Requests in the order in which they came, a lane for each kind.

    Nobody overtakes within a lane; a lane that waits for one replica does not hold up another.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, OrderedDict[Waiting, None]] = OrderedDict()
        self._to_ask: deque[Hashable] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def is_ahead_of(self, kind: Hashable) -> bool:
        """Returns whether somebody of that kind waits already."""
        return kind in self._lanes

    def join(self, one: Waiting, at_front: bool = False) -> None:
        """Take in a request; ``at_front``: it has waited before."""
        lane = self._lanes.setdefault(one.kind, OrderedDict())
        lane[one] = None
        if at_front:
            lane.move_to_end(one, last=False)
        self._length += 1

    def leave(self, one: Waiting) -> None:
        """Take out a request, if it is there."""
        lane = self._lanes.get(one.kind)
        if lane is None or one not in lane:
            return
        del lane[one]
        self._length -= 1
        if not lane:
            del self._lanes[one.kind]

    def wake(self) -> bool:
        """Place whoever can be placed; called whenever something may have become free.

        Lanes take turns, a request each. Returns whether lanes are left to ask: who waits in vain
        costs a decision, and clients can make as many lanes as there are places in the line.
        """
        self._to_ask = deque(self._lanes)
        return self.go_on()

    def go_on(self) -> bool:
        """Ask further lanes of the last ``wake``; returns whether more are left."""
        num_refused = 0
        while self._to_ask and num_refused < REFUSALS_AT_A_TIME:
            kind = self._to_ask.popleft()
            if (lane := self._lanes.get(kind)) is None:
                continue
            self._lanes.move_to_end(kind)
            first = next(iter(lane))
            if first.is_over or first.place():
                self.leave(first)
                self._to_ask.append(kind)
            else:
                num_refused += 1
        return bool(self._to_ask)

    def sweep(self, now_s: float) -> None:
        """Send away who has waited too long."""
        late = [one for lane in self._lanes.values() for one in lane if one.waits_until_s <= now_s]
        for one in late:
            self.leave(one)
            one.waited_too_long()


class Waker:
    """Looks through the line soon after something may have become free."""

    def __init__(self, line: RequestQueue, fleet: Fleet) -> None:
        self._line, self._fleet = line, fleet
        self._is_awake = self._goes_on = False

    def wake(self) -> None:
        """Look through the line soon; once, however often this is called."""
        if self._line and not self._is_awake:
            self._is_awake = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_awake = False
        self._ask(self._line.wake)

    def _go_on(self) -> None:
        self._goes_on = False
        self._ask(self._line.go_on)

    def _ask(self, ask: Callable[[], bool]) -> None:
        # The one that is asked about does not count.
        self._fleet.queue_length = max(0, len(self._line) - 1)
        is_more = ask()
        self._fleet.queue_length = len(self._line)
        if is_more and not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)
