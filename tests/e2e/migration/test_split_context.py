"""Older blocks of some layers in a guest: tokens and logprobs do not change; greedy, float32."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from banaserve import models

pytestmark = pytest.mark.e2e

NUM_TOKENS = 24
BLOCK_SIZE = 32
NUM_BLOCKS = 38
CONTEXT = {"type": "context", "start": 5, "end": 12}
STORY = "The history of the Roman Empire began " + "and then the empire grew larger. " * 40
TEXTS = (
    "The capital of France is",
    STORY,
    STORY + "In the end it was very large.",
    "Once upon a time there was a little girl who " + "walked and walked and " * 16,
)
OTHER_TEXTS = (
    "Stories of the sea: " + "a ship sailed from one harbour to the next. " * 50,
    "Stories of the wood: " + "a fox ran from one tree to the next. " * 50,
    "Stories of the hills: " + "a goat climbed from one rock to the next. " * 50,
)


@pytest.fixture(scope="module")
def rig(one_rig: Any, engine_arguments: Any, store: Path) -> Iterator[Any]:
    transfer = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "banaserve.engine.vllm.kv_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(store), "cost_gate": False},
    }
    model = models.resolve(models.PACKAGED, None, print).path_or_id
    sizes = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS}
    sizes["max_model_len"] = 1024
    arguments = engine_arguments(model, {"stall_s": 0.5}, kv_transfer_config=transfer, **sizes)
    with one_rig(arguments) as rig:
        yield rig


def tokens_of(rig: Any, texts: tuple[str, ...]) -> list[list[int]]:
    tokenizer = rig.llm.get_tokenizer()
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def prompts(rig: Any) -> list[list[int]]:
    return tokens_of(rig, TEXTS)


@pytest.fixture(scope="module")
def others(rig: Any) -> list[list[int]]:
    """All three fit into the pool, but not with all that they answer."""
    prompts = [tokens[: 12 * BLOCK_SIZE - 4] for tokens in tokens_of(rig, OTHER_TEXTS)]
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
    rig.all_home()


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
    assert rig.do("usage", other)["num_runs"] > 0
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
    assert facts["predicted_bytes"] == 7 * left * page_bytes
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
        ({"type": "context", "start": 7, "end": 8}, "layer 7"),
        ({"type": "layers", "start": 11, "end": 13}, "layer 11"),
        ({"type": "heads", "heads": [[5, [1]]]}, "layer 5"),
        ({"type": "context", "start": 29, "end": 31}, "within 0:30"),
    ],
)
def test_what_cannot_move_is_refused(rig: Any, modules: dict[str, Any], why: str) -> None:
    guest = rig.guest()
    rig.finish(rig.away(CONTEXT, guest))
    reply = rig.ask("prepare", rig.new_move(), modules, guest)
    assert why in reply["error"], reply
