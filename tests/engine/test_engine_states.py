"""States of sequences in the store: their names, where steps stop, what is matched and saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from banaserve.base.errors import UserError
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.connector.cache_groups import (
    CacheGroups,
    block_ends,
    chunk_end,
    describe_states,
    pages,
    state_keys,
)
from banaserve.engine.connector.handover import Handover
from banaserve.engine.connector.scheduler_side.scheduler import StoreConnectorScheduler
from tests.engine.test_engine_matcher import BLOCK, HIT, MISS, PENDING, STEP_TOKENS, Bench

PAGE_BYTES = 512
NUM_BLOCKS = 5
FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32)


def state_of(mode: str = "none", spare: int = 0, heads: int = 2) -> MambaSpec:
    return MambaSpec(
        block_size=1024,
        shapes=((3, 4), (heads, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=PAGE_BYTES,
        mamba_cache_mode=mode,
        num_speculative_blocks=spare,
    )


def laid_out(*groups: tuple[Sequence[str], Any]) -> KVCacheConfig:
    """Groups one over the other, as vLLM lays them: row by row, each row all blocks."""
    size = max(len(names) for names, _ in groups) * NUM_BLOCKS * PAGE_BYTES
    tensors = [
        KVCacheTensor(size, list(names), NUM_BLOCKS * PAGE_BYTES, PAGE_BYTES) for names, _ in groups
    ]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for names, spec in groups],
    )


HYBRID = laid_out((["m0", "m2", "m4"], state_of()), (["a1", "a3"], FULL), (["m5"], state_of()))


# ---- where a step stops


@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 500), st.sampled_from([1, 7, 16]))
def test_a_step_gets_on_and_not_past_the_last_end_of_a_block(
    start: int, num_tokens: int, prompt_end: int, block: int
) -> None:
    end = min(start + num_tokens, max(prompt_end, start + 1))
    stop = chunk_end(start, end, prompt_end, block)
    assert start < stop <= end
    last = (prompt_end - 1) // block * block
    assert not start < last < stop


@given(st.integers(1, 500), st.integers(1, 100), st.sampled_from([1, 7, 16]))
def test_whatever_the_budget_a_prompt_has_a_state_at_its_last_end_of_a_block(
    prompt_end: int, budget: int, block: int
) -> None:
    start, stops = 0, []
    while start < prompt_end:
        start = chunk_end(start, min(start + budget, prompt_end), prompt_end, block)
        stops.append(start)
    ends = block_ends(prompt_end, block)
    assert set(ends[:1]) <= set(stops)
    assert stops[-1] == prompt_end
    if budget >= block:  # and at one at least of those that a step passes
        assert all(stop % block == 0 for stop in stops[:-1])


def test_a_decoding_request_is_not_cut() -> None:
    assert chunk_end(31, 35, 31, 16) == 35


def test_ends_of_blocks_leave_the_last_token_to_be_computed() -> None:
    assert block_ends(48, 16) == [32, 16]
    assert block_ends(49, 16) == [48, 32, 16]
    assert block_ends(16, 16) == []


def test_states_have_names_of_their_own_in_each_group() -> None:
    keys = [*state_keys(b"one", 3), *state_keys(b"two", 3)]
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {32}
    assert state_keys(b"one", 1) == keys[:1]


# ---- groups of a KV cache


def test_groups_are_told_apart() -> None:
    groups = CacheGroups.of(HYBRID)
    assert groups == CacheGroups(attention=1, states=(0, 2), num_rows=3)
    block_ids = ([7], [1, 2, 3, 4], [9])
    assert groups.with_states(block_ids, 0, 3) == [1, 2, 3, 7, 9]
    assert CacheGroups.of(laid_out((["a0", "a1"], FULL))) == CacheGroups(num_rows=2)


def test_a_state_of_another_shape_is_another_block() -> None:
    other = laid_out((["m0"], state_of(heads=1)), (["a1"], FULL))
    same = laid_out((["m0"], state_of()), (["a1"], FULL))
    said = [describe_states(CacheGroups.of(one), one) for one in (same, other)]
    assert said[0] != said[1]
    assert describe_states(CacheGroups(), laid_out((["a0"], FULL))) == ""


@pytest.mark.parametrize(
    "groups",
    [
        ((["m0"], state_of("align")), (["a1"], FULL)),
        ((["m0"], state_of(spare=1)), (["a1"], FULL)),
        ((["m0"], state_of()),),
        ((["m0"], state_of()), (["a1"], FULL), (["a2"], FULL)),
        (
            (["m0"], state_of()),
            (
                ["a1"],
                SlidingWindowSpec(
                    block_size=16,
                    num_kv_heads=1,
                    head_size=4,
                    dtype=torch.float32,
                    sliding_window=64,
                ),
            ),
        ),
        ((["a0"], replace(FULL, non_causal=True)),),  # a prefix LM
        (
            (
                ["a0"],
                RSWASpec(
                    block_size=16,
                    num_kv_heads=1,
                    head_size=4,
                    dtype=torch.float32,
                    rswa_window=64,
                ),
            ),
        ),
    ],
)
def test_other_groups_are_refused(groups: Any) -> None:
    with pytest.raises(UserError, match="store"):
        CacheGroups.of(laid_out(*groups))


def caches(config: KVCacheConfig) -> dict[str, Any]:
    """As vLLM's runners make them: views of one allocation, of a state several tensors."""
    memory = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.uint8)
    made: dict[str, Any] = {}
    for placed in config.kv_cache_tensors:
        for row, name in enumerate(placed.layers):
            first = placed.offset + row * placed.layer_stride
            whole = memory[first : first + NUM_BLOCKS * PAGE_BYTES].view(NUM_BLOCKS, PAGE_BYTES)
            whole = whole.view(torch.float32)
            made[name] = whole if name.startswith("a") else [whole[:, :12], whole[:, 12:44]]
    return made


