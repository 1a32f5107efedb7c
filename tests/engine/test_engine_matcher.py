"""Waiting, giving up, aborting: the scheduler's side against a store that keeps accounts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams

from banaserve.base.access.cache_salt import TenantSalt
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.connector.handover import Handover
from banaserve.engine.connector.metadata import StepResult
from banaserve.engine.connector.scheduler_side.prefix_matcher import (
    ASK_AGAIN_S,
    ASK_FOR_ROOM_S,
    ROOM_S,
    UNDECIDED_FOR_S,
    UNKNOWN_PATIENCE_S,
    WRITER_PATIENCE,
)
from banaserve.engine.connector.scheduler_side.request_state import LONGEST_WAIT_S
from banaserve.engine.connector.scheduler_side.scheduler import StoreConnectorScheduler
from banaserve.engine.continuation import with_output
from banaserve.kvstore.client.cost_gate import CostGate, FetchWork
from banaserve.kvstore.leases import Exchanged, Lease, Lookup, Slot
from depth import chosen_seed

BLOCK, LAYERS, STEP_TOKENS = 16, 8, 2048
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class AccountingStore:
    """Holds blocks in given states; knows at any time what its client holds of it.

    Attributes:
        held: Keys it has, with the state of their slots.
        written_elsewhere: Keys of blocks that another client is writing.
        undecided: Answers that say so from now on.
        wait_s: What it predicts.
        exchanges: Every exchange so far: (acquired, reserved, tenant, compute_block_s).
        holds: Numbers of the holds that have begun and not ended.
        readers: Of each hold the number of readers, and those that have ended it.
        room: Number of blocks that can be reserved at a time.
        pushes: Every push so far: (to, keys, tenant), and what was reserved then.
        pushed_holds: Of each push the number of its hold, and of readers.
        told_also: Other store that the last end of a hold named; empty for none.
        unfetched: Number of blocks at other stores that there is no room for.
        counted: Keys asked for, without repetitions.
        kept: Every request to keep blocks: (keys, keep_s).
    """

    def __init__(self) -> None:
        self.held: dict[bytes, Lookup] = {}
        self.written_elsewhere: set[bytes] = set()
        self.undecided = 0
        self.wait_s = 1.0
        self.exchanges: list[tuple[list[bytes], list[bytes], bytes, float]] = []
        self.pushes: list[tuple[str, list[bytes], bytes, set[bytes]]] = []
        self.pushed_holds: list[tuple[int, int]] = []
        self.told_also = ""
        self.unfetched = 0
        self.counted: list[bytes] = []
        self.kept: list[tuple[list[bytes], float]] = []
        self.leases: dict[int, list[Slot]] = {}
        self.reservations: dict[int, bytes] = {}
        self.holds: set[int] = set()
        self.readers: dict[int, tuple[int, set[int]]] = {}
        self.num_slots = self.room = 1000
        self.slot_bytes = 4096
        self._next = 1
        self._key_of: dict[int, bytes] = {}

    def exchange(
        self,
        *,
        acquire: Sequence[bytes] = (),
        reserve: Sequence[tuple[bytes, bytes | None]] = (),
        tenant: bytes = b"",
        compute_block_s: float = 0.0,
        hold: int = 0,
        num_readers: int = 1,
        is_repeated: bool = False,
    ) -> Exchanged:
        keys = [key for key, _ in reserve]
        self.exchanges.append((list(acquire), keys, tenant, compute_block_s))
        self.counted += [] if is_repeated else acquire
        there = [key for key in acquire if self.held.get(key, MISS) is not MISS]
        slots = [self._slot(key) for key in acquire[: len(there)] if key in there]
        if hold:
            self.holds.add(hold)
            self.readers[hold] = (num_readers, set())
        states = [self.held[self._key_of[slot.serial]] for slot in slots]
        ready = next((i for i, state in enumerate(states) if state is not HIT), len(slots))
        lease = None
        if slots:
            lease = Lease(self._number(), 1)
            self.leases[lease.id] = slots
        granted: list[Slot | None] = []
        refused = 0
        for key in keys:
            taken = {*self.held, *self.reservations.values(), *self.written_elsewhere}
            free = key not in taken and len(self.reservations) < self.room
            refused += not free and key not in taken
            granted.append(self._slot(key) if free else None)
            if granted[-1] is not None:
                self.reservations[granted[-1].serial] = key
        undecided, self.undecided = self.undecided > 0, max(0, self.undecided - 1)
        return Exchanged(
            lease,
            slots,
            granted,
            ready,
            self.wait_s,
            undecided,
            num_refused=refused,
            num_held=len(self.held),
            num_unfetched=self.unfetched,
        )

    def end_hold(self, hold: int, reader: int | None = None, also: str = "") -> None:
        self.told_also = also
        num_readers, have_read = self.readers.get(hold, (0, set()))
        if reader is not None:
            have_read.add(reader)
        if reader is None or len(have_read) >= num_readers:
            self.holds.discard(hold)

    def keep(self, keys: Sequence[bytes], keep_s: float) -> None:
        self.kept.append((list(keys), keep_s))

    def push(
        self,
        to: str,
        keys: Sequence[bytes],
        tenant: bytes = b"",
        hold: int = 0,
        num_readers: int = 1,
    ) -> None:
        self.pushes.append((to, list(keys), tenant, {*self.reservations.values()}))
        self.pushed_holds.append((hold, num_readers))

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        written = {*self.reservations.values(), *self.written_elsewhere}
        return [self.held.get(key, PENDING if key in written else MISS) for key in keys]

    def arrivals(self, slots: Sequence[Slot]) -> list[Lookup]:
        return [self.held[self._key_of[slot.serial]] for slot in slots]

    def release(self, lease: Lease) -> None:
        del self.leases[lease.id]

    def abandon(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            del self.reservations[slot.serial]

    def commit(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.held[self.reservations.pop(slot.serial)] = HIT

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _slot(self, key: bytes) -> Slot:
        slot = Slot(self._number(), 1, self._number())
        self._key_of[slot.serial] = key
        return slot


class NoTails:
    def key(self, request: compat.Request, num_tokens: int) -> bytes | None:
        return None


class Bench:
    """A scheduler's side with all that it needs."""

    def __init__(self, **gate: object) -> None:
        self.store, self.clock = AccountingStore(), ManualClock()
        self.gate = CostGate(num_layers=LAYERS, **gate)  # type: ignore[arg-type]
        tails = NoTails()
        self.side = StoreConnectorScheduler(
            self.store,  # type: ignore[arg-type]
            tails,  # type: ignore[arg-type]
            BLOCK,
            self.gate,
            self.clock,
            STEP_TOKENS,
        )
        self._number = 0

    def request(
        self,
        num_blocks: int,
        *,
        salt: str | None = None,
        handover: Handover | None = None,
        output: Sequence[int] = (),
    ) -> compat.Request:
        """A request of so many blocks and a token; ``output`` was computed elsewhere."""
        self._number += 1
        extra: dict[str, Any] = {"kv_transfer_params": handover.to_params()} if handover else {}
        extra = with_output(extra, output) if output else extra
        params = SamplingParams(max_tokens=4, extra_args=extra)
        params.update_from_generation_config({}, None)
        name = f"r{self._number}"
        request = compat.Request(
            request_id=name,
            prompt_token_ids=list(range(num_blocks * BLOCK + 1 - len(output))),
            sampling_params=params,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=lambda request: [
                f"{name}-{i}".encode().ljust(32, b".") for i in range(num_blocks)
            ],
        )
        for token in output:
            request.append_output_token_ids(token)
        return request

    def hold(self, request: compat.Request, states: Sequence[Lookup]) -> None:
        self.store.held.update(zip(request.block_hashes, states, strict=False))

    def schedule(self, request: compat.Request, matched: int, first: int = 0) -> object:
        """What vLLM does with a request that it takes into a step; the step's plan."""
        num_blocks = -(-request.num_tokens // BLOCK)
        blocks = SimpleNamespace(get_block_ids=lambda: [list(range(100, 100 + num_blocks))])
        self.side.allocated(request, blocks, matched)
        return self.side.plan(self._output(request, first * BLOCK + matched))

    def pass_over(self) -> object:
        return self.side.plan(self._output(None, 0))

    @staticmethod
    def _output(request: compat.Request | None, computed: int) -> object:
        new = []
        scheduled = {}
        if request is not None:
            new = [SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)]
            scheduled = {request.request_id: request.num_tokens - computed}
        state = SimpleNamespace(get_block_ids=lambda _: [list(range(100, 200))])
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens=scheduled,
            kv_connector_block_state=state,
        )

    def counted(self, name: str) -> float:
        taken = self.side.stats.take()
        counts = taken.data if taken else {}
        self.side.stats.add(**counts)
        return counts.get(name, 0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_all_in_memory_takes_one_round_trip(bench: Bench) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT] * 3)
    assert bench.side.match(request, 0) == 3 * BLOCK
    plan = bench.schedule(request, 3 * BLOCK)
    assert [copy.block_id for copy in plan.loads] == [100, 101, 102]
    assert [copy.block_id for copy in plan.saves] == [103]
    assert len(bench.store.exchanges) == 1
    bench.side.step_done(StepResult(plan.step))
    bench.store.commit([copy.slot for copy in plan.saves])
    assert (bench.store.leases, bench.store.reservations) == ({}, {})
    assert bench.counted("decided_unmeasured") == 1
    assert bench.counted("promotion_arrived") == 0


