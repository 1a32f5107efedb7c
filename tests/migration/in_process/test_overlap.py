"""Steps cut into parts, on which host and guests compute at once: tokens do not change.

How many parts pay is what a machine is fast at; here every step has as many as it may have.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from banaserve.kvstore.client.admin import fetch_stats
from depth import chosen_seed

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("as_many_parts_as_can_be")]

ENGINE = "llama, store"
NUM_TOKENS = 24
PARTS = 5
FRONT = {"type": "layers", "start": 0, "end": 2}
MIDDLE = {"type": "layers", "start": 2, "end": 4}
BACK = {"type": "layers", "start": 4, "end": 6}
HEADS = {"type": "heads", "heads": [[0, [1]], [1, [0, 2]], [5, [0, 1, 2]]]}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short ones, and long ones that begin alike and share blocks."""
    story = [(7 * i + i * i) % 2000 + 5 for i in range(420)]
    return [story[5:10], story, story[:300], story[100:107], story[30:400], story[:390]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS, salt="expected")


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    rig.do("overlap", PARTS)
    yield
    rig.reset()


_salts = map(str, itertools.count())


def fresh(rig: Any, prompts: list[list[int]], during: Any = None, **sampling: Any) -> Any:
    """Run with nothing cached anywhere."""
    return rig.run(prompts, NUM_TOKENS, during, salt=next(_salts), **sampling)


def cut(rig: Any) -> int:
    count: int = rig.do("status")["overlap"]["steps_cut"]
    return count


@pytest.mark.parametrize("ranges", [[FRONT], [MIDDLE], [BACK], [FRONT, BACK], [MIDDLE, BACK]])
def test_tokens_with_ranges_away(
    rig: Any, prompts: list[list[int]], expected: Any, ranges: list[Any]
) -> None:
    for modules in ranges:
        rig.finish(rig.away(modules, rig.guest()))
    before = cut(rig)
    assert rig.agrees(fresh(rig, prompts), expected)
    assert cut(rig) > before
    overlap = rig.do("status")["overlap"]
    assert overlap["blocker"] == ""
    assert overlap["parts"] > 2 * overlap["steps_cut"]


