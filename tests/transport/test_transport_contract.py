"""What every transport promises, between two real processes."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transport_harness as harness
from banaserve.transport.errors import RefusedError, StaleEpochError, TransportError
from banaserve.transport.memory import PAGE_BYTES, SLICE_BYTES, Memory
from depth import num_examples

pytestmark = pytest.mark.deep

side, doomed = harness.side, harness.doomed
WAIT_S, REGION_BYTES = harness.WAIT_S, harness.REGION_BYTES
digest, random_bytes = harness.digest, harness.random_bytes


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 10 * 2**20, 2 * SLICE_BYTES + 1])
def test_one_run_of_any_size_arrives_and_comes_back(side, num_bytes):
    key, remote = side.open_new(num_bytes=num_bytes)
    sent, back = random_bytes(num_bytes), np.zeros(num_bytes, np.uint8)
    remote.warm(0, num_bytes)
    remote.submit_write(Memory.of(sent), [0], [0], num_bytes, 1).wait(WAIT_S)
    assert side.peer("digest", key, first=0, end=num_bytes) == digest(sent)
    remote.submit_read(Memory.of(back), [0], [0], num_bytes, 1).wait(WAIT_S)
    assert np.array_equal(sent, back)
    remote.close()


@pytest.mark.parametrize(("offsets", "num_bytes"), [([], 8), ([0, 5], 0), ([REGION_BYTES], 0)])
def test_nothing_to_copy_is_a_transfer_too(side, offsets, num_bytes):
    _, remote = side.open_new()
    local = Memory.of(np.zeros(REGION_BYTES, np.uint8))
    ticket = remote.submit_write(local, offsets, offsets, num_bytes, 1)
    ticket.wait(WAIT_S)
    assert ticket.poll()
    with pytest.raises(StaleEpochError):
        remote.submit_write(local, offsets, offsets, num_bytes, 2).wait(WAIT_S)
    remote.close()


RUNS = st.integers(0, 5000).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.integers(0, REGION_BYTES // 5000 - 1), max_size=20, unique=True)
    )
)


def test_random_plans_leave_what_a_model_of_the_region_holds(side):
    key, remote = side.open_new()
    model = np.zeros(REGION_BYTES, np.uint8)
    local = random_bytes(REGION_BYTES)

    @settings(max_examples=num_examples(25))
    @given(runs=RUNS, shift=st.integers(0, 100), writes=st.booleans(), seed=st.integers(0, 99))
    def run(runs, shift, writes, seed):
        num_bytes, places = runs
        remote_offsets = np.array(places, np.int64) * 5000
        local_offsets = np.random.default_rng(seed).permutation(remote_offsets) + shift
        submit = remote.submit_write if writes else remote.submit_read
        submit(Memory.of(local), local_offsets, remote_offsets, num_bytes, 1).wait(WAIT_S)
        for ours, theirs in zip(local_offsets, remote_offsets, strict=True):
            if writes:
                model[theirs : theirs + num_bytes] = local[ours : ours + num_bytes]
            else:
                assert np.array_equal(
                    model[theirs : theirs + num_bytes], local[ours : ours + num_bytes]
                )
        assert side.peer("digest", key, first=0, end=REGION_BYTES) == digest(model)

    run()
    remote.close()


@pytest.mark.parametrize(
    ("local_offsets", "remote_offsets", "num_bytes"),
    [
        ([0], [REGION_BYTES - 7], 8),
        ([0], [-1], 8),
        ([0], [2**63 - 1], 8),
        ([2**64 - 1], [0], 8),
        ([REGION_BYTES - 7], [0], 8),
        ([-1], [0], 8),
        ([0, 8], [0], 8),
        ([0.5], [0], 8),
        ([[0]], [[0]], 8),
        ([0], [0], -1),
        ([0], [0], REGION_BYTES + 1),
        ([0], [0], 2**63),
    ],
)
def test_what_leaves_the_region_or_the_local_memory_is_refused(
    side, local_offsets, remote_offsets, num_bytes
):
    key, remote = side.open_new()
    local = Memory.of(np.full(REGION_BYTES, 7, np.uint8))
    for submit in (remote.submit_write, remote.submit_read):
        with pytest.raises(RefusedError):
            submit(local, local_offsets, remote_offsets, num_bytes, 1)
    nothing = digest(np.zeros(REGION_BYTES, np.uint8))
    assert side.peer("digest", key, first=0, end=REGION_BYTES) == nothing
    remote.close()


def test_a_read_into_read_only_memory_is_refused(side):
    _, remote = side.open_new()
    local = np.zeros(8, np.uint8)
    local.flags.writeable = False
    with pytest.raises(RefusedError):
        remote.submit_read(Memory.of(local), [0], [0], 8, 1)
    remote.submit_write(Memory.of(local), [0], [0], 8, 1).wait(WAIT_S)
    remote.close()


def test_the_offering_side_checks_bounds_itself(side):
    _, true = side.peer.offer()
    lie = msgspec.structs.replace(true, num_bytes=true.num_bytes + PAGE_BYTES)
    local = Memory.of(np.zeros(PAGE_BYTES, np.uint8))

    def copy():
        remote = side.transport.open(lie, WAIT_S)
        remote.submit_write(local, [0], [true.num_bytes], PAGE_BYTES, 1).wait(WAIT_S)

    with pytest.raises(RefusedError):
        copy()


def test_only_the_present_epoch_is_accepted(side):
    key, remote = side.open_new(epoch=3)
    local = Memory.of(random_bytes(100))
    remote.submit_write(local, [0], [0], 100, 3).wait(WAIT_S)
    for epoch in (2, 4):
        with pytest.raises(StaleEpochError):
            remote.submit_write(local, [0], [50], 50, epoch).wait(WAIT_S)
    assert side.peer("advance", key, epoch=2) == "RefusedError"
    assert side.peer("advance", key, epoch=4) == "done"
    with pytest.raises(StaleEpochError):
        remote.submit_read(local, [0], [0], 100, 3).wait(WAIT_S)
    assert side.peer("digest", key, first=0, end=100) == digest(random_bytes(100))
    remote.submit_write(local, [0], [0], 100, 4).wait(WAIT_S)
    remote.close()


def test_released_pages_read_as_zero_and_can_be_written_again(side):
    key, remote = side.open_new(num_bytes=8 * PAGE_BYTES)
    side.peer("fill", key, value=9)
    freed = side.peer("release", key, first=PAGE_BYTES - 1, num_bytes=2 * PAGE_BYTES + 1)
    assert freed == 2 * PAGE_BYTES
    seen = np.zeros(8 * PAGE_BYTES, np.uint8)
    remote.submit_read(Memory.of(seen), [0], [0], seen.size, 1).wait(WAIT_S)
    assert not seen[PAGE_BYTES : 3 * PAGE_BYTES].any()
    assert (seen[:PAGE_BYTES] == 9).all()
    assert (seen[3 * PAGE_BYTES :] == 9).all()
    sent = Memory.of(random_bytes(PAGE_BYTES))
    remote.submit_write(sent, [0], [PAGE_BYTES], PAGE_BYTES, 1).wait(WAIT_S)
    assert side.peer("digest", key, first=PAGE_BYTES, end=2 * PAGE_BYTES) == digest(sent.view())
    assert side.peer("release", key, first=0, num_bytes=9 * PAGE_BYTES) == "RefusedError"
    remote.close()


def test_a_region_that_is_closed_refuses_and_can_be_offered_again(side):
    key, old = side.peer.offer()
    remote = side.transport.open(old, WAIT_S)
    local = Memory.of(random_bytes(64))
    side.peer("close", key)
    with pytest.raises(TransportError):
        remote.submit_write(local, [0], [0], 64, 1).wait(WAIT_S)
    with pytest.raises(RefusedError):
        side.transport.open(old, WAIT_S)
    again_key, again = side.open_new()
    again.submit_write(local, [0], [0], 64, 1).wait(WAIT_S)
    assert side.peer("digest", again_key, first=0, end=64) == digest(local.view())
    assert again_key != key
    remote.close()
    again.close()


def test_two_threads_submit_at_once(side):
    key, remote = side.open_new(num_bytes=200 * 10_000)
    sent = random_bytes(200 * 10_000)
    failures = []

    def half(first):
        try:
            tickets = [
                remote.submit_write(Memory.of(sent), [i * 10_000], [i * 10_000], 10_000, 1)
                for i in range(first, 200, 2)
            ]
            for ticket in tickets:
                ticket.wait(WAIT_S)
        except TransportError as error:
            failures.append(error)

    threads = [threading.Thread(target=half, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert side.peer("digest", key, first=0, end=sent.size) == digest(sent)
    remote.close()
