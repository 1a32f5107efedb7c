"""Queue of requests without a target: first come, first served among those of one kind."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Protocol

from banaserve.orchestrator.replicas.fleet import Fleet

REFUSALS_AT_A_TIME = 64
"""Decisions in vain before the event loop has its turn: a few milliseconds."""


class Waiting(Protocol):
    """A request that waits for a target.

    Attributes:
        kind: Requests of one kind may go to the same targets.
        is_over: It needs no target any more.
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

    No request overtakes within a lane; a lane that waits for one target does not hold up another.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, OrderedDict[Waiting, None]] = OrderedDict()
        self._to_ask: deque[Hashable] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def has_waiting(self, kind: Hashable) -> bool:
        """Returns whether a request of that kind waits."""
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

    def start_pass(self) -> bool:
        """Place the requests that can be placed.

        Lanes take turns, a request each. Returns whether lanes are left to ask: a request that
        waits in vain costs a decision, and clients can make as many lanes as the queue has places.
        """
        self._to_ask = deque(self._lanes)
        return self.continue_pass()

    def continue_pass(self) -> bool:
        """Ask further lanes of the last pass; returns whether more are left."""
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
    """Passes over a queue on the event loop, a bounded part at a time."""

    def __init__(self, queue: RequestQueue, fleet: Fleet) -> None:
        self._queue, self._fleet = queue, fleet
        self._is_scheduled = self._is_continuing = False

    def schedule(self) -> None:
        """Begin a pass soon, because a target may have become free.

        One pass begins, however often this is called before.
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
        # The request that is asked about does not count.
        self._fleet.queue_length = max(0, len(self._queue) - 1)
        is_more = part()
        self._fleet.queue_length = len(self._queue)
        if is_more and not self._is_continuing:
            self._is_continuing = True
            asyncio.get_running_loop().call_soon(self._continue)
