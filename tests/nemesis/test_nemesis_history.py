"""Histories of a tormented server: which of them break a promise, and which faults are planned."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from faults import Choice, Harm, plan
from history import Asked, Fault, History, violations

EXPECTED = {"k": [1, 2, 3]}
READY_S = 10.0
OTHERS = ("disk", "guest", "route", "link", "server")


def answered(**changed: Any) -> Asked:
    """A request from 100 to 101 s that was answered."""
    asked = Asked("r0", "k", 100.0, 101.0, [1, 2, 3], num_finished=1, num_done=1)
    return dataclasses.replace(asked, **changed)


def failed(**changed: Any) -> Asked:
    """The same request, which the server ended in an error."""
    how = {"tokens": [1], "num_finished": 0, "num_done": 0, "errors": ["HTTP 503"]}
    return answered(**{**how, **changed})


FAULT = Fault("d0 killed", 100.5, 100.5, 105.0)


def found(*requests: Asked, faults: tuple[Fault, ...] = (FAULT,)) -> list[str]:
    history = History([answered(id="well"), *requests], list(faults))
    return violations(history, EXPECTED, READY_S)


@pytest.mark.parametrize(
    "request_",
    [
        answered(),
        failed(),
        failed(tokens=[]),
        failed(num_done=1),
        failed(began_s=104.0, ended_s=200.0),
        answered(began_s=0.0, ended_s=300.0),
    ],
)
def test_a_request_that_keeps_every_promise(request_: Asked) -> None:
    assert found(request_) == []


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (answered(ended_s=None), "has not ended"),
        (answered(tokens=[1, 2]), "other tokens"),
        (answered(tokens=[1, 2, 4]), "other tokens"),
        (answered(tokens=[1, 2, 3, 3]), "other tokens"),
        (failed(tokens=[2]), "other tokens"),
        (answered(num_finished=2), "ended 2 times"),
        (answered(errors=["late"]), "ended 2 times"),
        (answered(num_finished=0), "ended 0 times"),
        (answered(num_done=2), "2 last lines"),
        (answered(num_done=0), "0 last lines"),
        (answered(num_late_tokens=1), "behind its end"),
        (answered(broken="ReadError"), "lost its connection"),
        (failed(began_s=90.0, ended_s=100.4), "failed without a fault"),
        (failed(began_s=105.1, ended_s=106.0), "failed without a fault"),
    ],
)
def test_a_request_that_breaks_a_promise(request_: Asked, why: str) -> None:
    (line,) = found(request_)
    assert why in line
    assert "r0" in line


@pytest.mark.parametrize(
    ("request_", "num_lines"),
    [
        (answered(broken="ReadError", num_finished=0, num_done=0, tokens=[1, 2]), 0),
        (answered(broken="ReadError", num_finished=0, num_done=0, tokens=[2]), 1),
        (answered(broken="ReadError", began_s=106.0, ended_s=107.0), 1),
    ],
)
def test_a_connection_ends_with_the_process_at_its_other_end(
    request_: Asked, num_lines: int
) -> None:
    cut = dataclasses.replace(FAULT, name="route killed", cuts=True)
    assert len(found(request_, faults=(cut,))) == num_lines
    assert len(found(request_, faults=(FAULT,))) == 1


@pytest.mark.parametrize(
    ("request_", "num_lines"),
    [
        (answered(began_s=99.0), 0),
        (failed(began_s=99.0), 1),
        (failed(began_s=100.2), 0),
        (failed(began_s=100.6), 0),
        (failed(began_s=104.0, ended_s=107.0), 0),
    ],
)
def test_what_is_under_way_when_the_server_is_told_to_end_is_answered(
    request_: Asked, num_lines: int
) -> None:
    """What came at that moment or later may be refused."""
    drained = dataclasses.replace(FAULT, name="server told to end", drains=True)
    assert len(found(request_, faults=(drained,))) == num_lines
    assert found(request_, faults=(FAULT,)) == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault("d0 killed", 100.0, 100.0, 110.0), ""),
        (Fault("d0 stopped for a while", 100.0, 120.0, 129.0), ""),
        (Fault("d0 killed", 100.0, 100.0, 110.1), "only 10 s after d0 killed"),
        (Fault("d0 killed", 100.0, None, 111.0), "only 11 s after"),
        (Fault("d0 killed", 100.0, 100.0, None), "not whole again after d0 killed"),
    ],
)
def test_a_server_is_to_be_whole_in_time(fault: Fault, why: str) -> None:
    lines = found(faults=(fault,))
    assert len(lines) == bool(why)
    assert not why or why in lines[0]


def test_who_asks_first_with_a_salt_finds_no_block() -> None:
    first = answered(is_first=True, cached_tokens=128)
    under_way, later = FAULT, Fault("d0 killed", 200.0, 200.0, 205.0)
    assert found(first, faults=(later,)) == ["request r0 has found 128 tokens of another salt"]
    assert found(first, faults=(under_way,)) == []
    assert found(answered(cached_tokens=128), answered(is_first=True), faults=(later,)) == []


def test_a_run_in_which_nothing_was_answered_shows_nothing() -> None:
    assert violations(History(), EXPECTED, READY_S) == ["no request was answered"]
    assert violations(History([failed()], [FAULT]), EXPECTED, READY_S) == [
        "no request was answered"
    ]


def test_a_plan_is_that_of_its_seed_and_meets_every_process() -> None:
    names = ("p0", "d0")

    def first(seed: int, count: int) -> list[Choice]:
        return list(itertools.islice(plan(seed, names, OTHERS), count))

    assert first(1, 50) == first(1, 50) != first(2, 50)
    assert first(3, 1) == [Choice(Harm.KILL, "parent")]
    met = {choice.target for choice in first(4, 60)}
    assert met == {"front", "parent", "kvstore", *OTHERS, *names}
    harms = {target: set() for target in met}
    for choice in first(5, 300):
        harms[choice.target].add(choice.harm)
    assert harms["disk"] == {Harm.FILL, Harm.SLOW}
    assert harms["link"] == {Harm.CUT}
    assert harms["server"] == {Harm.KILL, Harm.END}
    assert harms["front"] == {Harm.PAUSE}
    assert harms["parent"] == harms["d0"] == {Harm.KILL, Harm.STOP, Harm.PAUSE}
