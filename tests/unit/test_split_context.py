"""A sequence whose older blocks lie elsewhere: what is where, and that the parts make the whole."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from banaserve.engine.vllm.migration import kv_pages, messages
from banaserve.engine.vllm.migration.away_blocks import AwayBlocks
from banaserve.engine.vllm.migration.context_attention import ContextAttention
from banaserve.engine.vllm.migration.context_plan import ContextPlan, split_context
from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.kv_pages import KvPages, attend
from banaserve.engine.vllm.migration.modules import (
    Context,
    HeadSet,
    LayerRange,
    ModelShape,
    check_shape,
    read_modules,
    write_modules,
)
from banaserve.engine.vllm.migration.older_blocks import OlderBlocks
from banaserve.engine.vllm.migration.parcel import Parcel, from_wire, restore
from banaserve.engine.vllm.migration.step_watch import StepWatch
from banaserve.engine.vllm.migration.units import Residence
from banaserve.engine.vllm.migration.written_blocks import WrittenBlocks
from banaserve.engine.vllm.moves.planner import Away, Go, GoHome, GoOn, plan_move, plan_return
from banaserve.errors import GuestLostError, MigrationError, ProtocolError
from banaserve.kernels.interface import Batch, Heads
from banaserve.kernels.reference import ReferenceKernels
from banaserve.transport.connect import over_unix
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import Message

if not current_platform.is_cpu():
    pytest.skip("pages are those of vLLM on CPU", allow_module_level=True)
current_platform.import_kernels()

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, GROUP, HEAD_SIZE = 24, 32, 2, 3, 64
SCALE = HEAD_SIZE**-0.5
ISA = _get_attn_isa(torch.float32, BLOCK_SIZE, HEAD_SIZE)


def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """As vLLM's attention on CPU."""
    pages = cache.view(len(cache), NUM_KV_HEADS, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *pages, slots, ISA)


@pytest.fixture(scope="module")
def pages() -> KvPages:
    return KvPages(write, (NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.float32)


def batch_of(lengths: list[int], asking: list[int], tables: list[list[int]]) -> Any:
    width = max(len(table) for table in tables)
    starts = torch.tensor(np.cumsum([0, *asking]), dtype=torch.int32)
    padded = [table + [0] * (width - len(table)) for table in tables]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(asking),
        max_query_len=max(asking),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor(padded, dtype=torch.int32),
        slot_mapping=torch.arange(sum(asking)),
    )