def test_a_request_that_shares_no_block_is_planned_without_one(bench: Bench) -> None:
    plan = bench.side.plan(bench._output(bench.request(4), 0))
    assert (plan.loads, plan.saves, bench.store.exchanges) == ([], [], [])
    assert bench.counted("scheduled_requests") == 0


def test_of_more_blocks_than_one_call_takes_the_first_are_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.engine.connector.scheduler_side.prefix_matcher.MAX_KEYS", 3)
    request = bench.request(6)
    bench.hold(request, [HIT] * 6)
    assert bench.side.match(request, BLOCK) == 3 * BLOCK
    acquired, reserved, _, _ = bench.store.exchanges[-1]
    assert acquired == reserved == request.block_hashes[1:4]


def test_waits_without_round_trips_until_all_have_come(bench: Bench) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT, PENDING, PENDING])
    for _ in range(5):
        assert bench.side.match(request, 0) is None
        bench.pass_over()
        bench.clock.now_s += 0.1
    assert len(bench.store.leases) == 1
    bench.hold(request, [HIT, HIT, HIT])
    assert bench.side.match(request, 0) == 3 * BLOCK
    plan = bench.schedule(request, 3 * BLOCK)
    assert len(plan.loads) == 3
    assert len(bench.store.exchanges) == 1
    assert bench.counted("promotion_arrived") == 1
    assert bench.counted("promoted_blocks") == 2
    assert bench.counted("promotion_wait_seconds") == pytest.approx(0.5)
    assert bench.counted("promotion_predicted_seconds") == 1.0