def test_pages_are_those_that_groups_share() -> None:
    made = caches(HYBRID)
    rows = pages(HYBRID, made)
    assert [tuple(row.shape) for row in rows] == [(NUM_BLOCKS, PAGE_BYTES)] * 3
    made["a3"][2] = 1.5
    made["m4"][1][4] = 2.5
    assert torch.equal(rows[1].view(torch.float32)[2], torch.full((128,), 1.5))
    assert torch.equal(rows[2].view(torch.float32)[4, 12:44], torch.full((32,), 2.5))
    assert not rows[0].any()


def test_pages_that_lie_in_another_way_are_refused() -> None:
    made = caches(HYBRID)
    made["m2"] = [made["m2"][0][1:], made["m2"][1]]
    with pytest.raises(UserError, match="m2"):
        pages(HYBRID, made)


# ---- matching and saving


class Tails:
    """Keys of partial blocks by their length; hashes stay those of the request."""

    def key(self, request: compat.Request, num_tokens: int) -> bytes | None:
        return b"tail %d".ljust(32) % num_tokens if num_tokens % BLOCK else None

    def prefix(self, request: compat.Request, num_tokens: int) -> bytes | None:
        hashes = request.block_hashes
        return self.key(request, num_tokens) or hashes[num_tokens // BLOCK - 1]

    def rehash(self, request: compat.Request) -> None:
        pass


GROUPS = CacheGroups(attention=1, states=(0, 2), num_rows=2)


class States(Bench):
    """A scheduler's side of an engine that keeps states in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.side = StoreConnectorScheduler(
            self.store,  # type: ignore[arg-type]
            Tails(),  # type: ignore[arg-type]
            BLOCK,
            self.gate,
            self.clock,
            STEP_TOKENS,
            GROUPS,
        )

    def hold_prefix(self, request: compat.Request, num_tokens: int, state: Any = HIT) -> None:
        prefix = Tails().prefix(request, num_tokens)
        assert prefix is not None
        self.store.held.update(dict.fromkeys(state_keys(prefix, 2), state))
        self.hold(request, [HIT] * (num_tokens // BLOCK))
        if num_tokens % BLOCK:
            self.store.held[prefix] = HIT

    def step(self, request: compat.Request, before: int, end: int, *, matched: int = 0) -> Any:
        """A step that brings the request from ``before`` to ``end``; its blocks are 7, 100…, 9."""
        ids = ([7], list(range(100, 200)), [9])
        if matched:
            blocks: Any = SimpleNamespace(get_block_ids=lambda: ids)
            self.side.allocated(request, blocks, matched)
        new = [SimpleNamespace(req_id=request.request_id, num_computed_tokens=before)]
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={request.request_id: end - before},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: ids),
        )
        return self.side.plan(output)


@pytest.fixture
def states() -> States:
    return States()


def test_a_prefix_is_fetched_up_to_the_last_state(states: States) -> None:
    request = states.request(4)
    states.hold(request, [HIT] * 4)
    states.hold_prefix(request, 2 * BLOCK)
    assert states.side.match(request, 0) == 2 * BLOCK
    plan = states.step(request, 2 * BLOCK, 4 * BLOCK + 1, matched=2 * BLOCK)
    assert [copy.block_id for copy in plan.loads] == [100, 101]
    # The forward pass changes them, and begins with them.
    assert [copy.block_id for copy in plan.early_loads] == [7, 9]
    states.side.finished(request.request_id)
    assert states.store.reservations == {}


def test_blocks_without_a_state_are_of_no_use(states: States) -> None:
    request = states.request(4)
    states.hold(request, [HIT] * 4)
    assert states.side.match(request, 0) == 0
    assert states.store.leases == {}


def test_of_a_state_all_groups_have_to_be_there(states: States) -> None:
    request = states.request(4)
    states.hold_prefix(request, 3 * BLOCK)
    states.store.held[state_keys(request.block_hashes[2], 2)[1]] = MISS
    assert states.side.match(request, 0) == 0


def test_states_of_a_block_end_behind_which_nothing_comes_are_not_looked_for(
    states: States,
) -> None:
    request = states.request(4)
    states.hold_prefix(request, 4 * BLOCK)
    assert states.side.match(request, 0) == 4 * BLOCK  # of 65 tokens one is left
    shorter = states.request(3, output=[1])  # of 49, and the last is its output
    assert shorter.num_tokens == 3 * BLOCK + 1


def test_a_decode_leg_fetches_what_its_prefill_leg_left(states: States) -> None:
    num_tokens = 3 * BLOCK + 5
    request = states.request(4, handover=Handover(tokens=num_tokens))
    states.hold_prefix(request, num_tokens)
    assert states.side.match(request, 0) == num_tokens
    plan = states.step(request, num_tokens, 4 * BLOCK + 1, matched=num_tokens)
    assert [copy.block_id for copy in plan.loads] == [100, 101, 102]
    assert [copy.block_id for copy in plan.early_loads] == [103, 7, 9]


def test_a_state_that_is_being_written_is_waited_for(states: States) -> None:
    num_tokens = 3 * BLOCK + 5
    request = states.request(4, handover=Handover(tokens=num_tokens))
    states.hold_prefix(request, num_tokens)
    prefix = Tails().prefix(request, num_tokens)
    assert prefix is not None
    first = state_keys(prefix, 2)[0]
    del states.store.held[first]
    states.store.written_elsewhere.add(first)
    assert states.side.match(request, 0) is None
    states.store.held[first] = HIT
    states.clock.now_s += 1
    assert states.side.match(request, 0) == num_tokens


def test_states_on_their_way_from_a_tier_are_waited_for(states: States) -> None:
    request = states.request(4)
    states.hold_prefix(request, 2 * BLOCK, PENDING)
    assert states.side.match(request, 0) is None
    states.hold_prefix(request, 2 * BLOCK)
    assert states.side.match(request, 0) == 2 * BLOCK


@pytest.mark.parametrize(
    ("end", "handover", "is_saved"),
    [
        (2 * BLOCK, None, True),
        (2 * BLOCK + 3, None, False),
        (4 * BLOCK + 1, None, False),
        (4 * BLOCK + 1, Handover(leaves_tail=True), True),
        (2 * BLOCK + 3, Handover(leaves_tail=True), False),
    ],
)
def test_states_are_saved_at_ends_of_blocks_and_of_prompts_that_are_handed_over(
    states: States, end: int, handover: Handover | None, is_saved: bool
) -> None:
    request = states.request(4, handover=handover)
    assert states.side.match(request, 0) == 0
    plan = states.step(request, 0, end)
    assert [copy.block_id for copy in plan.states] == [7, 9] * is_saved
    prefix = Tails().prefix(request, end) if is_saved else None
    wanted = set(state_keys(prefix, 2)) if prefix else set()
    assert wanted <= set(states.store.reservations.values())


def test_what_goes_to_another_machine_goes_with_its_states(states: States) -> None:
    to = "10.0.0.2:7100"
    request = states.request(4, handover=Handover(leaves_tail=True, push_to=to))
    assert states.side.match(request, 0) == 0
    states.step(request, 0, 4 * BLOCK)
    assert states.store.pushes == []
    request.num_computed_tokens = 4 * BLOCK
    states.step(request, 4 * BLOCK, 4 * BLOCK + 1)
    ((address, keys, _, reserved),) = states.store.pushes
    tail = Tails().key(request, 4 * BLOCK + 1)
    assert tail is not None
    assert address == to
    assert keys == [*request.block_hashes, tail, *state_keys(tail, 2)]
    assert set(state_keys(tail, 2)) <= reserved
