"""What the balancer answers itself: probes, metrics, and its state for the others."""

from __future__ import annotations

from typing import Protocol

from banaserve.balancer import answers
from banaserve.balancer.line import Line
from banaserve.balancer.message import Message
from banaserve.balancer.metrics import Metrics
from banaserve.balancer.peers import PREFIXES_PATH, STATE_PATH, encode_state
from banaserve.balancer.roster import Roster
from banaserve.orchestrator.replicas.peer_prefixes import PeerPrefixes


class House(Protocol):
    """The balancer, as far as it tells of itself.

    Attributes:
        prefixes: What it tells peers of its replicas' caches; None where the policy uses none.
    """

    line: Line
    metrics: Metrics
    prefixes: PeerPrefixes | None
    roster: Roster

    @property
    def is_ready(self) -> bool: ...


def own_answer(house: House, message: Message, closes: bool) -> bytes:
    """Returns the whole answer to ``message``, whose path is one of ours."""
    if message.method == b"HEAD":
        head, end, _ = _answer_get(house, message, closes).partition(b"\r\n\r\n")
        return head + end
    if message.method != b"GET":
        return answers.error(405, "GET only", closes=closes)
    return _answer_get(house, message, closes)


def _answer_get(house: House, message: Message, closes: bool) -> bytes:
    if message.path == b"/metrics":
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        return answers.answer(200, kind, house.metrics.page(), closes)
    if message.path == STATE_PATH:
        state = encode_state(house.roster.state(len(house.line)))
        return answers.answer(200, b"application/json", state, closes)
    if message.path == PREFIXES_PATH:
        if house.prefixes is None:
            return answers.error(404, "prefixes are not told here", closes=closes)
        kind = b"application/octet-stream"
        return answers.answer(200, kind, house.prefixes.snapshot(), closes)
    if message.path == b"/ready" and not house.is_ready:
        return answers.error(503, "no replica is available", closes=closes, retry_after_s=1.0)
    return answers.answer(200, b"application/json", b"{}", closes)