@pytest.mark.parametrize(
    ("states", "elapsed_s", "outcome"),
    [([HIT, HIT, MISS], 0.1, "failed"), ([HIT, HIT, PENDING], 4.1, "late")],
)
def test_takes_the_prefix_that_came_and_reserves_the_rest(
    bench: Bench, states: list[Lookup], elapsed_s: float, outcome: str
) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT, PENDING, PENDING])
    assert bench.side.match(request, 0) is None
    bench.hold(request, states)
    if outcome == "failed":
        del bench.store.held[request.block_hashes[2]]
        bench.store.arrivals = lambda slots: states[3 - len(slots) :]  # type: ignore[method-assign]
    bench.clock.now_s += elapsed_s
    assert bench.side.match(request, 0) == 2 * BLOCK
    plan = bench.schedule(request, 2 * BLOCK)
    assert len(plan.loads) == 2
    # A late block is still being written by the store: nobody may reserve it.
    assert len(plan.saves) == (2 if outcome == "failed" else 1)
    assert len(bench.store.exchanges) == 2
    assert bench.counted(f"promotion_{outcome}") == 1
    assert bench.counted("promoted_blocks") == 1


def test_who_fetches_always_waits_where_computing_would_be_sooner() -> None:
    bench = Bench(enabled=False)
    request = bench.request(4)
    bench.hold(request, [HIT, PENDING, PENDING])
    assert bench.side.match(request, 0) is None
    bench.clock.now_s += 9.9
    assert bench.side.match(request, 0) is None
    bench.hold(request, [HIT, HIT, HIT])
    assert bench.side.match(request, 0) == 3 * BLOCK
    assert bench.counted("promotion_arrived") == 1


def test_a_tier_that_does_not_know_yet_is_asked_again(bench: Bench) -> None:
    request = bench.request(3)
    bench.hold(request, [HIT])
    bench.store.undecided = 1
    assert bench.side.match(request, 0) is None
    assert bench.side.match(request, 0) is None
    assert len(bench.store.exchanges) == 1
    assert bench.store.reservations == {}
    bench.hold(request, [HIT, HIT])
    bench.clock.now_s += 0.01
    assert bench.side.match(request, 0) == 2 * BLOCK
    assert len(bench.store.exchanges) == 2
    assert len(bench.store.leases) == 1
    assert len(bench.store.reservations) == 1


def test_a_tier_that_never_knows_is_asked_for_a_bounded_time(bench: Bench) -> None:
    request = bench.request(3)
    bench.hold(request, [HIT])
    bench.store.undecided = 1_000_000
    began_s = bench.clock.now_s
    while bench.side.match(request, 0) is None:
        bench.clock.now_s += 0.02
        assert bench.clock.now_s < began_s + 2 * UNDECIDED_FOR_S
    assert len(bench.store.leases) == 1


@pytest.mark.parametrize("state", [HIT, PENDING])
@pytest.mark.parametrize("undecided", [0, 1])
def test_an_abort_gives_everything_back(bench: Bench, state: Lookup, undecided: int) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT, state])
    bench.store.undecided = undecided
    bench.side.match(request, 0)
    bench.side.finished(request.request_id)
    bench.pass_over()
    assert (bench.store.leases, bench.store.reservations) == ({}, {})
    assert bench.counted("promotion_abandoned") == (state is PENDING)


def test_who_was_matched_and_not_scheduled_holds_nothing(bench: Bench) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT, HIT])
    assert bench.side.match(request, 0) == 2 * BLOCK
    bench.pass_over()
    assert (bench.store.leases, bench.store.reservations) == ({}, {})
    assert bench.side.match(request, 0) == 2 * BLOCK


