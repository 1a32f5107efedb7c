"""One request on its way to one target."""

from __future__ import annotations

import asyncio
import re
from time import monotonic

from banaserve.balancer.office import Office
from banaserve.balancer.upstream import Sink, Upstream
from banaserve.orchestrator.replicas.interface import Decision, Request

FAULTS = frozenset((502, 503, 504))
"""Answers that speak against the replica. Not 500: one bad request would open every circuit."""

_USAGE = re.compile(rb'"(completion_tokens|cached_tokens)"\s*:\s*(\d{1,9})')
_TAIL_BYTES = 4096


class Attempt:
    """Counted as sent when it is made, and as ended exactly once.

    Attributes:
        flight: What the policy is told of it.
    """

    __slots__ = ("_connecting", "_office", "_upstream", "flight", "is_over", "target")

    def __init__(self, office: Office, request: Request, decision: Decision) -> None:
        """``decision`` has a target."""
        assert decision.target is not None
        now_s = monotonic()
        self._office = office
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.is_over = False
        self.target = office.targets[decision.target]
        self.flight = office.fleet.sent(request, decision, now_s)
        self.target.sent(now_s)

    def start(self, parts: list[bytes], sink: Sink, to_head: bool) -> None:
        """Send the request, on an idle connection or on a fresh one."""
        upstream = self.target.pool.take()
        if upstream is not None:
            self._upstream = upstream
            upstream.send(parts, sink, to_head)
            return
        connecting = self._connect(parts, sink, to_head)
        self._connecting = asyncio.get_running_loop().create_task(connecting)

    async def _connect(self, parts: list[bytes], sink: Sink, to_head: bool) -> None:
        try:
            upstream = await self.target.pool.connect()
        except OSError as error:
            if not self.is_over:
                why = "timed out" if isinstance(error, TimeoutError) else error.strerror or "failed"
                sink.on_broken(f"cannot connect ({why.lower()})", was_reused=False)
            return
        if self.is_over:
            self.target.pool.give_back(upstream)
        else:
            self._upstream = upstream
            upstream.send(parts, sink, to_head)

    def first_byte(self, now_s: float) -> None:
        """The answer has begun."""
        self._office.fleet.first_token(self.flight, now_s)

    def answered(self, status: int, now_s: float, last: bytes = b"", num_reads: int = 0) -> None:
        """The answer is complete, or another one is wanted.

        Args:
            last: Its last bytes, which may say how many tokens it had.
            num_reads: In how many parts it came: about one a token of a stream.
        """
        self._end()
        self.target.answered(status, status in FAULTS, now_s)
        if status >= 400:
            self._office.fleet.failed(self.flight, now_s, is_fault=status in FAULTS)
            return
        usage = dict(_USAGE.findall(last[-_TAIL_BYTES:]))
        cached = usage.get(b"cached_tokens")
        tokens = int(usage.get(b"completion_tokens", num_reads))
        cached_tokens = None if cached is None else int(cached)
        self._office.fleet.finished(self.flight, now_s, tokens, cached_tokens)

    def broke(self, is_fault: bool) -> None:
        """There will be no whole answer; a connection under way is closed.

        Args:
            is_fault: It says something of the target: not a client that went away.
        """
        now_s = monotonic()
        self._office.fleet.failed(self.flight, now_s, is_fault)
        self.target.broke(is_fault, now_s)
        self.drop()

    def drop(self) -> None:
        """Close the connection: what else comes on it is of no use."""
        upstream = self._upstream
        if self._connecting is not None:
            self._connecting.cancel()
        self._end()
        if upstream is not None:
            upstream.abort()

    def _end(self) -> None:
        self.is_over = True
        self._upstream = None

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()
