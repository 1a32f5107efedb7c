"""The SSD tier when things go wrong below it, and across restarts."""

from __future__ import annotations

import logging
import os
import random
import select
from pathlib import Path

import numpy as np

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, Completion, TierOutcome
from banaserve.kvstore.tiers.ssd.check import check_folder
from banaserve.kvstore.tiers.ssd.device import aligned_bytes
from banaserve.kvstore.tiers.ssd.folder import Folder
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES
from banaserve.kvstore.tiers.ssd.recovery import recover
from banaserve.kvstore.tiers.ssd.tier import SsdTier

MIB = 2**20
BLOCK_BYTES = 20_000
DEADLINE_S = 20.0


def key(number: int, namespace: int = 0) -> bytes:
    return namespace.to_bytes(16, "big") + number.to_bytes(16, "big")


def content(number: int, num_bytes: int = BLOCK_BYTES) -> BlockBytes:
    block = aligned_bytes(num_bytes)
    block[:] = np.frombuffer(random.Random(number).randbytes(num_bytes), np.uint8)
    return block


def poll(tier: SsdTier) -> list[Completion]:
    assert select.select([tier.fd], [], [], DEADLINE_S)[0], "the tier is silent"
    ended = tier.poll()
    tier.check()
    return ended


def end_of(tier: SsdTier, ticket: int | None) -> TierOutcome:
    assert ticket is not None
    ended: list[Completion] = []
    while not ended:
        ended = poll(tier)
    assert [completion.ticket for completion in ended] == [ticket]
    return ended[0].outcome


def store(tier: SsdTier, number: int, parent: int | None = None, namespace: int = 0) -> None:
    name = BlockName(key(number, namespace), None if parent is None else key(parent, namespace))
    while (ticket := tier.submit_store(name, content(number))) is None:
        poll(tier)
    assert end_of(tier, ticket) is TierOutcome.DONE


def load(tier: SsdTier, number: int) -> TierOutcome:
    target = aligned_bytes(BLOCK_BYTES)
    outcome = end_of(tier, tier.submit_load(key(number), target))
    assert outcome is not TierOutcome.DONE or bytes(target) == bytes(content(number))
    return outcome


def hits(tier: SsdTier, *numbers: int) -> list[int]:
    states = tier.lookup([key(number) for number in numbers])
    return [number for number, state in zip(numbers, states, strict=True) if state is Lookup.HIT]


def find(folder: Path, number: int) -> tuple[Path, int]:
    """Where the bytes of a block lie."""
    for path in folder.glob("segment-*"):
        start = path.read_bytes().find(bytes(content(number)))
        if start >= 0:
            return path, start
    raise AssertionError("it is nowhere")


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_restart_finds_everything_and_its_order(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 4 * MIB)
    for number in range(5):
        store(tier, number, number - 1 if number else None)
    tier.close()
    tier = SsdTier(tmp_path, 4 * MIB)
    assert hits(tier, *range(6)) == [0, 1, 2, 3, 4]
    assert all(load(tier, number) is TierOutcome.DONE for number in range(5))
    assert tier.stats().corrupt == 0
    number = 100
    while not tier.stats().evictions:
        store(tier, number)
        number += 1
    left = hits(tier, *range(5))
    assert left == list(range(len(left)))
    assert len(left) < 5
    tier.close()


def test_a_smaller_budget_makes_room_at_once(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 8 * MIB)
    for number in range(200):
        store(tier, number)
    tier.close()
    tier = SsdTier(tmp_path, MIB)
    while not tier.is_idle or tier.stats().used_bytes > MIB:
        poll(tier)
    assert tier.stats().evictions > 100
    assert hits(tier, 199) == [199]
    tier.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("segment-*")) <= MIB