def test_who_waits_and_is_passed_over_holds_nothing_for_ever(bench: Bench) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT, PENDING])
    assert bench.side.match(request, 0) is None
    bench.pass_over()
    bench.clock.now_s += 1.0
    bench.pass_over()
    assert len(bench.store.leases) == 1
    bench.clock.now_s += 10.0
    bench.pass_over()
    assert (bench.store.leases, bench.store.reservations) == ({}, {})
    bench.hold(request, [HIT, HIT])
    assert bench.side.match(request, 0) == 2 * BLOCK


def test_a_prefix_that_the_engine_has_found_itself_meanwhile_is_not_fetched(bench: Bench) -> None:
    request = bench.request(4)
    bench.hold(request, [HIT, PENDING])
    assert bench.side.match(request, 0) is None
    bench.hold(request, [HIT, HIT, HIT])
    assert bench.side.match(request, 2 * BLOCK) == BLOCK
    assert bench.store.exchanges[-1][0] == request.block_hashes[2:]
    assert len(bench.store.leases) == 1


def test_a_preempted_request_is_matched_anew(bench: Bench) -> None:
    request = bench.request(3)
    bench.hold(request, [HIT, PENDING])
    assert bench.side.match(request, 0) is None
    bench.hold(request, [HIT, HIT])
    assert bench.side.match(request, 0) == 2 * BLOCK
    plan = bench.schedule(request, 2 * BLOCK)
    bench.side.step_done(StepResult(plan.step))
    bench.store.commit([copy.slot for copy in plan.saves])
    assert bench.side.match(request, 0) == 3 * BLOCK
    assert len(bench.store.exchanges) == 2


def teach(bench: Bench, block_fetch_s: float) -> None:
    for tokens in (64, 128, 256):
        bench.gate.compute.observe(FetchWork.of(tokens, 0), 0.001 * tokens)
    bench.gate.fetch.observe(1, block_fetch_s)


def test_what_is_dearer_to_fetch_is_computed(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.1)
    request = bench.request(4)
    bench.hold(request, [HIT] * 3)
    assert bench.side.match(request, 0) == 0
    assert bench.store.leases == {}
    plan = bench.schedule(request, 0)
    assert plan.loads == []
    assert bench.counted("decided_compute") == 1


def test_of_a_slow_link_the_first_blocks_are_fetched_while_the_others_are_computed(
    bench: Bench,
) -> None:
    teach(bench, block_fetch_s=0.03)
    request = bench.request(9)
    bench.hold(request, [HIT] * 8)
    # Computing a block takes 16 ms: three are fetched in 90 ms while 97 tokens are computed.
    assert bench.side.match(request, 0) == 3 * BLOCK
    plan = bench.schedule(request, 3 * BLOCK)
    assert [copy.block_id for copy in plan.loads] == [100, 101, 102]
    assert plan.early_loads == []
    # Those that were cut off are in the store: only the last block is saved.
    assert [copy.block_id for copy in plan.saves] == [108]
    assert bench.counted("decided_cut") == 1
    assert bench.counted("declined_blocks") == 5
    assert bench.counted("avoided_compute_seconds") == pytest.approx(0.048, rel=0.1)
    assert len(bench.store.leases) == 1
    bench.side.step_done(StepResult(plan.step))
    assert bench.store.leases == {}


def test_who_shares_a_step_with_others_fetches_behind_their_work_too(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.03)
    other, request = bench.request(40), bench.request(9)
    bench.hold(request, [HIT] * 8)
    assert bench.side.match(other, 0) == 0
    bench.side.allocated(other, None, 0)  # type: ignore[arg-type]
    assert bench.side.match(request, 0) == 8 * BLOCK


@pytest.mark.parametrize(("step_tokens", "num_fetched"), [(2048, 3), (32, 1)])
def test_only_what_the_next_step_computes_hides_a_fetch(
    bench: Bench, step_tokens: int, num_fetched: int
) -> None:
    teach(bench, block_fetch_s=0.03)
    bench.side.ahead.max_tokens = step_tokens
    request = bench.request(9)
    bench.hold(request, [HIT] * 8)
    assert bench.side.match(request, 0) == num_fetched * BLOCK


def test_what_was_handed_over_is_fetched_however_dear(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.1)
    request = bench.request(4, handover=Handover(tokens=3 * BLOCK))
    bench.hold(request, [HIT] * 3)
    assert bench.side.match(request, 0) == 3 * BLOCK
    # Nor does a tier decline to bring it up.
    assert bench.store.exchanges[-1][3] == 0.0
    assert bench.store.leases != {}


def test_what_the_router_saw_in_the_store_is_fetched_however_dear(bench: Bench) -> None:
    """The router has spared it a prefill leg: here it would stop the streams of others."""
    teach(bench, block_fetch_s=0.1)
    request = bench.request(4, handover=Handover(is_stored=True))
    bench.hold(request, [HIT] * 4)
    assert bench.side.match(request, 0) == 4 * BLOCK
    assert bench.store.exchanges[-1][3] == 0.0


