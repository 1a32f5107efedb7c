"""The store saves from and loads into layers and heads wherever they are."""

from __future__ import annotations

import random
import signal
import types
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.stats import StoreStats

pytestmark = pytest.mark.e2e

ENGINE = "llama, store"
NUM_TOKENS = 24
LAYERS = {"type": "layers", "start": 2, "end": 4}
HEADS = {"type": "heads", "heads": [[0, [1]], [1, [0, 2]], [5, [0, 1, 2]]]}
DEADLINE_S = 60.0


def prompts_about(what: str) -> list[list[int]]:
    """One short and two long prompts, which no other test shares."""
    dice = random.Random(what)
    story = [dice.randrange(5, 2040) for _ in range(420)]
    return [story[:5], story[5:], [*story[5:], *story[:8]]]


def stats(rig: Any) -> StoreStats:
    return fetch_stats(rig.store, DEADLINE_S)


def steps_saved(rig: Any) -> int:
    """Steps whose blocks guests have saved themselves."""
    guests = rig.do("status")["guests"].values()
    return sum(guest.get("steps_saved", 0) for guest in guests)


def move_all(rig: Any) -> Generator[None, None, None]:
    yield from rig.away(LAYERS, rig.guest())
    yield from rig.away(HEADS, rig.guest())


def from_store(rig: Any, prompts: list[list[int]]) -> Any:
    """Run again with nothing cached in the engine; what is read comes out of the store."""
    assert rig.engine.reset_prefix_cache()
    before = stats(rig).hits
    answers = rig.run(prompts, NUM_TOKENS)
    # The two long prompts begin alike, so the second finds them in the engine.
    assert stats(rig).hits - before >= 3, "whole blocks came from the store"
    return answers


@pytest.fixture(autouse=True)
def _home(rig: Any) -> Iterator[None]:
    yield
    rig.reset()


def test_saved_at_home_and_loaded_into_guests(rig: Any) -> None:
    prompts = prompts_about("the Roman Empire")
    expected = rig.run(prompts, NUM_TOKENS)
    assert rig.agrees(from_store(rig, prompts), expected), "at home"
    rig.finish(move_all(rig))
    assert rig.agrees(from_store(rig, prompts), expected), "into guests"


def test_saved_from_guests_and_loaded_at_home(rig: Any) -> None:
    prompts = prompts_about("the city of Venice")
    rig.finish(move_all(rig))
    committed, saved = stats(rig).commits, steps_saved(rig)
    while_away = rig.run(prompts, NUM_TOKENS)
    assert stats(rig).commits > committed
    assert steps_saved(rig) > saved, "the layers' guest has saved them itself"
    assert rig.agrees(from_store(rig, prompts), while_away), "into guests"
    rig.all_home()
    assert rig.agrees(from_store(rig, prompts), while_away), "at home"


def test_what_a_guest_has_saved_outlives_it(rig: Any) -> None:
    prompts = prompts_about("the port of Tyre")
    guest = rig.guest()
    rig.finish(rig.away(LAYERS, guest))
    saved = steps_saved(rig)
    while_away = rig.run(prompts, NUM_TOKENS)
    assert steps_saved(rig) > saved
    rig.kill(guest)
    rig.until(lambda: rig.do("status")["guests"][guest]["state"] == "lost")
    assert rig.do("status")["units"] == []
    assert rig.agrees(from_store(rig, prompts), while_away)


def test_a_guest_that_is_given_up_while_it_saves_is_dead_before_its_slots_are_free(
    rig: Any,
) -> None:
    prompts = prompts_about("the abbey of Cluny")
    expected = rig.run(prompts, NUM_TOKENS, salt="other")
    guest = rig.new_guest()
    rig.finish(rig.away(LAYERS, guest))
    link, lives = rig.host.links[guest], []
    submit, give_up = link.submit, link.give_up

    def stop_and_submit(request: Any, bundle: Any) -> None:
        if request.saves is not None:
            rig.wait_no_longer(guest)
            rig.kill(guest, signal.SIGSTOP)
        submit(request, bundle)

    def give_up_and_look(reason: str) -> Any:
        lost = give_up(reason)
        lives.append(rig.lives(guest))
        return lost

    link.submit, link.give_up = stop_and_submit, give_up_and_look
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert lives == [False], "it stood still with a step's slots in its hands"
    assert rig.do("status")["units"] == []
    assert rig.agrees(from_store(rig, prompts), expected)


def test_where_a_guest_knows_another_life_of_the_store_its_host_saves(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from banaserve.migration.kv import store_copier
    from banaserve.migration.modules import layer_proxy
    from banaserve.migration.rpc.messages import SlotCopies

    def of_another_life() -> SlotCopies | None:
        found = store_copier.slots_to_fill()
        return found and SlotCopies(found.generation + 1, found.blocks, found.slots)

    prompts = prompts_about("the hills of Rome")
    rig.finish(rig.away(LAYERS, rig.guest()))
    saved, committed = steps_saved(rig), stats(rig).commits
    hooks = types.SimpleNamespace(**{**vars(store_copier), "slots_to_fill": of_another_life})
    monkeypatch.setattr(layer_proxy, "store_copier", hooks)
    while_away = rig.run(prompts, NUM_TOKENS)
    assert steps_saved(rig) == saved
    assert stats(rig).commits > committed
    rig.all_home()
    assert rig.agrees(from_store(rig, prompts), while_away)


def test_blocks_loaded_during_a_move_are_copied_again(rig: Any, let_pass: Any) -> None:
    prompts = prompts_about("the kingdom of Siam")
    expected = rig.run(prompts, NUM_TOKENS)
    assert rig.engine.reset_prefix_cache()
    move_id, guest = rig.new_move(), rig.guest()
    rig.do("prepare", move_id, LAYERS, guest)
    rig.finish(rig.wait(move_id, "prepared"))
    rig.do("precopy", move_id)
    rig.finish(rig.wait(move_id, "copied"))

    def commit() -> Generator[None, None, None]:
        yield from let_pass(1)
        rig.do("commit", move_id)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, commit()), expected)


def test_what_a_lost_guest_spoiled_never_reaches_the_store(rig: Any, let_pass: Any) -> None:
    prompts = prompts_about("the island of Crete")
    others = prompts_about("the town of Delft")
    expected, expected_others = rig.run(prompts, NUM_TOKENS), rig.run(others, NUM_TOKENS)
    fresh = [[*prompt[:200], 17, *prompt[200:]] for prompt in others]
    for modules in (LAYERS, HEADS):
        guest = rig.guest()

        def lose(modules: Any = modules, guest: str = guest) -> Generator[None, None, None]:
            yield from rig.away(modules, guest)
            yield from let_pass(2)
            rig.kill(guest)

        assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    # Prefill steps save blocks; one of them is spoiled.
    guest = rig.guest()
    rig.finish(rig.away(LAYERS, guest))

    def lose_in_prefill() -> Generator[None, None, None]:
        yield from let_pass(1)
        rig.kill(guest)

    spoiled = rig.run(fresh, NUM_TOKENS, lose_in_prefill())
    assert rig.agrees(from_store(rig, fresh), spoiled)
    assert rig.agrees(from_store(rig, others), expected_others)