def test_a_flipped_bit_is_found_on_every_read(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    store(tier, 2)
    assert load(tier, 1) is TierOutcome.DONE
    path, start = find(tmp_path, 1)
    overwrite(path, start + 7777, bytes([content(1)[7777] ^ 1]))
    assert load(tier, 1) is TierOutcome.CORRUPT
    assert tier.lookup([key(1)]) == [Lookup.MISS]
    assert tier.submit_load(key(1), aligned_bytes(BLOCK_BYTES)) is None
    assert tier.stats().corrupt == 1
    assert load(tier, 2) is TierOutcome.DONE
    store(tier, 1)
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()


def test_a_file_that_lost_its_end(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    store(tier, 2)
    path, start = find(tmp_path, 2)
    os.truncate(path, start + PAGE_BYTES)
    assert load(tier, 2) is TierOutcome.CORRUPT
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()


def break_fd(tier: SsdTier, number: int) -> None:
    """Make every read of the segment of a block fail with EIO, every write with EBADF."""
    block = tier._blocks.get(key(number))
    assert block is not None
    broken = os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(broken, block.segment.fd)
    os.close(broken)


def test_a_disk_that_cannot_be_read(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 4 * MIB)
    store(tier, 1)
    break_fd(tier, 1)
    assert load(tier, 1) is TierOutcome.FAILED
    assert tier.lookup([key(1)]) == [Lookup.HIT]
    assert tier.stats().failures == 1
    tier.close()
    SsdTier(tmp_path, 4 * MIB).close()


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    seconds = 0.0
    tier = SsdTier(tmp_path, 4 * MIB, now=lambda: seconds)
    store(tier, 1)
    break_fd(tier, 1)
    ticket = tier.submit_store(BlockName(key(2), None), content(2))
    assert end_of(tier, ticket) is TierOutcome.FAILED
    assert tier.lookup([key(2)]) == [Lookup.MISS]
    assert "cannot use" in tier.stats().problem
    assert tier.submit_store(BlockName(key(2), None), content(2)) is None
    seconds += 60
    # Into another segment, which is in order.
    store(tier, 2)
    assert load(tier, 2) is TierOutcome.DONE
    assert tier.stats().problem == ""
    tier.close()
    tier = SsdTier(tmp_path, 4 * MIB)
    assert hits(tier, 1, 2) == [1, 2]
    tier.close()


def test_making_room_gets_past_what_cannot_be_read(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(4):
        store(tier, number)
    store(tier, 4)
    break_fd(tier, 0)
    # Used again and again, so that they are the last to be evicted.
    for number in range(10, 300):
        store(tier, number)
        for kept in hits(tier, 1, 3):
            block = tier._blocks.get(key(kept))
            assert block is not None
            tier._blocks.touch(block)
    assert hits(tier, 0, 1, 2, 3, 4) == []
    assert tier.stats().failures > 0
    assert load(tier, 299) is TierOutcome.DONE
    tier.close()


def test_a_damaged_header_costs_its_block_alone(tmp_path: Path, caplog) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(3):
        store(tier, number)
    tier.close()
    path, start = find(tmp_path, 1)
    overwrite(path, start - PAGE_BYTES + 20, b"\xff")
    report = check_folder(tmp_path)
    assert (report.num_ok, report.num_corrupt, report.num_torn) == (2, 1, 0)
    tier = SsdTier(tmp_path, MIB)
    assert "1 damaged places" in caplog.text
    assert tier.stats().corrupt == 1
    assert hits(tier, *range(3)) == [0, 2]
    assert load(tier, 2) is TierOutcome.DONE
    tier.close()
    assert check_folder(tmp_path).is_clean


def test_a_clear_that_cannot_be_written_down_says_so(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 0)
    (tmp_path / "cleared.tmp").mkdir()
    assert tier.clear() == 1
    assert tier.stats().num_blocks == 0
    assert "a restart will find" in tier.stats().keeps
    (tmp_path / "cleared.tmp").rmdir()
    tier.clear()
    assert tier.stats().keeps == ""
    tier.close()


def test_clear_outlives_a_kill(tmp_path: Path) -> None:
    folder, crashed = tmp_path / "log", tmp_path / "crashed"
    tier = SsdTier(folder, MIB)
    for number in range(3):
        store(tier, number)
    images = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert tier.clear() == 3
    # The files as they were, with nothing but what clear itself wrote before it returned.
    crashed.mkdir()
    for name, data in images.items():
        (crashed / name).write_bytes(data)
    (crashed / "cleared").write_bytes((folder / "cleared").read_bytes())
    tier.close()
    tier = SsdTier(crashed, MIB)
    assert hits(tier, *range(3)) == []
    store(tier, 1)
    tier.close()
    tier = SsdTier(crashed, MIB)
    assert hits(tier, *range(3)) == [1]
    tier.close()


def test_check_counts_by_namespace_while_a_store_runs(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(3):
        store(tier, number, namespace=7)
    store(tier, 9, namespace=8)
    report = check_folder(tmp_path)
    assert report.in_use
    assert report.is_clean
    assert report.blocks_by_namespace == {f"{7:032x}": 3, f"{8:032x}": 1}
    tier.close()
    report = check_folder(tmp_path)
    assert not report.in_use
    assert (report.num_ok, report.num_segments) == (4, 1)


def test_check_names_a_corrupt_block(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    store(tier, 2)
    tier.close()
    path, start = find(tmp_path, 1)
    overwrite(path, start, b"\0\0\0\0")
    report = check_folder(tmp_path)
    assert (report.num_ok, report.num_corrupt, report.is_clean) == (1, 1, False)
    assert report.problems == [f"corrupt: block {key(1).hex()} at 0 of {path.name}"]


def test_a_long_scan_reports_its_progress(tmp_path: Path, caplog) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(3):
        store(tier, number)
    tier.close()
    caplog.set_level(logging.INFO)
    seconds = iter(range(1000))
    folder = Folder(tmp_path)
    recovered = recover(folder, lambda: float(next(seconds)))
    for segment in recovered.segments:
        os.close(segment.fd)
    folder.close()
    assert "reading the SSD tier's index: 0 of 1 files" in caplog.text


def test_the_loop_is_told_when_room_was_made(tmp_path: Path) -> None:
    """Whoever waits for fd after a refusal gets further, however full the log is."""
    tier = SsdTier(tmp_path, MIB, queue_depth=1)
    for number in range(300):
        store(tier, number)
    assert tier.stats().stores == 300
    tier.close()


def test_a_store_under_way_is_not_moved_when_its_segment_is_cleaned(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB, queue_depth=8)
    store(tier, 0)
    write, held = tier._device.write, []
    tier._device.write = lambda *job: held.append(job)  # type: ignore[method-assign]
    ticket = tier.submit_store(BlockName(key(1), None), content(1))
    while not held:
        assert not poll(tier)
    tier._device.write = write  # type: ignore[method-assign]
    block = tier._blocks.get(key(1))
    assert block is not None
    # Its segment is sealed and emptied around it, and room is short.
    for number in range(2, 200):
        store(tier, number)
    assert not block.segment.is_open
    assert block.segment.live_bytes == block.record_bytes
    write(*held[0])
    assert end_of(tier, ticket) is TierOutcome.DONE
    assert load(tier, 1) is TierOutcome.DONE
    assert (tier.stats().corrupt, tier.stats().failures) == (0, 0)
    # What has been written may be moved.
    for number in range(200, 400):
        store(tier, number)
        if tier._blocks.get(key(1)) is block:
            tier._blocks.touch(block)
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()