@pytest.mark.parametrize("handover", [Handover(tokens=4 * BLOCK), Handover(is_stored=True)])
@pytest.mark.parametrize("is_committed", [True, False])
def test_what_another_instance_still_writes_is_waited_for(
    bench: Bench, handover: Handover, is_committed: bool
) -> None:
    """Two prefill instances computed one prefix; the one that saves it is slower."""
    request = bench.request(4, handover=handover)
    bench.hold(request, [HIT])
    bench.store.written_elsewhere = {request.block_hashes[1]}
    for _ in range(20):
        assert bench.side.match(request, 0) is None
        bench.pass_over()
        assert bench.store.reservations == {}
        bench.clock.now_s += 0.1
    bench.store.written_elsewhere = set()
    if is_committed:
        bench.hold(request, [HIT] * 4)
    assert bench.side.match(request, 0) == (4 if is_committed else 1) * BLOCK
    assert len(bench.store.leases) == 1


def test_a_stream_saves_what_an_instance_wrote_when_it_died(bench: Bench) -> None:
    """The store keeps the block for the dead until it knows of the death."""
    request = bench.request(4, output=[7] * 20)
    bench.hold(request, [HIT] * 3)
    bench.store.written_elsewhere = {request.block_hashes[3]}
    assert bench.side.match(request, 0) is None
    bench.pass_over()
    bench.store.written_elsewhere = set()
    bench.clock.now_s += ASK_AGAIN_S
    assert bench.side.match(request, 0) == 3 * BLOCK
    plan = bench.schedule(request, 3 * BLOCK)
    assert [copy.block_id for copy in plan.saves] == [103]


def test_what_is_written_for_ever_is_computed(bench: Bench) -> None:
    request = bench.request(4, handover=Handover(tokens=4 * BLOCK))
    bench.store.written_elsewhere = {request.block_hashes[0]}
    began_s = bench.clock.now_s
    while bench.side.match(request, 0) is None:
        bench.clock.now_s += 0.5
        assert bench.clock.now_s < began_s + 2 * LONGEST_WAIT_S


def test_on_an_engine_that_knows_no_cost_a_leg_waits_a_fixed_time(bench: Bench) -> None:
    request = bench.request(4)
    bench.store.written_elsewhere = set(request.block_hashes[:2])
    began_s = bench.clock.now_s
    assert wait_for_writer(bench, request, began_s + 2 * UNKNOWN_PATIENCE_S) == 0
    waited_s = bench.clock.now_s - began_s
    assert waited_s == pytest.approx(UNKNOWN_PATIENCE_S, abs=UNDECIDED_FOR_S)
    assert bench.counted("waited_for_prefix") == 1


def wait_for_writer(bench: Bench, request: compat.Request, until_s: float) -> int | None:
    """Ask again and again until the request is matched, or until the given time."""
    while (matched := bench.side.match(request, 0)) is None and bench.clock.now_s < until_s:
        bench.pass_over()
        assert bench.store.reservations == {}, "a waiting leg holds slots"
        bench.clock.now_s += ASK_AGAIN_S / 2
    return matched


def test_a_prefix_that_another_leg_computes_is_waited_for_and_fetched(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.001)
    request = bench.request(4, handover=Handover(leaves_tail=True))
    bench.store.written_elsewhere = set(request.block_hashes[:3])
    began_s = bench.clock.now_s
    assert wait_for_writer(bench, request, began_s + 0.04) is None
    bench.store.written_elsewhere = set()
    bench.hold(request, [HIT] * 3)
    assert wait_for_writer(bench, request, began_s + 0.1) == 3 * BLOCK
    assert len(bench.store.reservations) == 1
    assert bench.counted("waited_for_prefix") == 1
    assert bench.counted("prefix_wait_seconds") == pytest.approx(bench.clock.now_s - began_s)
    # Some questions a wait, not one a step: many legs may wait for one prefix.
    assert len(bench.store.exchanges) <= 16


def test_a_leg_waits_at_most_twice_as_long_as_computing_takes(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.001)
    request = bench.request(4)
    bench.store.written_elsewhere = set(request.block_hashes[:3])
    began_s = bench.clock.now_s
    assert wait_for_writer(bench, request, began_s + 1.0) == 0
    waited_s = bench.clock.now_s - began_s
    bench.side.match(bench.request(4), 0)
    _, _, _, compute_block_s = bench.store.exchanges[-1]
    assert waited_s == pytest.approx(WRITER_PATIENCE * 3 * compute_block_s, abs=2 * ASK_AGAIN_S)
    bench.pass_over()
    assert bench.side.match(request, 0) == 0, "it waits once in its life"


