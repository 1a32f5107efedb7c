"""Queue of requests that wait for a target: first come, first served within each kind."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Protocol

from banaserve_route.policies.fleet import Fleet

REFUSALS_AT_A_TIME = 64
"""Maximum number of decisions without a target before the event loop runs again: a few
milliseconds."""


class Waiting(Protocol):
    """Request that waits for a target.

    Attributes:
        kind: Kind of the request; requests of one kind may go to the same targets.
        is_over: True if the request no longer needs a target.
        waits_until_s: Time at which the request stops waiting, in seconds.
    """

    is_over: bool
    waits_until_s: float

    @property
    def kind(self) -> Hashable: ...

    def place(self) -> bool:
        """Try to send the request; return whether it has been sent or answered."""
        ...

    def waited_too_long(self) -> None: ...


class RequestQueue:
    """Requests in order of arrival, in one lane for each kind.

    No request overtakes another within a lane; a lane that waits for a target does not hold up
    other lanes.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, OrderedDict[Waiting, None]] = OrderedDict()
        self._to_ask: deque[Hashable] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def has_waiting(self, kind: Hashable) -> bool:
        """Return whether a request of that kind waits."""
        return kind in self._lanes

    def join(self, one: Waiting, at_front: bool = False) -> None:
        """Add a request, at the front if it has waited before (``at_front``)."""
        lane = self._lanes.setdefault(one.kind, OrderedDict())
        lane[one] = None
        if at_front:
            lane.move_to_end(one, last=False)
        self._length += 1

    def leave(self, one: Waiting) -> None:
        """Remove a request, if it is in the queue."""
        lane = self._lanes.get(one.kind)
        if lane is None or one not in lane:
            return
        del lane[one]
        self._length -= 1
        if not lane:
            del self._lanes[one.kind]

    def start_pass(self) -> bool:
        """Place the requests that can be placed.

        Lanes take turns, with one request each. Return whether lanes are left to ask: each request
        that finds no target costs a decision, and clients can create as many lanes as the queue has
        places.
        """
        self._to_ask = deque(self._lanes)
        return self.continue_pass()

    def continue_pass(self) -> bool:
        """Ask further lanes of the last pass; return whether more are left."""
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
        """Answer the requests that have waited too long."""
        late = [one for lane in self._lanes.values() for one in lane if one.waits_until_s <= now_s]
        for one in late:
            self.leave(one)
            one.waited_too_long()


class QueueScheduler:
    """Scheduler of passes over a queue on the event loop, a bounded part at a time."""

    def __init__(self, queue: RequestQueue, fleet: Fleet) -> None:
        self._queue, self._fleet = queue, fleet
        self._is_scheduled = self._is_continuing = False

    def schedule(self) -> None:
        """Begin a pass soon, because a target may have become free.

        Several calls before the pass begins start one pass only.
        """
        if self._queue and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._is_scheduled = False
        self._run(self._queue.start_pass)

    def _continue(self) -> None:
        self._is_continuing = False
        self._run(self._queue.continue_pass)

    def _run(self, part: Callable[[], bool]) -> None:
        # The request that is being placed does not count.
        self._fleet.queue_length = max(0, len(self._queue) - 1)
        is_more = part()
        self._fleet.queue_length = len(self._queue)
        if is_more and not self._is_continuing:
            self._is_continuing = True
            asyncio.get_running_loop().call_soon(self._continue)
