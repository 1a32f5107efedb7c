"""What the store answers, without sockets: fingerprints, namespaces, generations."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from banaserve.base.errors import ProtocolError, UserError
from banaserve.kvstore import wire
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.pushes.pushing import Pushing
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.daemon.tiering.tiering import Tiering
from banaserve.kvstore.fingerprint import PAGE_BYTES, Fingerprint
from banaserve.kvstore.pool import POISON, Board, SlotPool
from banaserve.kvstore.sizes import format_size, parse_size
from fingerprints import FINGERPRINT

POOL_BYTES = 8 * PAGE_BYTES
KEY = b"k" * 32
OTHER = b"o" * 32


made = ExitStack()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with made:
        yield


def make_pool() -> SlotPool:
    pool = SlotPool(POOL_BYTES)
    made.callback(pool.close)
    return pool


def make_service(
    pool: SlotPool | None = None,
    *,
    poisons: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> StoreService:
    board, selector = Board(POOL_BYTES), selectors.DefaultSelector()
    carved = CarvedPool(pool or make_pool(), board, poisons=poisons)
    tiering = Tiering([], carved, selector)
    made.callback(board.close)
    made.callback(selector.close)
    made.callback(tiering.close, 0.0)
    pushing = Pushing(b"", selector, carved)
    made.callback(pushing.close)
    return StoreService(carved, tiering, pushing, lambda _: None, clock)


def changed(**fields: Any) -> Fingerprint:
    return msgspec.structs.replace(FINGERPRINT, **fields)


def hello(
    fingerprint: Fingerprint | None = FINGERPRINT, name: str = "instance"
) -> wire.ClientHello:
    return wire.ClientHello(1, wire.PROTOCOL_VERSION, name, fingerprint)


def join(service: StoreService, session_id: int, fingerprint: Fingerprint | None) -> wire.Welcome:
    reply = service.greet(session_id, hello(fingerprint, f"instance {session_id}"))
    assert isinstance(reply, wire.Welcome), reply
    return reply


def refusal(service: StoreService, session_id: int, fingerprint: Fingerprint) -> str:
    reply = service.greet(session_id, hello(fingerprint, f"instance {session_id}"))
    assert isinstance(reply, wire.ClientRefused)
    assert reply.because_of_fingerprint
    return reply.message


def exchange(
    service: StoreService, session_id: int, acquire: list[bytes], reserve: list[bytes]
) -> wire.SlotsGranted:
    request = wire.ExchangeSlots(2, acquire, [(key, None) for key in reserve])
    reply = service.answer(session_id, request)
    assert isinstance(reply, wire.SlotsGranted)
    return reply


def write(service: StoreService, session_id: int, key: bytes) -> None:
    (reserved,) = exchange(service, session_id, [], [key]).reserved
    assert reserved is not None
    commit = wire.Commit(3, service.stats().generation, [reserved[1]], 0)
    assert service.answer(session_id, commit) == wire.Committed(3, True)


def test_blocks_are_shared_between_equal_fingerprints() -> None:
    service = make_service()
    join(service, 1, FINGERPRINT)
    join(service, 2, FINGERPRINT)
    write(service, 1, KEY)
    assert len(exchange(service, 2, [KEY], []).slots) == 1


def test_a_block_is_whole_when_all_that_write_it_have_and_whoever_reads_it() -> None:
    service = make_service()
    pair = wire.ClientHello(1, wire.PROTOCOL_VERSION, "two ranks", FINGERPRINT, 2)
    assert isinstance(service.greet(1, pair), wire.Welcome)
    join(service, 2, FINGERPRINT)
    (reserved,) = exchange(service, 1, [], [KEY]).reserved
    assert reserved is not None
    generation = service.stats().generation
    for part, is_whole in ((1, False), (0, True)):
        commit = wire.Commit(3, generation, [reserved[1]], part)
        assert service.answer(1, commit) == wire.Committed(3, True)
        assert bool(exchange(service, 2, [KEY], []).slots) == is_whole
    # Nobody else has more ranks for that.
    write(service, 2, OTHER)
    assert len(exchange(service, 1, [OTHER], []).slots) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"salt": "tenant"},
        {"revision": "other"},
        {"model": "other", "probe": "11"},
        {"layout": "other"},
        {"num_layers": 1, "num_parts": 2},
    ],
)
def test_other_fingerprints_share_the_pool_but_no_blocks(fields: dict[str, Any]) -> None:
    service = make_service()
    first = join(service, 1, FINGERPRINT)
    second = join(service, 2, changed(**fields))
    assert first.generation == second.generation
    write(service, 1, KEY)
    assert exchange(service, 2, [KEY], []).slots == []
    assert exchange(service, 1, [KEY], []).slots != []


def test_another_hash_probe_is_refused_loudly() -> None:
    service = make_service()
    join(service, 1, FINGERPRINT)
    message = refusal(service, 2, changed(probe="dead"))
    assert "instance 1" in message
    assert "probe" in message
    assert service.stats().refused_clients == 1
    service.leave(1)
    join(service, 2, changed(probe="dead"))


def test_another_layout_of_the_same_model_is_counted() -> None:
    service = make_service()
    join(service, 1, FINGERPRINT)
    join(service, 2, changed(isa="avx512"))
    join(service, 3, changed(salt="tenant"))
    assert service.stats().layout_mismatches == 1


def test_a_block_larger_than_the_pool_is_refused() -> None:
    service = make_service()
    assert "larger --kv-store-size" in refusal(service, 1, changed(page_bytes=POOL_BYTES))


def test_another_slot_size_waits_until_nobody_uses_the_present_one() -> None:
    service = make_service()
    generation = join(service, 1, FINGERPRINT).generation
    write(service, 1, KEY)
    larger = changed(page_bytes=4096)
    assert "a store of its own" in refusal(service, 2, larger)
    assert exchange(service, 1, [KEY], []).lease_id is not None
    assert service.leave(1) is not None
    assert "a store of its own" in refusal(service, 2, larger)
    service.drop(1)
    welcome = join(service, 2, larger)
    assert welcome.generation != generation
    assert welcome.slot_bytes == larger.slot_bytes
    stats = service.stats()
    assert (stats.num_slots, stats.used_slots, stats.commits) == (4, 0, 1)


def test_messages_of_an_old_generation_change_nothing() -> None:
    service = make_service()
    join(service, 1, FINGERPRINT)
    write(service, 1, KEY)
    lease_id = exchange(service, 1, [KEY], [b"n" * 32]).lease_id
    assert lease_id is not None
    old = service.stats().generation ^ 1
    assert service.answer(1, wire.Commit(4, old, [2], 0)) == wire.Committed(4, False)
    assert service.answer(1, wire.ReleaseLeases(old, lease_id)) is None
    assert service.answer(1, wire.Abandon(old, [2], None)) is None
    stats = service.stats()
    assert (stats.num_leases, stats.writing_slots) == (1, 1)


def test_what_a_lost_connection_holds_stays_until_it_is_dropped() -> None:
    service = make_service()
    join(service, 1, FINGERPRINT)
    exchange(service, 1, [], [KEY])
    assert service.leave(1) == "instance 1"
    assert service.stats().quarantined_slots == 1
    service.drop(1)
    stats = service.stats()
    assert (stats.quarantined_slots, stats.used_slots, stats.clients) == (0, 0, 0)


@pytest.mark.parametrize(
    "request_",
    [wire.LookupKeys(2, [KEY]), wire.ExchangeSlots(2, [], []), wire.Commit(2, 1, [1], 0)],
)
def test_an_operator_may_not_touch_blocks(request_: wire.Request) -> None:
    service = make_service()
    with pytest.raises(ProtocolError, match="before Hello"):
        service.answer(1, request_)
    join(service, 1, None)
    with pytest.raises(ProtocolError, match="without a fingerprint"):
        service.answer(1, request_)
    assert isinstance(service.answer(1, wire.GetStats(2)), wire.Stats)


def test_hello_is_said_once_and_in_the_same_version() -> None:
    service = make_service()
    reply = service.greet(1, wire.ClientHello(1, wire.PROTOCOL_VERSION + 1, "new", None))
    assert isinstance(reply, wire.ClientRefused)
    assert "version" in reply.message
    join(service, 1, FINGERPRINT)
    with pytest.raises(ProtocolError):
        service.greet(1, hello())


def test_freed_and_unused_memory_is_poisoned() -> None:
    pool = make_pool()
    service = make_service(pool, poisons=True)
    join(service, 1, FINGERPRINT)
    memory = pool.part(0, POOL_BYTES)
    assert (memory == POISON).all()
    exchange(service, 1, [], [KEY, b"n" * 32])
    memory[:] = 0
    service.answer(1, wire.Abandon(service.stats().generation, [2], None))
    assert (memory[4096:8192] == POISON).all()
    assert not memory[:4096].any()
    assert not memory[8192:].any()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 0},
        {"page_bytes": -1},
        {"num_parts": 10**6},
        {"num_layers": 2**30, "page_bytes": 2**30},
        {"model": "x" * 10**5},
    ],
)
def test_fingerprints_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not in|longer than|larger than"):
        changed(**fields)


def test_a_layer_of_a_part_is_one_run() -> None:
    fingerprint = changed(num_layers=3, num_parts=2, page_bytes=1000)
    offsets = [fingerprint.offset_bytes(layer, part) for layer in range(3) for part in range(2)]
    assert offsets == [0, 1000, 2000, 3000, 4000, 5000]
    assert fingerprint.slot_bytes == 2 * PAGE_BYTES


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("2GiB", 2**31), ("512MB", 512 * 10**6), (" 1.5 kib ", 1536), ("1B", 1)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "0", "0.1", "1e9", "nan", "9" * 400])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UserError):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2 GiB")]
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


def test_what_a_request_asks_for_is_counted_once_and_by_namespace() -> None:
    service = make_service()
    for session_id, fingerprint in ((1, FINGERPRINT), (2, changed(revision="other"))):
        join(service, session_id, fingerprint)
    for session_id, is_repeated in ((1, False), (1, True), (2, False)):
        service.answer(session_id, wire.ExchangeSlots(2, [KEY], [], is_repeated=is_repeated))
    write(service, 1, OTHER)
    exchange(service, 1, [OTHER, KEY], [])
    stats = service.stats()
    assert (stats.asked_blocks, stats.found_blocks) == (4, 1)
    assert stats.new_blocks == pytest.approx(2.0, abs=0.01)


def test_a_request_keeps_the_blocks_of_its_own_namespace_for_a_time() -> None:
    clock = SimpleNamespace(now_s=100.0)
    service = make_service(clock=lambda: clock.now_s)
    generation = join(service, 1, FINGERPRINT).generation
    join(service, 2, changed(revision="other"))
    write(service, 1, KEY)
    service.answer(2, wire.KeepBlocks(generation, [KEY], 30.0))
    service.answer(1, wire.KeepBlocks(generation + 1, [KEY], 30.0))
    assert service.stats().kept_slots == 0
    service.answer(1, wire.KeepBlocks(generation, [KEY], 30.0))
    for now_s, num_kept in ((129.9, 1), (130.0, 0)):
        clock.now_s = now_s
        exchange(service, 1, [], [])
        assert service.stats().kept_slots == num_kept