def test_the_first_that_asks_after_a_writers_death_computes_for_all(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.001)
    first, second = bench.request(4), bench.request(4)
    second.block_hashes[:] = first.block_hashes
    bench.store.written_elsewhere = set(first.block_hashes)
    assert bench.side.match(first, 0) is None
    assert bench.side.match(second, 0) is None
    bench.pass_over()
    bench.store.written_elsewhere = set()
    bench.clock.now_s += 0.02
    assert bench.side.match(first, 0) == 0
    assert len(bench.store.reservations) == 4
    assert bench.side.match(second, 0) is None
    plan = bench.schedule(first, 0)
    bench.store.commit([copy.slot for copy in plan.saves])
    bench.clock.now_s += 0.02
    assert bench.side.match(second, 0) == 4 * BLOCK


def test_a_leg_that_does_not_read_the_store_waits_for_no_writer(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.001)
    request = bench.request(4)
    request.skip_reading_prefix_cache = True
    bench.store.written_elsewhere = set(request.block_hashes)
    assert bench.side.match(request, 0) == 0


def test_what_is_cheaper_to_fetch_is_fetched_and_the_win_is_counted(bench: Bench) -> None:
    teach(bench, block_fetch_s=0.001)
    request = bench.request(4)
    bench.hold(request, [HIT] * 3)
    assert bench.side.match(request, 0) == 3 * BLOCK
    plan = bench.schedule(request, 3 * BLOCK)
    assert bench.counted("decided_fetch") == 1
    assert bench.counted("avoided_compute_seconds") == pytest.approx(0.048, rel=0.1)
    bench.side.step_done(StepResult(plan.step, 0.02, 0.004, 3))
    assert bench.counted("predicted_fetch_seconds") == pytest.approx(0.003)
    assert bench.counted("measured_fetch_seconds") == pytest.approx(0.004)


def test_the_store_hears_what_a_block_costs_and_who_asks(bench: Bench) -> None:
    request = bench.request(4, salt="alice:")
    bench.side.match(request, 0)
    assert bench.store.exchanges[-1][2:] == (TenantSalt.of("alice:").account, 0.0)
    teach(bench, block_fetch_s=0.001)
    other = bench.request(4)
    bench.side.match(other, 0)
    _, _, tenant, compute_block_s = bench.store.exchanges[-1]
    assert tenant == b""
    # Five blocks, the last of one token.
    assert compute_block_s == pytest.approx(65 * 0.001 / 5 - 0.001, rel=0.1)


def test_whatever_happens_nothing_stays_held() -> None:
    """A thousand random steps; then every request ends and the accounts must be empty."""
    draw = random.Random(chosen_seed(11))
    bench = Bench()
    alive: list[compat.Request] = []
    unanswered: list[StepResult] = []
    for _ in range(1000):
        bench.clock.now_s += draw.choice([0.0, 0.003, 0.3])
        bench.store.undecided = draw.choice([0, 0, 0, 1, 3])
        bench.store.wait_s = draw.choice([0.0, 0.01, 1.0])
        if len(alive) < 4:
            alive.append(bench.request(draw.randint(1, 5), salt=draw.choice([None, "a"])))
            bench.hold(alive[-1], draw.choices([HIT, PENDING], k=draw.randint(0, 5)))
        for key, state in bench.store.held.items():
            if state is PENDING and draw.random() < 0.2:
                bench.store.held[key] = draw.choice([HIT, HIT, MISS])
        request = draw.choice(alive)
        first = draw.choice([0, 0, 0, 1])
        matched = bench.side.match(request, first * BLOCK)
        if matched is None or draw.random() < 0.3:
            bench.pass_over()
        else:
            plan = bench.schedule(request, matched, first)
            bench.store.commit([copy.slot for copy in plan.saves])
            unanswered.append(StepResult(plan.step, 0.01, 0.001, len(plan.loads)))
        if unanswered and draw.random() < 0.7:
            bench.side.step_done(unanswered.pop(0))
        if draw.random() < 0.2:
            alive.remove(request)
            bench.side.finished(request.request_id)
    for request in alive:
        bench.side.finished(request.request_id)
    for done in unanswered:
        bench.side.step_done(done)
    assert bench.store.leases == {}
    assert bench.store.reservations == {}


def test_a_prompt_is_pushed_once_its_slots_are_reserved_and_it_is_scheduled(bench: Bench) -> None:
    """All of it, what the store has already included: the other machine's may lack that."""
    request = bench.request(
        4, salt="salt", handover=Handover(leaves_tail=True, push_to="10.0.0.2:7100")
    )
    bench.hold(request, [HIT] * 2)
    for _ in range(3):
        bench.side.match(request, 0)
        bench.pass_over()
    assert bench.store.pushes == []
    matched = bench.side.match(request, 0)
    assert matched is not None
    plan = bench.schedule(request, matched)
    keys = list(request.block_hashes)
    to, pushed, tenant, reserved = bench.store.pushes.pop()
    assert (to, pushed, tenant) == ("10.0.0.2:7100", keys, TenantSalt.of("salt").account)
    assert reserved == {*keys[2:]}
    assert plan.pushed == [copy.slot for copy in plan.saves]
    assert len(plan.pushed) == 2
    bench.side.finished(request.request_id)
    assert bench.store.pushes == []


