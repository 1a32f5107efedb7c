"""The worker's side over a real store: what one engine saves, another fetches, layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.engine.connector.metadata import (
    BlockCopy,
    ConnectorOptions,
    MappedCopies,
    StepPlan,
    StepResult,
)
from banaserve.engine.connector.worker_side import worker
from banaserve.engine.connector.worker_side.block_copy import make_copier
from banaserve.engine.connector.worker_side.worker import RankShare, StoreConnectorWorker
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.leases import Slot
from layered_engine import (
    BLOCKS,
    FINGERPRINT,
    LAYERS,
    NAMES,
    PAGE_BYTES,
    LayeredEngine,
    LayeredEngines,
    number_blocks,
    numbered,
    started,
)
from waiting import DEADLINE_S, eventually

Engine = LayeredEngine


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("store") / "store.sock"
    process = started(path)
    yield path
    process.terminate()
    assert process.wait(60) == 0


class TwoLives:
    """A store that was killed and started again, and clients: one that knows its first life only,
    one that has followed."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._process = started(path)
        self._stack = stack
        stack.callback(self._end)

    def client(self, name: str) -> StoreClient:
        client = StoreClient(self.path, FINGERPRINT, client_name=name, timeout_s=DEADLINE_S)
        client.connect()
        self._stack.callback(client.close)
        return client

    def engine(self, client: StoreClient, fill: float) -> Engine:
        made = Engine(client, fill, StoreConnectorWorker(client, RankShare()))
        self._stack.callback(made.worker.close)
        return made

    def start_again(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = started(self.path)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[TwoLives]:
    with ExitStack() as stack:
        yield TwoLives(tmp_path / "store.sock", stack)


@pytest.fixture
def engine(socket_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:
        # A salt of its own: no test reads another's blocks.
        yield LayeredEngines(socket_path, request.node.name, stack).make


def test_what_one_engine_saves_another_fetches(engine: Callable[..., Engine]) -> None:
    writer = engine(0.0)
    done = writer.step(saves=writer.reserve(range(4)), compute=number_blocks)
    assert (done.fetched_blocks, done.fetch_s) == (0, 0.0)
    assert done.compute_s is not None
    assert done.compute_s > 0
    reader = engine(-1.0)
    hits = reader.acquire(range(6))
    assert len(hits) == 4
    done = reader.step(loads=hits[:3], early_loads=hits[3:])
    assert done.fetched_blocks == 4
    assert done.fetch_s > 0
    for name, expected in numbered().items():
        assert torch.equal(reader.seen[name][:4], expected[:4])
        assert (reader.seen[name][4:] == -1.0).all()
    counts = reader.worker.stats.take()
    assert counts is not None
    assert counts.data["loaded_bytes"] == 4 * LAYERS * PAGE_BYTES
    assert counts.data["loaded_blocks"] == 4


def test_ranks_that_all_have_the_whole_of_a_block_write_it_once(
    engine: Callable[..., Engine],
) -> None:
    ranks = [engine(0.0, share=RankShare(rank, 2, is_whole=True)) for rank in range(2)]
    reader = engine(-1.0)
    saves = ranks[0].reserve(range(4))
    for rank, one in enumerate(ranks):
        assert reader.acquire(range(4)) == []

        def compute(name: str, cache: torch.Tensor, rank: int = rank) -> None:
            number_blocks(name, cache)
            cache += 1000.0 * rank  # as they never are: so that it shows who has written

        assert one.step(saves=saves, compute=compute).saved_blocks == 4
        counts = one.worker.stats.take()
        assert counts is not None
        own = len(range(rank, LAYERS, 2))
        assert counts.data["saved_bytes"] == 4 * own * PAGE_BYTES
    reader.step(loads=reader.acquire(range(4)))
    for layer, (name, expected) in enumerate(numbered().items()):
        assert torch.equal(reader.seen[name][:4], expected[:4] + 1000.0 * (layer % 2))
    # Each reads all of it, whoever has written it.
    again = ranks[1]
    again.step(loads=again.acquire(range(4)))
    for layer, (name, expected) in enumerate(numbered().items()):
        assert torch.equal(again.seen[name][:4], expected[:4] + 1000.0 * (layer % 2))


def test_a_block_that_the_step_writes_into_is_fetched_before_it_writes(
    engine: Callable[..., Engine],
) -> None:
    writer = engine(0.0)
    writer.step(saves=writer.reserve(range(1)), compute=number_blocks)
    reader = engine(-1.0)

    def write_new_token(name: str, cache: torch.Tensor) -> None:
        cache[0, -1] = 7.0

    reader.step(early_loads=reader.acquire(range(1)), compute=write_new_token)
    for name, expected in numbered().items():
        assert torch.equal(reader.seen[name][0, :-1], expected[0, :-1])
        assert reader.seen[name][0, -1] == 7.0


def test_a_layer_that_reads_the_kv_of_an_earlier_one_has_none_of_its_own(
    engine: Callable[..., Engine],
) -> None:
    """As in Gemma 3n, whose last layers share the KV of earlier ones."""
    writer, reader = engine(0.0), engine(-1.0)

    def run(worker: StoreConnectorWorker, plan: StepPlan) -> None:
        worker.begin_step(plan)
        worker.start_loads()
        for name in (*NAMES, "sharing"):
            worker.wait_for_load(name)
            worker.save_layer(name)
        worker.end_step()

    for name, cache in writer.caches.items():
        number_blocks(name, cache)
    run(writer.worker, StepPlan(1, saves=writer.reserve(range(2))))
    run(reader.worker, StepPlan(1, loads=reader.acquire(range(2))))
    for name, expected in numbered().items():
        assert torch.equal(reader.caches[name][:2], expected[:2])


def test_a_forward_pass_that_did_not_end_publishes_nothing(
    engine: Callable[..., Engine],
) -> None:
    writer = engine(0.0)
    saves = writer.reserve(range(2))
    writer.step(saves=saves, num_layers=LAYERS - 1)
    assert writer.acquire(range(2)) == []
    assert len(writer.reserve(range(2))) == 2


@pytest.mark.parametrize("is_lost", [False, True], ids=["saved", "given up"])
def test_a_layer_that_another_process_has_saved(
    engine: Callable[..., Engine], is_lost: bool
) -> None:
    writer = engine(0.0)
    plan = StepPlan(1, saves=writer.reserve(range(2)))
    worker, elsewhere = writer.worker, NAMES[1]
    worker.begin_step(plan)
    worker.start_loads()
    for layer, name in enumerate(NAMES):
        number_blocks(name, writer.caches[name])
        if name != elsewhere:
            worker.save_layer(name)
        elif not is_lost:
            target = worker.slots_to_fill()
            assert target.view is not None
            for copy in target.copies:
                begin = target.view.offset_bytes(copy.slot, layer)
                block = writer.caches[name][copy.block_id].numpy().view("uint8")
                target.view.memory[begin : begin + PAGE_BYTES] = block
            worker.saved_elsewhere([name], 1e-3)
    worker.end_step()
    reader = engine(-1.0)
    hits = reader.acquire(range(2))
    assert len(hits) == (0 if is_lost else 2)
    counts = worker.stats.take()
    assert counts is not None
    assert counts.data.get("guest_saved_bytes", 0) == len(hits) * PAGE_BYTES
    assert counts.data["saved_bytes"] == 2 * 2 * PAGE_BYTES + len(hits) * PAGE_BYTES
    reader.step(loads=hits)
    for name, expected in numbered().items() if hits else ():
        assert torch.equal(reader.seen[name][:2], expected[:2])


def test_states_are_saved_behind_the_last_layer_and_fetched_before_the_first(
    engine: Callable[..., Engine],
) -> None:
    """In all rows, the last layer's included, which no layer of this engine attends to."""
    writer, reader = engine(0.0), engine(-1.0)
    for one in (writer, reader):
        one.worker.register(NAMES[:-1], list(one.caches.values()), PAGE_BYTES)

    def compute(name: str, cache: torch.Tensor) -> None:
        number_blocks(name, cache)
        number_blocks(NAMES[-1], writer.caches[NAMES[-1]])
        if name == NAMES[-2]:  # the last to run changes the state of the first
            writer.caches[NAMES[0]][1] = 7.0

    result = writer.step(states=writer.reserve(range(2)), compute=compute, num_layers=LAYERS - 1)
    assert result.saved_blocks == 2
    reader.step(early_loads=reader.acquire(range(2)), num_layers=LAYERS - 1)
    for name in NAMES[:-1]:
        assert torch.equal(reader.seen[name][:2], writer.caches[name][:2])
    assert torch.equal(reader.caches[NAMES[-1]][:2], writer.caches[NAMES[-1]][:2])
    assert (reader.seen[NAMES[0]][1] == 7.0).all()


def test_states_behind_lost_blocks_are_not_published(engine: Callable[..., Engine]) -> None:
    one = engine(0.0)
    states = one.reserve(range(1))
    gone = BlockCopy(3, Slot(0, states[0].slot.generation + 1, 1))
    one.step(early_loads=[gone], states=states)
    assert one.acquire(range(1)) == []
    assert one.reserve(range(1)) != []


def test_slots_of_a_store_that_is_gone_are_reported_and_nothing_is_published(
    engine: Callable[..., Engine],
) -> None:
    one = engine(0.0)
    saves = one.reserve(range(1))
    gone = BlockCopy(3, Slot(0, saves[0].slot.generation + 1, 1))
    one.step(loads=[gone], saves=saves)
    assert one.worker.take_failed_blocks() == {3}
    assert one.worker.take_failed_blocks() == set()
    assert one.acquire(range(1)) == []


def test_slots_of_two_lives_of_the_store_are_never_mixed_up(lives: TwoLives) -> None:
    reader = lives.engine(lives.client("reader"), -1.0)
    first = lives.engine(lives.client("first"), 0.0)
    first.step(saves=first.reserve(range(2)), compute=number_blocks)
    early = first.acquire(range(2))
    lives.start_again()
    second = lives.engine(lives.client("second"), 0.0)
    second.step(saves=second.reserve(range(2, 6)), compute=number_blocks)
    late = second.acquire(range(2, 6))
    reader.step(early_loads=early, loads=late)
    failed = reader.worker.take_failed_blocks()
    for name, expected in numbered().items():
        for block in set(range(6)) - failed:
            assert torch.equal(reader.seen[name][block], expected[block])
    assert not failed & set(range(2, 6)), "the present life's blocks can be read"


def test_only_what_was_saved_to_the_present_life_of_the_store_is_committed(lives: TwoLives) -> None:
    writer = lives.engine(lives.client("writer"), 0.0)
    gone = writer.reserve(range(2))
    lives.start_again()
    other = lives.engine(lives.client("other"), 0.0)
    saves = [*gone, *other.reserve(range(2, 4))]
    writer.step(saves=saves, compute=number_blocks)
    reader = lives.engine(lives.client("reader"), -1.0)
    assert reader.acquire(range(2)) == []
    reader.step(loads=reader.acquire(range(2, 4)))
    for name, expected in numbered().items():
        assert torch.equal(reader.seen[name][2:4], expected[2:4])
    assert len(reader.acquire(range(2, 4))) == 2


def test_a_block_of_which_a_layer_could_not_be_saved_is_not_committed(lives: TwoLives) -> None:
    writer = lives.engine(lives.client("writer"), 0.0)
    lives.start_again()
    other = lives.engine(lives.client("other"), 0.0)
    saves = other.reserve(range(1))
    hidden = lives.path.with_name("hidden")
    lives.path.rename(hidden)

    def is_reachable() -> bool:
        try:
            writer.client.view(saves[0].slot.generation)
        except StoreUnavailableError:
            return False
        return True

    def appear_before_the_last_layer(name: str, cache: torch.Tensor) -> None:
        number_blocks(name, cache)
        if name == NAMES[-1]:
            # The saves so far have met a store that is not there.
            for save in writer.worker._step.saves:
                assert save.result(10) is None
            hidden.rename(lives.path)
            eventually(is_reachable)

    writer.step(saves=saves, compute=appear_before_the_last_layer)
    assert other.acquire(range(1)) == []
    assert len(other.reserve(range(1))) == 1, "the slot has come back"


def test_a_step_planned_before_a_failed_fetch_was_known_publishes_nothing(
    engine: Callable[..., Engine],
) -> None:
    one = engine(0.0)
    saves = [one.reserve(range(i, i + 1)) for i in range(3)]
    gone = BlockCopy(3, Slot(0, saves[0][0].slot.generation + 1, 1))
    one.step(loads=[gone], saves=saves[0])
    assert one.worker.take_failed_blocks() == {3}
    one.step(saves=saves[1], settled=0)
    assert one.worker.take_failed_blocks() == set()
    one.step(saves=saves[2], settled=1)
    assert [len(one.acquire(range(i, i + 1))) for i in range(3)] == [0, 0, 1]


def test_a_step_lets_go_of_a_store_that_has_gone(
    lives: TwoLives, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Mock] = []

    def make(*given: Any) -> Mock:
        made.append(Mock(wraps=make_copier(*given), is_synchronous=True, known=given[-1]))
        return made[-1]

    monkeypatch.setattr(worker, "make_copier", make)
    one = lives.engine(lives.client("one"), 0.0)
    assert made[0].known is one.client.view(), "a GPU's copier pins the pool before the first step"
    one.step(saves=one.reserve(range(1)), compute=number_blocks)
    generation = one.client.view().generation
    lives.start_again()
    made[0].close.assert_not_called()
    one.step()
    made[0].close.assert_called_once_with()
    assert one.client.view().generation != generation
    one.step(saves=one.reserve(range(1)), compute=number_blocks)
    assert len(one.acquire(range(1))) == 1


def test_a_step_of_several_workers_is_as_slow_as_the_slowest() -> None:
    one, other = StepResult(4, 0.2, 0.01, 3), StepResult(5, 0.3, 0.02, 3)
    assert one.aggregate(other) == StepResult(4, 0.3, 0.02, 3)
    assert one.aggregate(replace(other, compute_s=None)).compute_s == 0.2


def test_a_cache_whose_blocks_are_scattered_is_refused() -> None:
    scattered = torch.zeros(4, BLOCKS, 256).transpose(0, 1)
    with pytest.raises(ValueError, match="does not keep a block in one run"):
        make_copier([scattered], PAGE_BYTES, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option socket"),
        ({"socket": "s", "throtle": 1}, "unknown option of the store's connector: throtle"),
        ({"socket": "s", "cost_gat": True}, "did you mean cost_gate"),
        ({"socket": "s", "cost_gate": "yes"}, r"Expected `bool`, got `str` - at `\$.cost_gate`"),
        ({"socket": 5}, r"Expected `str`, got `int` - at `\$.socket`"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConnectorOptions.of(options)


def test_options_are_read() -> None:
    read = ConnectorOptions.of({"socket": "s", "cost_gate": False})
    assert read == ConnectorOptions("s", cost_gate=False)


def test_the_store_is_told_of_layers_that_are_saved_and_go_on(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, for the slots that are pushed alone, and each once its bytes are there."""
    writer = engine(0.0)
    saves = writer.reserve(range(3))
    pushed = [copy.slot for copy in saves[:2]]
    told: list[tuple[list[Slot], int, int]] = []

    def note(slots: Sequence[Slot], num_layers: int, part: int = 0) -> None:
        view = writer.client.view()
        for copy in saves[:2]:
            begin = view.offset_bytes(copy.slot, num_layers - 1)
            block = view.memory[begin : begin + PAGE_BYTES].view("float32")
            assert (block == copy.block_id + 100.0 * (num_layers - 1)).all()
        told.append((list(slots), num_layers, part))

    monkeypatch.setattr(writer.client, "note_written", note)
    plan = StepPlan(1, saves=saves, pushed=pushed)
    writer.worker.begin_step(plan)
    writer.worker.start_loads()
    for name in NAMES:
        number_blocks(name, writer.caches[name])
        writer.worker.save_layer(name)
    writer.worker.end_step()
    assert told == [(pushed, number, 0) for number in range(1, LAYERS + 1)]
    told.clear()
    writer.step(saves=writer.reserve(range(3, 4)))
    assert told == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(LAYERS))))
def test_layers_are_told_of_from_the_first_on(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    """A guest's layers are saved elsewhere, and may come in any order."""
    writer = engine(0.0)
    plan = StepPlan(1, saves=writer.reserve(range(1)))
    plan.pushed = [copy.slot for copy in plan.saves]
    told: list[int] = []
    monkeypatch.setattr(
        writer.client, "note_written", lambda slots, num_layers, part: told.append(num_layers)
    )
    worker = writer.worker
    worker.begin_step(plan)
    assert worker.slots_to_fill().view is not None
    seen: set[int] = set()
    for layer in order:
        worker.saved_elsewhere([NAMES[layer]], 1e-3)
        seen.add(layer)
        first = next(n for n in range(LAYERS + 1) if n not in seen)
        assert (told[-1] if told else 0) == first
    assert told == sorted(set(told))
    worker.end_step()


def test_the_numbers_of_a_steps_copies_are_made_once_for_all_layers() -> None:
    view = SimpleNamespace(generation=3)
    copies = MappedCopies(view, [BlockCopy(7, Slot(2, 3, 11)), BlockCopy(5, Slot(9, 3, 12))])  # type: ignore[arg-type]
    assert (copies.block_ids.tolist(), copies.slots.tolist()) == ([7, 5], [2, 9])
    assert copies.block_ids.dtype == copies.slots.dtype == np.int64
    assert copies.block_ids is copies.block_ids
    assert copies.slots is copies.slots
