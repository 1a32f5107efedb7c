"""What clients and the nemesis have seen of a run, and what of it breaks the promises. Pure.

A request ends exactly once, in an answer or in an error that the server has said; the tokens of an
answer are those of a run without faults, those of an error the first of them; who asks first with
a salt finds no block of another's; a request that meets
no fault ends in an answer, and so does one that was under way when the server was told to end; and
after each fault the server is ready again in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_ON_ITS_WAY_S = 1.0
"""After which a request has reached the server."""


@dataclass
class Asked:
    """One request, as its client has seen it.

    Attributes:
        kind: Of those whose right tokens are known.
        began_s, ended_s: On the clock of the history; None where no end was seen.
        tokens: In the order of their coming.
        num_finished: Events that said that the answer is complete.
        num_done: Last lines of the stream.
        errors: Said by the server: a status, or an event in the stream.
        broken: How the connection failed; empty where it did not.
        num_late_tokens: Tokens behind an end.
        is_first: Nobody has asked with this salt before.
        cached_tokens: Of its prompt, which were found and not computed.
    """

    id: str
    kind: str
    began_s: float
    ended_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    num_finished: int = 0
    num_done: int = 0
    errors: list[str] = field(default_factory=list)
    broken: str = ""
    num_late_tokens: int = 0
    is_first: bool = False
    cached_tokens: int = 0

    @property
    def has_answer(self) -> bool:
        return self.num_finished == 1 and not self.errors and not self.broken


@dataclass
class Fault:
    """One thing done to the server.

    Attributes:
        name: What, and to which process.
        at_s: When it began.
        over_s: When the nemesis itself had ended it, such as a process that it let go on.
        ready_s: When the server was first seen to be whole again; None where it never was.
        cuts: Whether connections end with it: clients talk to the process that was killed.
        drains: Whether what was under way is to be answered nevertheless.
    """

    name: str
    at_s: float
    over_s: float | None = None
    ready_s: float | None = None
    cuts: bool = False
    drains: bool = False


@dataclass
class History:
    """Of one run."""

    requests: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def violations(
    history: History, expected: Mapping[str, Sequence[int]], ready_within_s: float
) -> list[str]:
    """One line for each promise that was not kept; none where all were.

    Args:
        expected: The right tokens of each kind of request.
        ready_within_s: From the end of a fault.
    """
    found = [line for one in history.requests for line in _of_request(one, expected, history)]
    found += [line for one in history.faults for line in _of_fault(one, ready_within_s)]
    if not any(one.has_answer for one in history.requests):
        found.append("no request was answered")
    return found


def met(one: Asked, history: History) -> str:
    """The last fault that was there while ``one`` was under way; empty where none was."""
    names = [fault.name for fault in history.faults if _meets(one, fault)]
    return names[-1] if names else ""


def _of_request(
    one: Asked, expected: Mapping[str, Sequence[int]], history: History
) -> Iterator[str]:
    if one.ended_s is None:
        yield f"request {one.id} has not ended"
        return
    right = list(expected[one.kind])
    if one.broken:
        if not any(fault.cuts and _meets(one, fault) for fault in history.faults):
            yield f"request {one.id} lost its connection: {one.broken}"
        elif one.tokens != right[: len(one.tokens)]:
            yield f"request {one.id} ({one.kind}) has other tokens: {one.tokens}, not {right}"
        return
    num_ends = one.num_finished + len(one.errors)
    if num_ends != 1:
        yield f"request {one.id} ended {num_ends} times"
    if one.num_done > 1 or (one.num_finished and not one.num_done):
        yield f"request {one.id} has {one.num_done} last lines"
    if one.num_late_tokens:
        yield f"request {one.id} got {one.num_late_tokens} tokens behind its end"
    if one.tokens != (right if one.has_answer else right[: len(one.tokens)]):
        yield f"request {one.id} ({one.kind}) has other tokens: {one.tokens}, not {right}"
    if one.errors and not any(_meets(one, fault) for fault in history.faults):
        yield f"request {one.id} failed without a fault: {one.errors[0]}"
    # Under a fault a prompt may be computed twice, and finds then what it has left itself.
    if one.is_first and one.cached_tokens and not met(one, history):
        yield f"request {one.id} has found {one.cached_tokens} tokens of another salt"
    if one.errors and any(_is_drained(one, fault) for fault in history.faults):
        yield f"request {one.id} was under way in a drain and failed: {one.errors[0]}"


def _is_drained(one: Asked, fault: Fault) -> bool:
    assert one.ended_s is not None
    return fault.drains and one.began_s + _ON_ITS_WAY_S <= fault.at_s <= one.ended_s


def _meets(one: Asked, fault: Fault) -> bool:
    """Whether a request was under way while a fault was, or its consequences."""
    assert one.ended_s is not None
    is_before = fault.ready_s is not None and fault.ready_s < one.began_s
    return not is_before and one.ended_s >= fault.at_s


def _of_fault(one: Fault, ready_within_s: float) -> Iterator[str]:
    if one.ready_s is None:
        yield f"the server was not whole again after {one.name}"
        return
    began_s = one.at_s if one.over_s is None else one.over_s
    if one.ready_s - began_s > ready_within_s:
        yield f"the server was whole only {one.ready_s - began_s:.0f} s after {one.name}"