@pytest.mark.parametrize(
    "handover", [None, Handover(leaves_tail=True), Handover(tokens=65), Handover(is_stored=True)]
)
def test_nothing_else_is_pushed(bench: Bench, handover: Handover | None) -> None:
    request = bench.request(4, handover=handover)
    matched = bench.side.match(request, 0)
    while matched is None:
        bench.clock.now_s += LONGEST_WAIT_S
        matched = bench.side.match(request, 0)
    plan = bench.schedule(request, matched)
    assert len(plan.saves) == 4
    assert (plan.pushed, bench.store.pushes) == ([], [])


# ---- hand-over: what prefill leaves is held until decode has read it

HOLD = 77


def test_a_prefill_leg_waits_for_room_and_holds_nothing_meanwhile(bench: Bench) -> None:
    request = bench.request(4, handover=Handover(leaves_tail=True, hold=HOLD))
    bench.store.room = 3
    for _ in range(3):
        assert bench.side.match(request, 0) is None
        bench.side.plan(Bench._output(None, 0))
        assert (bench.store.reservations, bench.store.leases, bench.store.holds) == ({}, {}, set())
        bench.clock.now_s += ASK_FOR_ROOM_S
    bench.store.room = 4
    assert bench.side.match(request, 0) == 0
    assert bench.store.holds == {HOLD}
    assert bench.counted("waited_for_room") == 1


GAUGES = {"prompts": 2, "tokens": 2 * (4 * BLOCK + 1), "held_blocks": 5, "blocks": 1000}


@pytest.mark.parametrize("ends", ["there is room", "they are aborted"])
def test_the_front_door_knows_what_waits_for_room(bench: Bench, ends: str) -> None:
    legs = [bench.request(4, handover=Handover(leaves_tail=True, hold=n)) for n in (1, 2)]
    bench.store.held = {bytes([n]) * 16: HIT for n in range(5)}
    bench.store.room = 3
    for leg in legs:
        assert bench.side.match(leg, 0) is None
    bench.pass_over()
    bench.clock.now_s += 2.0
    for leg in legs:
        assert bench.side.match(leg, 0) is None
    bench.pass_over()
    assert {name: bench.counted(f"room_{name}") for name in GAUGES} == GAUGES
    assert bench.counted("room_block_bytes") == bench.store.slot_bytes
    assert bench.counted("room_longest_s") == pytest.approx(2.0)
    assert bench.counted("room_wait_seconds") == pytest.approx(2 * 2.0)
    bench.clock.now_s += 1.0
    bench.store.room = 1000
    for leg in legs:
        if ends == "there is room":
            assert bench.side.match(leg, 0) == 0
        else:
            bench.side.finished(leg.request_id)
    bench.pass_over()
    for name in (*GAUGES, "block_bytes", "longest_s"):
        assert bench.counted(f"room_{name}") == 0, name
    assert bench.counted("room_wait_seconds") == pytest.approx(2 * 3.0)


@pytest.mark.parametrize(("room", "num_slots"), [(3, 1000), (3, 3)])
def test_it_does_not_wait_for_ever_nor_for_what_cannot_be(
    bench: Bench, room: int, num_slots: int
) -> None:
    request = bench.request(4, handover=Handover(leaves_tail=True, hold=HOLD))
    bench.store.room, bench.store.num_slots = room, num_slots
    if num_slots > 4:
        assert bench.side.match(request, 0) is None
        bench.clock.now_s += ROOM_S
    assert bench.side.match(request, 0) == 0
    assert len(bench.store.reservations) == 3


def test_what_a_prefill_leg_leaves_is_held_until_the_decode_leg_has_read_it(bench: Bench) -> None:
    leg = bench.request(4, handover=Handover(leaves_tail=True, hold=HOLD))
    assert bench.side.match(leg, 0) == 0
    bench.schedule(leg, 0)
    leg.append_output_token_ids(1)
    bench.side.finished(leg.request_id)
    assert bench.store.holds == {HOLD}

    decode = bench.request(4, handover=Handover(tokens=4 * BLOCK, hold=HOLD))
    bench.hold(decode, [HIT] * 4)
    matched = bench.side.match(decode, 0)
    assert matched == 4 * BLOCK
    plan = bench.schedule(decode, matched)
    assert bench.store.holds == {HOLD}
    bench.side.step_done(StepResult(plan.step))  # type: ignore[attr-defined]
    assert not bench.store.holds


