"""Older blocks of some layers in a guest: tokens and logprobs do not change; greedy, float32."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ENGINE = "llama, store"
NUM_TOKENS = 24
BLOCK_SIZE = 32
NUM_BLOCKS = 38
CONTEXT = {"type": "context", "start": 1, "end": 4}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short ones, and two long ones that begin alike and share blocks."""
    story = [(13 * i + i * i) % 2000 + 5 for i in range(290)]
    return [story[70:75], story, [*story, *story[20:28]], story[5:100]]


@pytest.fixture(scope="module")
def others() -> list[list[int]]:
    """All three fit into the pool, but not with all that they answer."""
    length = 12 * BLOCK_SIZE - 4
    prompts = [[(17 * i + n * i * i) % 2000 + 5 for i in range(length)] for n in (3, 4, 5)]
    num_blocks = [(len(tokens) + NUM_TOKENS - 1) // BLOCK_SIZE + 1 for tokens in prompts]
    assert 36 <= NUM_BLOCKS - 1 < sum(num_blocks)
    return prompts


@pytest.fixture(scope="module")
def expected_others(rig: Any, others: list[list[int]]) -> Any:
    return rig.run(others, NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]], expected_others: Any) -> Any:
    """Of the same engine before anything has moved, with the long prompts' blocks cached."""
    rig.run(prompts, NUM_TOKENS)
    return rig.run(prompts, NUM_TOKENS)


def num_older(rig: Any) -> int:
    (unit,) = rig.do("status")["units"]
    return int(unit["num_older_blocks"])


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


def test_older_blocks_leave_go_on_and_come_home_in_mid_stream(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    one, other, move_id = rig.guest(), rig.guest(), rig.new_move()
    rig.do("prepare", move_id, CONTEXT, one)
    rig.finish(rig.wait(move_id, "prepared"))

    def travel() -> Generator[None, None, None]:
        yield from let_pass(4)
        rig.do("precopy", move_id)
        yield from rig.wait(move_id, "copied")
        rig.do("commit", move_id)
        yield from let_pass(4)
        (unit,) = rig.do("status")["units"]
        yield from rig.on(unit["unit_id"], other, gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert rig.num_runs(other) > 0
    assert num_older(rig) > 0
    (unit,) = rig.do("status")["units"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.on(unit["unit_id"], gap=3)), expected)
    assert rig.do("status")["units"] == []
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "after the return"


def test_what_leaves_is_freed_and_a_block_that_is_written_again_is_at_home(
    rig: Any, prompts: list[list[int]], expected: Any, others: Any, expected_others: Any
) -> None:
    rig.finish(rig.away(CONTEXT, rig.guest()))
    left, page_bytes = num_older(rig), rig.do("status")["kv"]["page_bytes"]
    (move,) = [m for m in rig.do("status")["moves"].values() if m["phase"] == "freed"][-1:]
    facts = move["facts"]
    assert facts["predicted_bytes"] == 3 * left * page_bytes
    assert facts["freed_bytes"] >= 0.95 * facts["predicted_bytes"]
    assert rig.do("status")["kv"]["blocks_gained"] == 0
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "older blocks in the guest"
    assert rig.agrees(rig.run(others, NUM_TOKENS), expected_others), "their ids used again"
    assert num_older(rig) < left / 2
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "computed or fetched again"


def test_preempted_requests_begin_again(
    rig: Any, others: list[list[int]], expected_others: Any, let_pass: Any
) -> None:
    preempt, preempted, guest = rig.core.scheduler._preempt_request, [], rig.guest()

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        yield from rig.away(CONTEXT, guest, gap=1)

    assert rig.engine.reset_prefix_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.core.scheduler, "_preempt_request", count)
        assert rig.agrees(rig.run(others, NUM_TOKENS, travel()), expected_others)
    assert preempted


def test_a_guest_that_dies_takes_nothing_along(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    guest, before = rig.guest(), rig.do("status")

    def lose() -> Generator[None, None, None]:
        yield from let_pass(1)
        yield from rig.away(CONTEXT, guest)
        yield from let_pass(2)
        assert num_older(rig) > 0
        rig.kill(guest)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    after = rig.do("status")
    assert after["guests_lost"] == before["guests_lost"] + 1
    assert after["units"] == []


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ({"type": "context", "start": 2, "end": 3}, "layer 2"),
        ({"type": "layers", "start": 3, "end": 5}, "layer 3"),
        ({"type": "heads", "heads": [[1, [1]]]}, "layer 1"),
        ({"type": "context", "start": 5, "end": 7}, "within 0:6"),
    ],
)
def test_what_cannot_move_is_refused(rig: Any, modules: dict[str, Any], why: str) -> None:
    guest = rig.guest()
    rig.finish(rig.away(CONTEXT, guest))
    reply = rig.ask("prepare", rig.new_move(), modules, guest)
    assert why in reply["error"], reply
