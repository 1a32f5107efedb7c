"""Attempt to get an answer from one target, counted from its beginning to its end."""

from __future__ import annotations

import re
from time import monotonic

from banaserve_route.balancer.http.exchange import Exchange
from banaserve_route.balancer.http.response import TAIL_BYTES
from banaserve_route.balancer.requests.dispatcher import Dispatcher
from banaserve_route.policies.interface import Request, RoutingDecision

FAULTS = frozenset((502, 503, 504))
"""Statuses that count as the replica's fault. Not 500: one bad request would open every circuit."""

_USAGE = re.compile(rb'"(completion|output|cached|prompt|input)_tokens"\s*:\s*(\d{1,9})')
"""Numbers of tokens of completions and chats; ``output`` and ``input`` are of messages and
responses."""


class UpstreamAttempt:
    """Attempt at one target, counted as sent when it is created, and as ended exactly once.

    Attributes:
        exchange: Request as it was sent; set by the caller, right after the attempt is created.
        flight: Record of the attempt for the policy.
        prompt_tokens: Number of prompt tokens that the answer states; 0 if it states none.
    """

    __slots__ = ("_dispatcher", "_is_on_trial", "exchange", "flight", "prompt_tokens", "target")
    exchange: Exchange

    def __init__(self, dispatcher: Dispatcher, request: Request, decision: RoutingDecision) -> None:
        """``decision`` must have a target."""
        now_s = monotonic()
        self._dispatcher = dispatcher
        self.prompt_tokens = 0
        self.target = dispatcher.target(decision)
        self.flight = dispatcher.fleet.sent(request, decision, now_s)
        self._is_on_trial = self.target.sent(now_s)

    def first_byte(self, now_s: float) -> None:
        """Record that the answer has begun."""
        self._dispatcher.fleet.first_token(self.flight, now_s)

    def answered(self, status: int, now_s: float, last: bytes = b"", num_reads: int = 0) -> None:
        """Record that the answer is complete, or that another attempt follows.

        Args:
            last: End of the answer, which may state its number of tokens.
            num_reads: Number of parts of the answer: about one per token of a stream.
        """
        self.exchange.end()
        if status >= 400:
            self._dispatcher.fleet.failed(self.flight, now_s, is_fault=status in FAULTS)
        else:
            begin = last.rfind(b'"usage"', -TAIL_BYTES)
            usage = dict(_USAGE.findall(last, begin)) if begin >= 0 else {}
            cached = usage.get(b"cached")
            tokens = int(usage.get(b"completion") or usage.get(b"output", num_reads))
            cached_tokens = None if cached is None else int(cached)
            self.prompt_tokens = int(usage.get(b"prompt") or usage.get(b"input", 0))
            self._dispatcher.fleet.finished(self.flight, now_s, tokens, cached_tokens)
        # Last: the target is full or not by the requests that the fleet still counts there.
        self.target.answered(status, status in FAULTS, now_s)
        self.target.record(self.flight, status, now_s)

    def broke(self, is_fault: bool) -> None:
        """Record that the answer will not be complete, and close the attempt's connection.

        Args:
            is_fault: True if the target is at fault, and not, say, a client that went away.
        """
        now_s = monotonic()
        self._dispatcher.fleet.failed(self.flight, now_s, is_fault)
        self.target.broke(is_fault, self._is_on_trial, now_s)
        self.target.record(self.flight, 502 if is_fault else 0, now_s)
        self.drop()

    def drop(self) -> None:
        """Close the connection: its further bytes are of no use."""
        self.exchange.drop()

    def pause(self) -> None:
        self.exchange.pause()

    def resume(self) -> None:
        self.exchange.resume()