def test_what_is_held_for_several_sequences_is_held_until_the_last_has_read_it(
    bench: Bench,
) -> None:
    leg = bench.request(4, handover=Handover(leaves_tail=True, hold=HOLD, num_readers=3))
    assert bench.side.match(leg, 0) == 0
    bench.schedule(leg, 0)
    leg.append_output_token_ids(1)
    bench.side.finished(leg.request_id)
    for reader in (1, 1, 0, 2):  # of the second one's instances the first has died
        assert bench.store.holds == {HOLD}
        handover = Handover(tokens=4 * BLOCK, hold=HOLD, reader=reader)
        decode = bench.request(4, handover=handover)
        bench.hold(decode, [HIT] * 4)
        plan = bench.schedule(decode, bench.side.match(decode, 0) or 0)
        bench.side.step_done(StepResult(plan.step))  # type: ignore[attr-defined]
    assert not bench.store.holds


def test_a_prefill_leg_that_is_aborted_holds_nothing(bench: Bench) -> None:
    leg = bench.request(4, handover=Handover(leaves_tail=True, hold=HOLD))
    assert bench.side.match(leg, 0) == 0
    bench.schedule(leg, 0)
    bench.side.finished(leg.request_id)
    assert not bench.store.holds


def test_a_pushed_prompt_is_held_at_both_stores_until_decode_has_read_it(bench: Bench) -> None:
    handover = Handover(leaves_tail=True, push_to="b:1", hold=HOLD, num_readers=2)
    leg = bench.request(4, handover=handover)
    assert bench.side.match(leg, 0) == 0
    bench.schedule(leg, 0)
    assert (bench.store.holds, bench.store.pushed_holds) == ({HOLD}, [(HOLD, 2)])
    bench.side.finished(leg.request_id)  # it is aborted
    assert (bench.store.holds, bench.store.told_also) == (set(), "b:1")

    handover = Handover(tokens=4 * BLOCK, hold=HOLD, reader=1, pushed_from="a:1")
    decode = bench.request(4, handover=handover)
    bench.hold(decode, [HIT] * 4)
    plan = bench.schedule(decode, bench.side.match(decode, 0) or 0)
    bench.side.step_done(StepResult(plan.step))  # type: ignore[attr-defined]
    assert bench.store.told_also == "a:1"


@pytest.mark.parametrize(("pushed_from", "waits"), [("a:1", True), ("", False)])
def test_a_decode_leg_waits_for_room_for_what_was_not_taken_of_a_push(
    bench: Bench, pushed_from: str, waits: bool
) -> None:
    """Computed again would be what has been computed at the other machine."""
    handover = Handover(tokens=4 * BLOCK, hold=HOLD, pushed_from=pushed_from)
    decode = bench.request(4, handover=handover)
    bench.store.unfetched = 4
    assert bench.side.match(decode, 0) == (None if waits else 0)
    if waits:
        bench.pass_over()
        assert (bench.store.reservations, bench.store.leases) == ({}, {})
        assert bench.counted("room_prompts") == 1
        bench.store.unfetched = 0
        bench.hold(decode, [HIT] * 4)
        bench.clock.now_s += ASK_FOR_ROOM_S
        assert bench.side.match(decode, 0) == 4 * BLOCK


# ---- what the store counts and keeps


def test_the_blocks_of_a_request_are_counted_once(bench: Bench) -> None:
    request = bench.request(4)
    bench.store.undecided = 1
    assert bench.side.match(request, 0) is None
    bench.pass_over()
    bench.clock.now_s += ASK_AGAIN_S
    for _ in range(3):  # it is matched and not scheduled
        assert bench.side.match(request, 0) == 0
        bench.pass_over()
    assert bench.store.counted == 2 * request.block_hashes, "the store does not count the first"


@pytest.mark.parametrize(
    ("handover", "output"), [(Handover(tokens=4 * BLOCK), ()), (None, [7] * 20)]
)
def test_what_an_earlier_leg_has_asked_for_is_not_counted(
    bench: Bench, handover: Handover | None, output: Sequence[int]
) -> None:
    bench.side.match(bench.request(4, handover=handover, output=output), 0)
    assert bench.store.counted == []


@pytest.mark.parametrize("leaves_tail", [True, False])
def test_a_request_has_its_blocks_kept_from_the_start_and_from_its_end_on(
    bench: Bench, leaves_tail: bool
) -> None:
    request = bench.request(4, handover=Handover(leaves_tail=leaves_tail, keep_s=60.0))
    assert bench.side.match(request, 0) == 0
    assert bench.store.kept == []
    prompt = [*request.block_hashes]
    bench.schedule(request, 0)
    assert bench.store.kept == [(prompt, 60.0)]
    request.append_output_token_ids(7)  # the double has further hashes for it
    bench.side.finished(request.request_id)
    assert bench.store.kept == [(prompt, 60.0), (request.block_hashes, 60.0)]


def test_a_request_that_is_aborted_before_its_first_token_is_not_kept_again(bench: Bench) -> None:
    request = bench.request(4, handover=Handover(keep_s=60.0))
    bench.schedule(request, bench.side.match(request, 0) or 0)
    bench.side.finished(request.request_id)
    assert len(bench.store.kept) == 1