def test_heads_in_one_guest_and_layers_in_another(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    rig.finish(rig.away(HEADS, rig.guest()))
    rig.finish(rig.away(MIDDLE, rig.guest()))
    before = cut(rig)
    assert rig.agrees(fresh(rig, prompts), expected)
    assert cut(rig) > before


def test_layers_and_heads_in_one_guest_are_waited_for(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    guest = rig.guest()
    rig.finish(rig.away(MIDDLE, guest))
    rig.finish(rig.away(HEADS, guest))
    before = cut(rig)
    assert rig.agrees(fresh(rig, prompts), expected)
    overlap = rig.do("status")["overlap"]
    assert "layers and heads" in overlap["blocker"]
    assert overlap["steps_cut"] == before


def test_switched_and_moved_in_mid_stream(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    one, other = rig.guest(), rig.guest()

    def travel() -> Generator[None, None, None]:
        rig.do("overlap", 1)
        yield from let_pass(1)
        yield from rig.away(BACK, one, gap=1)
        rig.do("overlap", 3)
        yield from let_pass(3)
        rig.do("overlap", 1)
        yield from let_pass(2)
        rig.do("overlap", PARTS)
        (unit,) = rig.do("status")["units"]
        yield from rig.on(unit["unit_id"], other, gap=1)

    before = cut(rig)
    assert rig.agrees(fresh(rig, prompts, travel()), expected)
    assert cut(rig) > before
    rig.do("overlap", 1)
    before = cut(rig)
    assert rig.agrees(fresh(rig, prompts), expected)
    assert cut(rig) == before


def test_preemption_and_aborts(rig: Any, prompts: list[list[int]]) -> None:
    """Each stream begins in four blocks and needs a fifth; there are fewer than five for each."""
    from vllm import SamplingParams

    many = [prompts[1][n : n + 118] for n in range(9)]
    expected = fresh(rig, many)
    rig.finish(rig.away(BACK, rig.guest()))
    preempted = []

    def disturb() -> Generator[None, None, None]:
        for number in range(200):
            if number in (1, 4):
                params = SamplingParams(max_tokens=90, ignore_eos=True)
                prompt = {"prompt_token_ids": prompts[1][number:], "cache_salt": f"x{number}"}
                rig.engine.add_request(f"a{number}-x", prompt, params)
            if number in (2, 9):
                rig.engine.abort_request([f"a{1 if number == 2 else 4}-x"])
            preempted.append(rig.pool().preemptions)
            yield

    assert rig.agrees(fresh(rig, many, disturb()), expected)
    assert max(preempted) > 0


def test_seeded_draws(rig: Any, prompts: list[list[int]]) -> None:
    seeded = {"temperature": 0.8, "seed": 7}
    expected = fresh(rig, prompts, **seeded)
    rig.finish(rig.away(MIDDLE, rig.guest()))
    assert rig.agrees(fresh(rig, prompts, **seeded), expected)


def test_a_guest_dies_with_several_parts_on_the_way(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    guest, survivor = rig.guest(), rig.guest()
    rig.finish(rig.away(MIDDLE, guest))
    rig.finish(rig.away(BACK, survivor))
    before = rig.do("status")
    link = rig.host.links[guest]
    submit = link.submit
    submitted = []

    def submit_and_kill(*args: Any) -> None:
        submit(*args)
        submitted.append(len(link._submitted_s))
        if submitted[-1] == 3:
            rig.kill(guest)

    link.submit = submit_and_kill
    assert rig.agrees(fresh(rig, prompts), expected)
    after = rig.do("status")
    assert max(submitted) >= 3
    assert after["guests_lost"] == before["guests_lost"] + 1
    assert after["steps_lost"] > before["steps_lost"]
    assert [unit["guest_id"] for unit in after["units"]] == [survivor]
    assert rig.agrees(fresh(rig, prompts), expected), "afterwards"


def test_what_was_saved_in_parts_is_read_at_home_and_the_other_way(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    def again(salt: str) -> Any:
        assert rig.engine.reset_prefix_cache()
        before = fetch_stats(rig.store, DEADLINE_S).hits
        answers = rig.run(prompts, NUM_TOKENS, salt=salt)
        assert fetch_stats(rig.store, DEADLINE_S).hits - before >= 3
        return answers

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, salt="home"), expected)
    rig.finish(rig.away(MIDDLE, rig.guest()))
    before = cut(rig)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, salt="parts"), expected)
    assert any(guest.get("steps_saved") for guest in rig.do("status")["guests"].values())
    assert rig.agrees(again("home"), expected), "saved at home, read in parts"
    assert rig.agrees(again("parts"), expected), "saved in parts, read in parts"
    assert cut(rig) > before
    rig.all_home()
    assert rig.agrees(again("parts"), expected), "saved in parts, read at home"


@pytest.mark.parametrize(
    "num_rounds", [4, pytest.param(100, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_random_moves_under_many_streams(
    rig: Any, prompts: list[list[int]], let_pass: Any, num_rounds: int
) -> None:
    many = [prompt[n : n + 60 + 20 * n] for n in range(4) for prompt in prompts[1:5]]
    expected = fresh(rig, many)
    dice = random.Random(chosen_seed(5))
    for _ in range(num_rounds):
        guest = rig.guest()
        start = dice.randrange(0, 5)
        plan = {"type": "layers", "start": start, "end": dice.randrange(start + 1, 6)}

        def travel(plan: Any = plan, guest: str = guest) -> Generator[None, None, None]:
            rig.do("overlap", dice.randint(1, 9))
            yield from let_pass(dice.randrange(6))
            yield from rig.away(plan, guest, free=dice.random() < 0.5, gap=dice.randrange(3))
            rig.do("overlap", dice.randint(1, 9))
            yield from let_pass(dice.randrange(6))
            for unit in rig.do("status")["units"]:
                yield from rig.on(unit["unit_id"], gap=dice.randrange(2))

        assert rig.agrees(fresh(rig, many, travel()), expected), plan
        rig.give_back(guest)


@pytest.mark.parametrize("num_parts", [0, 65, -1])
def test_a_depth_out_of_range_is_refused(rig: Any, num_parts: int) -> None:
    assert "1 to 64 parts" in rig.ask("overlap", num_parts)["error"]
    assert rig.do("status")["overlap"]["max_microbatches"] == PARTS
