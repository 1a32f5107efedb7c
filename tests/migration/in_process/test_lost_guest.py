"""A guest that dies or stalls: its modules come home, and streams go on with the same tokens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ENGINE = "llama"
NUM_TOKENS = 40
LAYERS = {"type": "layers", "start": 2, "end": 4}
HEADS = {"type": "heads", "heads": [[0, [1]], [1, [0, 2]], [5, [0, 1, 2]]]}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ENGINE, id="async"),
        pytest.param("llama, synchronous", id="sync", marks=pytest.mark.long),
    ],
)
def rig(request: pytest.FixtureRequest, engines: Any) -> Iterator[Any]:
    rig = engines.take(request.param)
    yield rig
    rig.forget()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two short ones, and two long ones that begin alike and share blocks."""
    story = [(7 * i + i * i) % 2000 + 5 for i in range(420)]
    return [story[5:10], story, story[:300], story[100:107]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS)


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


@pytest.mark.spine
@pytest.mark.parametrize("modules", [LAYERS, HEADS], ids=["layers", "heads"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_streams_go_on(
    rig: Any,
    prompts: list[list[int]],
    expected: Any,
    let_pass: Any,
    modules: dict[str, Any],
    number: int,
) -> None:
    guest = rig.new_guest()
    before = rig.do("status")

    def lose() -> Generator[None, None, None]:
        yield from rig.away(modules, guest)
        yield from let_pass(4)
        rig.wait_no_longer(guest)
        rig.kill(guest, number)

    try:
        assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    finally:
        rig.kill(guest)
    after = rig.do("status")
    assert after["guests_lost"] == before["guests_lost"] + 1
    assert after["steps_lost"] > before["steps_lost"]
    assert after["epoch"] > before["epoch"]
    assert after["units"] == []
    assert after["guests"][guest]["state"] == "lost"
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "afterwards"
    # The same modules can leave again.
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.away(modules, rig.guest())), expected)


def test_a_guest_dies_in_the_middle_of_a_step(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    guest = rig.guest()
    link_of = rig.host.links[guest]
    collect = link_of.collect

    def kill_and_collect(num_tokens: int) -> Any:
        # The request is on its way when the guest is killed: it never answers.
        threading.Thread(target=rig.kill, args=(guest,)).start()
        return collect(num_tokens)

    def lose() -> Generator[None, None, None]:
        yield from rig.away(LAYERS, guest)
        yield from let_pass(3)
        link_of.collect = kill_and_collect

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    rig.until(lambda: rig.do("status")["units"] == [])


def test_a_seeded_stream_goes_on_with_the_same_tokens(
    rig: Any, prompts: list[list[int]], let_pass: Any
) -> None:
    seeded = {"temperature": 0.8, "seed": 7}
    expected = rig.run(prompts, NUM_TOKENS, **seeded)
    guest = rig.guest()

    def lose() -> Generator[None, None, None]:
        yield from rig.away(HEADS, guest)
        yield from let_pass(3)
        rig.kill(guest)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose(), **seeded), expected)


def test_log_probabilities_of_a_prompt_are_computed_again(
    rig: Any, prompts: list[list[int]]
) -> None:
    """The only step of a short prompt is lost."""
    guest = rig.guest()
    expected = prompt_logprobs(rig, prompts[0])
    rig.finish(rig.away(LAYERS, guest))
    rig.kill(guest)
    before = rig.do("status")["steps_lost"]
    found = prompt_logprobs(rig, prompts[0])
    assert rig.do("status")["steps_lost"] > before
    assert len(found) == len(prompts[0]) - 1
    assert found == pytest.approx(expected, abs=2e-4)


def prompt_logprobs(rig: Any, prompt: list[int]) -> list[float]:
    """The log probability of each of its tokens but the first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    (answer,) = rig.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    pairs = zip(answer.prompt_logprobs, prompt, strict=True)
    return [of_token[token].logprob for of_token, token in pairs if of_token is not None]


@pytest.mark.parametrize("last_phase", ["preparing", "prepared", "copied"])
def test_a_target_dies_before_commit_and_the_host_serves_on(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, last_phase: str
) -> None:
    guest, move_id = rig.guest(), rig.new_move()
    before = rig.do("status")["steps_lost"]

    def lose() -> Generator[None, None, None]:
        yield from let_pass(2)
        rig.do("prepare", move_id, LAYERS, guest)
        if last_phase != "preparing":
            yield from rig.wait(move_id, "prepared")
        if last_phase == "copied":
            rig.do("precopy", move_id)
            yield from rig.wait(move_id, "copied")
        rig.kill(guest)
        if last_phase == "preparing":
            assert rig.settled(move_id) == "failed"
        else:
            assert rig.ask("commit", move_id)["error"]
            assert "has failed: guest" in rig.ask("precopy", move_id)["error"]

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    assert rig.phase(move_id) == "failed"
    assert rig.do("status")["steps_lost"] == before, "no step was lost"


def test_a_guest_that_died_while_nothing_ran_is_noticed(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    guest = rig.guest()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.away(LAYERS, guest)), expected)
    rig.kill(guest)
    rig.until(lambda: rig.do("status")["units"] == [])
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)


def test_the_source_dies_on_the_way_to_a_third(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    one, other = rig.guest(), rig.guest()

    def lose() -> Generator[None, None, None]:
        yield from rig.away(LAYERS, one)
        (unit,) = rig.do("status")["units"]
        move_id = rig.new_move()
        rig.do("move_on", move_id, unit["unit_id"], other)
        yield from rig.wait(move_id, "prepared")
        rig.kill(one)
        # Its memory outlives it for a moment: a commit in that moment takes all that it has done.
        replies.append(rig.ask("commit", move_id)["error"])

    replies: list[str] = []
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    units = rig.do("status")["units"]
    assert [unit["guest_id"] for unit in units] == ([] if replies[0] else [other])


def test_a_guest_ends_with_its_host(rig: Any) -> None:
    guest = rig.guest()
    rig.do("detach", guest)
    rig.until(lambda: not rig.lives(guest))
