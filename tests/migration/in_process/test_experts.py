"""Experts of some layers compute in guests, with equal tokens: greedy, float32."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from rig import modules_of

pytestmark = pytest.mark.e2e

ENGINE = "mixtral"
NUM_TOKENS = 24
# The first layer of deepseek_v2 is dense; both have four experts, of which a token gets two.
EXPERTS = {1: (0, 2), 2: (1, 2, 3), 5: (3,)}
OTHERS = {1: (1,), 3: (0, 1, 2, 3)}


def sample(experts: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    """A unit of these experts."""
    return modules_of("experts", experts=experts)


def experts_chosen(rig: Any, counting: bool) -> dict[int, list[int]]:
    """How often each expert was chosen, by layer."""
    reply = rig.do("experts", counting)
    del reply["error"]
    return reply


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v2"])
def family(request: pytest.FixtureRequest) -> str:
    """Without shared experts and with them."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def rig(engines: Any, family: str) -> Iterator[Any]:
    rig = engines.take(family)
    yield rig
    rig.forget()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two short ones, and one of several blocks that a step computes in part."""
    story = [(19 * i + i * i) % 2000 + 5 for i in range(300)]
    return [story[3:8], story, story[40:80]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS)


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


def test_experts_leave_go_on_and_come_home_in_mid_stream(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    one, other = rig.guest(), rig.guest()

    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        yield from rig.away(sample(EXPERTS), one, gap=2)
        yield from rig.away(sample(OTHERS), other, gap=2)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"
    assert all(rig.num_runs(guest) for guest in (one, other))
    units = {unit["guest_id"]: unit["unit_id"] for unit in rig.do("status")["units"]}

    def on_and_home() -> Generator[None, None, None]:
        yield from rig.on(units[one], rig.guest(), gap=2)
        yield from rig.on(units[other], gap=2)
        yield from rig.on(units[one], gap=2)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, on_and_home()), expected)
    assert rig.do("status")["units"] == []
    rig.num_runs(other)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "after the return"
    assert rig.num_runs(other) == 0


def test_two_units_of_one_guest_are_asked_in_turn(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    guest = rig.guest()

    def leave() -> Generator[None, None, None]:
        first, second, third = (rig.new_move() for _ in range(3))
        # One that serves loads no weights, so both are there before either is put to work.
        for move_id, experts in ((first, {1: (0,)}), (second, {1: (3,), 2: (0,)})):
            rig.do("prepare", move_id, sample(experts), guest)
            yield from rig.wait(move_id, "prepared")
        for move_id in (first, second):
            rig.do("commit", move_id)
        rig.do("prepare", third, sample({4: (0,)}), guest)
        assert rig.settled(third) == "failed"
        assert "stand still" in rig.do("status")["moves"][third]["reason"]

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, leave()), expected)
    assert len(rig.do("status")["units"]) == 2
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_streams_go_on_where_a_guest_is_lost(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, number: int
) -> None:
    guest = rig.new_guest()
    before = rig.do("status")

    def lose() -> Generator[None, None, None]:
        yield from rig.away(sample(EXPERTS), guest)
        yield from let_pass(4)
        rig.wait_no_longer(guest)
        rig.kill(guest, number)

    try:
        assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    finally:
        rig.kill(guest)
    after = rig.do("status")
    assert after["units"] == []
    assert after["guests_lost"] == before["guests_lost"] + 1
    assert after["steps_lost"] > before["steps_lost"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "afterwards"
    # The same experts can leave again.
    again = rig.away(sample(EXPERTS), rig.guest())
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, again), expected)


def test_what_routers_choose_is_counted_while_it_is_asked_for(
    rig: Any, family: str, prompts: list[list[int]], expected: Any
) -> None:
    started = experts_chosen(rig, True)
    assert list(started) == ([0, 1, 2, 3, 4, 5] if family == "mixtral" else [1, 2, 3, 4, 5])
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    counted = experts_chosen(rig, False)
    num_tokens = sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts)
    # Blocks that are cached are not computed again.
    totals = {sum(one) - sum(started[layer]) for layer, one in counted.items()}
    assert len(totals) == 1
    assert 0 < totals.pop() <= 2 * num_tokens
    assert any(len(set(one)) > 1 for one in counted.values())
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert sum(map(sum, experts_chosen(rig, False).values())) == 0, "nothing was counted meanwhile"


def test_what_cannot_move_is_refused(rig: Any, family: str) -> None:
    guest = rig.guest()
    wrong = [
        (sample({1: (4,)}), "no expert 4: it has 4"),
        (sample({6: (0,)}), "there is no layer 6"),
        (sample({1: ()}), "no experts of layer 1"),
        (sample({1: (0, 0)}), "named twice"),
        (sample({}), "no experts are named"),
    ]
    if family == "deepseek_v2":
        wrong.append((sample({0: (0,)}), "layer 0 has no experts: its MLP is dense"))
    for modules, why in wrong:
        assert why in rig.ask("prepare", rig.new_move(), modules, guest)["error"]
    rig.do("prepare", (first := rig.new_move()), sample({1: (0,)}), guest)
    layers = {"type": "layers", "start": 1, "end": 3}
    assert "layer 1 belongs to" in rig.ask("prepare", rig.new_move(), layers, guest)["error"]
    assert "expert 0" in rig.ask("prepare", rig.new_move(), sample({1: (0, 1)}), guest)["error"]
    assert rig.settled(first) == "prepared"
    rig.do("abort", first)
