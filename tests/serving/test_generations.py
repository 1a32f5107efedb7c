"""Where requests go while a rolling restart replaces weights, and in which order it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.base.types import InstanceId, Role
from banaserve.serving.instances.generations import (
    can_leave,
    candidates,
    is_lost,
    restart_order,
)
from banaserve.serving.instances.instance import State

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}


def member(name: str, weights: str, *, takes: bool, serves: bool, lives: bool = True) -> Any:
    return SimpleNamespace(
        id=InstanceId(name),
        role=ROLES[name[0]],
        weights=weights,
        settings=SimpleNamespace(number=int(weights == "new")),
        takes_requests=takes,
        is_ready=serves,
        state=State.READY if lives else State.FAILED,
    )


def members(words: str) -> list[Any]:
    """Instances in words: after its weights ``-`` says that one is about to be replaced, ``!`` that
    it is being started, ``?`` that it is given up, and nothing that it takes requests."""
    made = []
    for word in words.split():
        name, _, state = word.partition(":")
        weights = state.rstrip("-!?")
        mark = state.removeprefix(weights)
        serves, lives = mark in ("", "-"), mark != "?"
        made.append(member(name, weights, takes=not mark, serves=serves, lives=lives))
    return made


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("p0:old d0:old", "p0 d0"),
        ("p0:old- p1:old d0:old d1:old", "p1 d0 d1"),
        # Both legs count first, then instances, then the newer weights: one moment of change.
        ("p0:new p1:old d0:old d1:old", "p1 d0 d1"),
        ("p0:new p1:old d0:new! d1:old", "p1 d1"),
        ("p0:new p1:old d0:new d1:old", "p0 d0"),
        ("p0:new p1:old- d0:new d1:old", "p0 d0"),
        ("p0:new p1:new d0:new d1:old-", "p0 p1 d0"),
        ("p0:new p1:old p2:old d0:new d1:old d2:old", "p1 p2 d1 d2"),
        # One of each: what remains does both.
        ("p0:old- d0:old", "d0"),
        ("p0:new! d0:old", "d0"),
        ("p0:new d0:old", "p0"),
        ("p0:new d0:old-", "p0"),
        ("c0:old- ", ""),
        ("c0:new!", ""),
        ("c0:new c1:old", "c0"),
        ("c0:new- c1:old", "c1"),
        # Going back: the old ones are the fewer, then as many.
        ("p0:new p1:old d0:old d1:old-", "p1 d0"),
    ],
)
def test_a_new_request_goes_to_one_generation(state: str, expected: str) -> None:
    assert candidates(members(state)) == set(expected.split())


@pytest.mark.parametrize(
    ("state", "bound", "expected", "lost"),
    [
        ("p0:new p1:old d0:new d1:old", "old", "p1 d1", False),
        ("p0:new p1:old d0:new d1:old", "new", "p0 d0", False),
        ("p0:new p1:new! d0:new d1:old", "old", "d1", False),
        # Where nobody else has its weights it ends where it is.
        ("p0:new d0:old-", "old", "d0", False),
        ("p0:new d0:old!", "old", "", False),
        ("p0:new d0:old?", "old", "", True),
        ("p0:new d0:new!", "old", "", True),
        ("c0:old!", "old", "", False),
        # The restart that is under way may start one of them again.
        ("p0:old? d0:old?", "old", "", False),
    ],
)
def test_a_request_stays_with_the_weights_that_it_has_begun_with(
    state: str, bound: str, expected: str, lost: bool
) -> None:
    known = members(state)
    assert (candidates(known, bound), is_lost(known, bound)) == (set(expected.split()), lost)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("p0:old- p1:old", True),
        ("p0:old- d0:old", True),
        ("p0:old- d0:new", False),
        ("p0:old- d0:old-", False),
        ("p0:old- d0:old!", False),
        ("c0:old-", False),
    ],
)
def test_streams_leave_at_once_where_another_has_their_weights(state: str, expected: bool) -> None:
    leaving, *_ = known = members(state)
    assert can_leave(leaving, known) is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("p0:w p1:w d0:w d1:w", "p0 d0 p1 d1"),
        ("p0:w d0:w d1:w d2:w", "p0 d0 d1 d2"),
        ("c0:w c1:w", "c0 c1"),
        ("c0:w d0:w p0:w p1:w", "p0 d0 c0 p1"),
    ],
)
def test_roles_are_restarted_in_turn(state: str, expected: str) -> None:
    assert restart_order(members(state)) == expected.split()


@pytest.mark.parametrize("state", ["p0:old p1:old d0:old d1:old", "p0:old p1:old p2:old d0:old"])
def test_new_requests_change_weights_once_in_a_restart(state: str) -> None:
    """Whatever is sent to whichever instance, there is always one that takes it."""
    known = {one.id: one for one in members(state)}
    served = []
    for name in restart_order(known.values()):
        for mark, weights in ((False, "old"), (False, "new"), (True, "new")):
            known[name] = member(name, weights, takes=mark, serves=mark)
            chosen = candidates(known.values())
            served.append({known[one].weights for one in chosen})
    assert all(len(one) == 1 for one in served)
    order = [one.pop() for one in served]
    assert order == sorted(order, reverse=True)
    assert (order[0], order[-1]) == ("old", "new")