def random_step(seed: int) -> tuple[Any, list[list[int]], AwayBlocks]:
    """Prefilling, decoding and fresh sequences; some share their first blocks."""
    dice = random.Random(seed)
    free = list(range(1, NUM_BLOCKS))
    dice.shuffle(free)
    lengths, asking, tables = [], [], []
    shared = [free.pop(), free.pop()]
    for _ in range(dice.randint(1, 4)):
        first = shared[: dice.choice((0, 0, 2))]
        length = len(first) * BLOCK_SIZE + dice.randint(1, 4 * BLOCK_SIZE)
        fresh = length - len(first) * BLOCK_SIZE
        lengths.append(length)
        asking.append(dice.choice((1, min(fresh, 40), fresh)))
        tables.append([*first, *(free.pop() for _ in range(-(-fresh // BLOCK_SIZE)))])
    away = AwayBlocks(NUM_BLOCKS)
    full = {
        block
        for length, num, table in zip(lengths, asking, tables, strict=True)
        for block in table[: (length - num) // BLOCK_SIZE]
    }
    away.leave([block for block in sorted(full) if dice.random() < 0.6])
    return batch_of(lengths, asking, tables), tables, away


@pytest.mark.parametrize("seed", range(25))
def test_parts_of_a_sequence_merge_to_the_whole(pages: KvPages, seed: int) -> None:
    common, tables, away = random_step(seed)
    plan = split_context(common, BLOCK_SIZE, away)
    gone = away.ids()
    if plan is None:
        assert not away.among(np.concatenate(tables)).any()
        return
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(
        common.num_actual_tokens, NUM_KV_HEADS * GROUP, HEAD_SIZE, generator=generator
    )
    here = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    write(key, value, here, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
    there = torch.full_like(here, float("nan"))
    there[gone] = here[gone]
    here[gone] = float("nan")
    asking = query[plan.rows]
    parts = [
        attend(pages, asking, here, plan.local, SCALE, causal=True),
        attend(pages, asking, there, plan.remote, SCALE, causal=False),
    ]
    merged = ReferenceKernels(torch.float32).merge(parts).output
    assert merged.dtype == torch.float32
    whole = attention(common, query, key, value)
    assert torch.allclose(merged.double(), whole[plan.rows], atol=2e-6)
    assert sorted([*plan.rows.tolist(), *plan.other_rows.tolist()]) == list(range(len(query)))
    if plan.others is not None:
        mine, theirs = query[plan.other_rows], whole[plan.other_rows]
        assert torch.equal(attention(plan.others, mine, key, value), theirs)
        assert plan.others.slot_mapping.tolist() == plan.other_rows.tolist()


def attention(common: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
    """Of a batch whose blocks all lie in one place, in float64."""
    asked = common.query_start_loc.diff()
    batch = Batch(
        common.block_table_tensor,
        common.query_start_loc,
        common.seq_lens - asked,
        torch.zeros_like(common.seq_lens),
        common.seq_lens,
    )
    views = (t.view(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE) for t in (key, value))
    kernels = ReferenceKernels(result_dtype=torch.float64)
    heads = Heads(tuple(range(NUM_KV_HEADS)), GROUP)
    return kernels.partial_attention(query, *views, batch, heads, SCALE).output


def test_nothing_is_asked_where_nothing_is_away() -> None:
    common = batch_of([100, 40], [1, 40], [[1, 2, 3, 4], [5, 6]])
    assert split_context(common, BLOCK_SIZE, AwayBlocks(NUM_BLOCKS)) is None


def test_only_those_that_have_blocks_away_ask() -> None:
    away = AwayBlocks(NUM_BLOCKS)
    away.leave([2, 9])
    common = batch_of([100, 40, 70], [1, 40, 6], [[1, 2, 3, 4], [5, 6], [9, 2, 8]])
    plan = split_context(common, BLOCK_SIZE, away)
    assert isinstance(plan, ContextPlan)
    assert plan.rows.tolist() == [0, *range(41, 47)]
    assert plan.remote.block_table.tolist() == [[2, 0], [9, 2]]
    assert plan.remote.range_end.tolist() == [32, 64]
    assert plan.local.block_table.tolist() == [[1, 3, 4], [8, 0, 0]]
    assert plan.local.range_end.tolist() == [68, 6]
    assert plan.local.query_position.tolist() == [67, 0]
    assert plan.others is not None
    assert plan.others.block_table_tensor[0, :2].tolist() == [5, 6]


# ---- which blocks are away


Write = tuple[str, list[tuple[int, int]]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("step", "load", "commit", "forget")),
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=4, unique_by=lambda w: w[0]
        ),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_a_block_leaves_full_and_comes_home_when_it_is_written(steps: list[Write]) -> None:
    """Against the plain meaning: tokens in each block, three of which fill it."""
    written, home = WrittenBlocks(6), []
    away = AwayBlocks(6, lambda blocks: home.extend(blocks.tolist()))
    written.follow(away)
    fill, gone = dict.fromkeys(range(6), 0), set()
    for kind, changes in steps:
        home.clear()
        blocks = [block for block, _ in changes]
        if kind == "commit":
            written.step_ended()
            full = {block for block, tokens in fill.items() if tokens == 3}
            assert set(written.full()) == full
            away.leave(written.full())
            gone = full
            continue
        if kind == "forget":
            written.forget()
            fill = dict.fromkeys(fill, 0)
            continue
        if kind == "load":
            written.mark_loaded(blocks)
            fill |= dict.fromkeys(blocks, 3)
        else:
            # Tokens are added to a block that is not full; a full one has another owner.
            fill |= {b: min(3, fill[b] + n) if fill[b] < 3 else n for b, n in changes}
            written.mark(blocks, [block for block in blocks if fill[block] == 3])
        assert sorted(home) == sorted(gone & set(blocks))
        gone -= set(blocks)
        assert set(away.ids()) == gone
        assert len(away) == len(gone)
        written.step_ended()


def test_what_is_being_copied_does_not_come_home() -> None:
    away = AwayBlocks(4)
    away.leave([1, 2])
    began, order = threading.Event(), []

    def engine() -> None:
        began.set()
        away.come_home([2, 3])
        order.append("written")

    thread = threading.Thread(target=engine)
    with away.holding([0, 2]) as blocks:
        thread.start()
        began.wait()
        assert blocks == [2]
        order.append("copied")
        assert away.ids() == [1, 2]
    thread.join()
    assert order == ["copied", "written"]
    assert away.ids() == [1]


# ---- what is asked for


def test_modules_travel_as_they_are() -> None:
    for modules in (Context(5, 10), LayerRange(5, 10), HeadSet({5: (1,)})):
        assert read_modules(write_modules(modules)) == modules


@pytest.mark.parametrize("modules", [Context(5, 5), Context(-1, 2), Context(28, 31)])
def test_layers_that_are_not_there_are_refused(modules: Context) -> None:
    with pytest.raises(MigrationError, match=r"older blocks .* within 0:30"):
        check_shape(modules, ModelShape(30, 3))


def test_planning() -> None:
    shape, mine = ModelShape(30, 3), Away("m1.0", Context(5, 10), "p0")
    assert plan_move(Context(0, 30), "p0", shape, [], {}) == [Go(Context(0, 30))]
    assert plan_move(Context(3, 12), "p0", shape, [mine], {}) == [
        Go(Context(3, 5)),
        Go(Context(10, 12)),
    ]
    assert plan_move(Context(5, 10), "p1", shape, [mine], {}) == [
        GoOn("m1.0", Context(5, 10), "p0")
    ]
    with pytest.raises(MigrationError, match="return them before you move layers 7:8"):
        plan_move(LayerRange(7, 8), "p1", shape, [mine], {})
    with pytest.raises(MigrationError, match="return them before"):
        plan_move(HeadSet({7: (1,)}), "p1", shape, [mine], {})
    assert plan_return(LayerRange(5, 10), [mine], {}) == [GoHome("m1.0", Context(5, 10), "p0")]
    with pytest.raises(MigrationError, match="return all of it"):
        plan_return(HeadSet({7: (0, 1, 2)}), [mine], {})


# ---- both ends, over a real channel, with vLLM's kernels


class Inner:
    """vLLM's implementation of attention, whose metadata is the batch itself."""

    scale = SCALE

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        write(key, value, cache, slots)

    def forward(self, layer: Any, query: Any, *args: Any, output: torch.Tensor) -> torch.Tensor:
        *_, cache, batch = args
        pages = cache.view(len(cache), NUM_KV_HEADS, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
        plan = ops.cpu_attn_get_scheduler_metadata(
            batch.num_reqs, query.shape[1], NUM_KV_HEADS, HEAD_SIZE, batch.seq_lens,
            query.dtype, batch.query_start_loc, True, -1, ISA, True,
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query, *pages, output, batch.query_start_loc, batch.seq_lens, SCALE, True,
            None, -1, batch.block_table_tensor, 0.0, plan, None,
        )  # fmt: skip
        return output


class Ends:
    """A host's attention, and a guest with ``older`` in a thread."""

    def __init__(self, common: Any, away: AwayBlocks, here: Any, there: Any) -> None:
        self.layer = SimpleNamespace(impl=Inner(), kv_cache=here)
        self.lost: list[GuestLostError] = []
        self.common = common
        builder = SimpleNamespace(build=lambda _, batch: batch)
        watch = StepWatch(builder, BLOCK_SIZE, NUM_BLOCKS)
        builder.build(0, common)
        pages = KvPages.of(self.layer, self.layer.impl, here)
        self.older = OlderBlocks(pages, {"l": there}, {"l": SCALE})
        ours, theirs = socket.socketpair()
        self._channel = over_unix(theirs)
        self.link = GuestLink("g", over_unix(ours), None, lambda: 1, 20.0)  # type: ignore[arg-type]
        residence = Residence("u", self.link, None, 0)  # type: ignore[arg-type]
        residence.epoch = 1
        attention = ContextAttention(self.layer, "l", watch, lambda _, e: self.lost.append(e))
        attention.arrange(residence.context_of(away, watch))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(PeerGoneError):
            while True:
                self._answer(self._channel.receive(3600.0))

    def _answer(self, message: Message) -> None:
        request = messages.decode_request(message.body)
        assert isinstance(request, messages.RunContext)
        if request.step is not None:
            self.older.describe(request.step_id, restore(request.step, message.tensors))
        query = from_wire(message.tensors[0])
        parcel = Parcel()
        indices = tuple(map(parcel.put, self.older.run(request.name, request.step_id, query)))
        answer = messages.encode(messages.Outputs(True, indices))
        self._channel.send(Message(answer, tuple(parcel.tensors)), 20.0)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        output = torch.full_like(query, float("nan"))
        new = torch.full((len(query), NUM_KV_HEADS, HEAD_SIZE), float("nan"))
        arguments = self.layer, query, new, new, self.layer.kv_cache, self.common
        return self.layer.impl.forward(*arguments, output=output)

    def close(self) -> None:
        self.link.close()
        self._thread.join()
        self._channel.close()


@pytest.mark.parametrize("seed", range(12))
def test_both_ends_give_what_vllm_gives(seed: int) -> None:
    common, _, away = random_step(seed)
    common.slot_mapping[:] = -1
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
    here = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    write(key, value, here, torch.arange(len(key)))
    query = torch.randn(
        common.num_actual_tokens, NUM_KV_HEADS * GROUP, HEAD_SIZE, generator=generator
    )
    whole = Inner().forward(None, query, here, common, output=torch.empty_like(query))
    there = torch.full_like(here, float("nan"))
    there[away.ids()] = here[away.ids()]
    here[away.ids()] = float("nan")
    ends = Ends(common, away, here, there)
    try:
        for _ in range(2):
            assert torch.allclose(ends.attend(query), whole, atol=2e-6)
        assert ends.link.round_trips == (2 if len(away) else 0)
        assert ends.lost == []
    finally:
        ends.close()


def test_a_guest_that_is_lost_is_told_once_and_ends_no_step() -> None:
    away = AwayBlocks(NUM_BLOCKS)
    away.leave([1])
    common = batch_of([40], [1], [[1, 2]])
    common.slot_mapping[:] = -1
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    ends = Ends(common, away, cache, cache.clone())
    ends.link.close()
    try:
        output = ends.attend(torch.randn(1, NUM_KV_HEADS * GROUP, HEAD_SIZE))
        assert len(ends.lost) == 1
        assert not output.isnan().any()
    finally:
        ends.close()


def test_a_step_that_names_what_is_not_there_is_refused() -> None:
    pages = KvPages(write, (NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.float32)
    cache = torch.zeros(4, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    older = OlderBlocks(pages, {"l": cache}, {"l": SCALE})
    one = torch.tensor([32], dtype=torch.int32)
    fields = {"query_start": one.new_tensor([0, 1]), "num_tokens": one}
    for blocks in ([4], [-1], []):
        with pytest.raises(ProtocolError, match="not here"):
            older.describe(7, {**fields, "block_table": one.new_tensor([blocks])})
    with pytest.raises(ProtocolError, match="no step"):
        older.describe(7, fields)
    with pytest.raises(ProtocolError, match="more tokens"):
        older.describe(7, {**fields, "block_table": one.new_tensor([[0]]), "num_tokens": one + 1})
    with pytest.raises(ProtocolError, match="not been described"):
        older.run("l", 7, torch.zeros(1, NUM_KV_HEADS * GROUP, HEAD_SIZE))


# ---- pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [32, 128])
def test_pages_are_read_as_vllm_packs_them(dtype: torch.dtype, block_size: int) -> None:
    def write_any(key: Any, value: Any, cache: Any, slots: Any) -> None:
        halves = cache.view(len(cache), NUM_KV_HEADS, 2 * block_size, -1).chunk(2, dim=2)
        isa = _get_attn_isa(dtype, block_size, HEAD_SIZE)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)

    pages = KvPages(write_any, (NUM_KV_HEADS, block_size, 2 * HEAD_SIZE), dtype)
    cache = torch.zeros(3, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE, dtype=dtype)
    key, value = (torch.randn(block_size, NUM_KV_HEADS, HEAD_SIZE).to(dtype) for _ in range(2))
    write_any(key, value, cache, torch.arange(block_size) + block_size)
    read = pages.read(cache[1])
    assert torch.equal(read[0], key.transpose(0, 1).float())
    assert torch.equal(read[1], value.transpose(0, 1).float())


def test_an_order_without_even_steps_is_read_too() -> None:
    """As processors have that take two keys at once."""
    order = torch.randperm(2 * BLOCK_SIZE * HEAD_SIZE, generator=torch.Generator().manual_seed(1))

    def write_mixed(key: Any, value: Any, cache: Any, slots: Any) -> None:
        both = torch.cat([key.transpose(0, 1).flatten(1), value.transpose(0, 1).flatten(1)], 1)
        cache.view(NUM_KV_HEADS, -1)[:, order] = both

    pages = KvPages(write_mixed, (NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.float32)
    key, value = (torch.randn(BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE) for _ in range(2))
    cache = torch.zeros(1, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    write_mixed(key, value, cache, torch.arange(BLOCK_SIZE))
    read = pages.read(cache[0])
    assert torch.equal(read[0], key.transpose(0, 1))
    assert torch.equal(read[1], value.transpose(0, 1))


def test_a_long_prompt_is_answered_in_pieces(
    pages: KvPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = torch.randn(4, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    query = torch.randn(50, NUM_KV_HEADS * GROUP, HEAD_SIZE)
    common = batch_of([120], [50], [[3, 0, 2, 1]])
    ends = common.seq_lens
    batch = Batch(common.block_table_tensor, common.query_start_loc, ends - 50, ends * 0, ends)
    whole = attend(pages, query, cache, batch, SCALE, causal=True)
    monkeypatch.setattr(kv_pages, "_MAX_SCORES", 7 * 120 * NUM_KV_HEADS * GROUP)
    pieces = attend(pages, query, cache, batch, SCALE, causal=True)
    for one, other in zip(whole, pieces, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
