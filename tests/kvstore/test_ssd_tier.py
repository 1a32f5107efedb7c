"""The SSD tier when things go wrong below it, and across restarts."""

from __future__ import annotations

import errno
import logging
import os
import random
import select
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, Completion, TierOutcome
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.folder import Folder
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES
from banaserve.kvstore.tiers.ssd.scan import check_folder, recover
from banaserve.kvstore.tiers.ssd.tier import SsdTier

MIB = 2**20
BLOCK_BYTES = 20_000
DEADLINE_S = 60.0


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


def find(folder: Path, number: int) -> Path:
    """The file of a block."""
    (path,) = folder.glob(f"blocks/*/{key(number).hex()}-*.block")
    return path


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
    assert sum(path.stat().st_size for path in tmp_path.glob("blocks/*/*")) <= MIB


def test_a_flipped_bit_is_found_on_every_read(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    store(tier, 2)
    assert load(tier, 1) is TierOutcome.DONE
    path = find(tmp_path, 1)
    overwrite(path, PAGE_BYTES + 7777, bytes([content(1)[7777] ^ 1]))
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
    os.truncate(find(tmp_path, 2), 2 * PAGE_BYTES)
    assert load(tier, 2) is TierOutcome.CORRUPT
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    find(tmp_path, 1).unlink()
    assert load(tier, 1) is TierOutcome.CORRUPT
    assert tier.lookup([key(1)]) == [Lookup.MISS]
    store(tier, 1)
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()


def test_a_file_that_cannot_be_opened_for_now(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 4 * MIB)
    store(tier, 1)
    path = find(tmp_path, 1)
    path.rename(tmp_path / "away")
    path.symlink_to("elsewhere")
    assert load(tier, 1) is TierOutcome.FAILED
    assert tier.lookup([key(1)]) == [Lookup.HIT]
    assert tier.stats().failures == 1
    (tmp_path / "away").rename(path)
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()


def test_a_disk_without_threads_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SsdTier(tmp_path, 4 * MIB)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        tier.submit_store(BlockName(key(1), None), content(1))
    assert tier._workers.is_idle
    tier.close()


def test_a_block_that_the_disk_cannot_read_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SsdTier(tmp_path, 4 * MIB)
    store(tier, 1)

    def read(fd: int, parts: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        assert check_folder(tmp_path).num_corrupt == 1
        assert load(tier, 1) is TierOutcome.CORRUPT
    assert tier.lookup([key(1)]) == [Lookup.MISS]
    assert tier.stats().corrupt == 1
    store(tier, 1)
    assert load(tier, 1) is TierOutcome.DONE
    tier.close()


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    seconds = 0.0
    tier = SsdTier(tmp_path, 4 * MIB, now=lambda: seconds)
    store(tier, 1)
    (tmp_path / "blocks").rename(tmp_path / "away")
    ticket = tier.submit_store(BlockName(key(2), None), content(2))
    assert end_of(tier, ticket) is TierOutcome.FAILED
    assert tier.lookup([key(2)]) == [Lookup.MISS]
    assert "cannot use" in tier.stats().problem
    assert tier.submit_store(BlockName(key(2), None), content(2)) is None
    (tmp_path / "away").rename(tmp_path / "blocks")
    seconds += 60
    store(tier, 2)
    assert load(tier, 2) is TierOutcome.DONE
    assert tier.stats().problem == ""
    tier.close()
    tier = SsdTier(tmp_path, 4 * MIB)
    assert hits(tier, 1, 2) == [1, 2]
    tier.close()


@pytest.mark.parametrize("problem", ["Input/output error", "No space left on device"])
def test_a_write_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    seconds = 0.0
    tier = SsdTier(tmp_path, MIB, now=lambda: seconds)
    # Every file is one that is written over.
    for number in range(60):
        store(tier, number)

    def write(fd: int, parts: object, offset: int) -> int:
        if problem.startswith("No space"):
            return PAGE_BYTES
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        ticket = tier.submit_store(BlockName(key(100), None), content(100))
        assert end_of(tier, ticket) is TierOutcome.FAILED
    assert problem in tier.stats().problem
    assert tier.stats().failures == 1
    while not tier.is_idle:
        poll(tier)
    files = list(tmp_path.glob("blocks/*/*"))
    assert len(files) == tier.stats().num_blocks
    assert tier.stats().used_bytes == sum(path.stat().st_size for path in files)
    seconds += 60
    store(tier, 100)
    assert load(tier, 100) is TierOutcome.DONE
    tier.close()


def test_what_could_not_be_deleted_for_a_time_takes_no_room_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    tier = SsdTier(tmp_path, MIB, now=lambda: seconds)
    for number in range(60):
        store(tier, number)

    def read_only(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", read_only)
        tier.clear()
        while not tier.stats().problem:
            poll(tier)
    seconds += 60
    for number in range(60):
        store(tier, number)
    while not tier.is_idle:
        poll(tier)
    files = list(tmp_path.glob("blocks/*/*"))
    assert tier.stats().used_bytes == sum(path.stat().st_size for path in files)
    assert len(files) == tier.stats().num_blocks > 30
    tier.close()


def test_files_are_written_over_when_the_budget_is_used_up(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(60):
        store(tier, number)
    before = {path.stat().st_ino for path in tmp_path.glob("blocks/*/*")}
    for number in range(60, 120):
        store(tier, number)
    assert {path.stat().st_ino for path in tmp_path.glob("blocks/*/*")} == before
    assert load(tier, 119) is TierOutcome.DONE
    tier.close()


def test_blocks_of_many_sizes_share_the_budget(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB, queue_depth=4)
    for number in range(200):
        block = content(number, 1 + number * 7919 % 90_000)
        name = BlockName(key(number), None)
        while (ticket := tier.submit_store(name, block)) is None:
            poll(tier)
        assert end_of(tier, ticket) is TierOutcome.DONE
        assert tier.stats().used_bytes <= MIB
    assert tier.stats().evictions > 100
    target = aligned_bytes(block.nbytes)
    assert end_of(tier, tier.submit_load(key(199), target)) is TierOutcome.DONE
    assert bytes(target) == bytes(block)
    tier.close()


def test_a_block_that_is_damaged_while_it_is_read_twice(tmp_path: Path) -> None:
    """Its file is written over only when both reads have ended."""
    tier = SsdTier(tmp_path, MIB, queue_depth=8)
    store(tier, 1)
    overwrite(find(tmp_path, 1), PAGE_BYTES, b"\0\0\0\0")
    targets = [aligned_bytes(BLOCK_BYTES) for _ in range(2)]
    loads = {tier.submit_load(key(1), target) for target in targets}
    ended: list[Completion] = []
    while not ended:
        ended = poll(tier)
    ticket = tier.submit_store(BlockName(key(1), None), content(1))
    while len(ended) < 3:
        ended += poll(tier)
    outcomes = {completion.ticket: completion.outcome for completion in ended}
    assert [outcomes[load] for load in loads] == [TierOutcome.CORRUPT] * 2
    assert outcomes[ticket] is TierOutcome.DONE
    assert load(tier, 1) is TierOutcome.DONE
    while not tier.is_idle:
        poll(tier)
    assert len(list(tmp_path.glob("blocks/*/*"))) == 1
    tier.close()


def test_a_header_that_the_disk_cannot_read_costs_its_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(3):
        store(tier, number)
    tier.close()
    bad, pread = str(find(tmp_path, 1)), os.pread

    def read(fd: int, num_bytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, num_bytes, offset)

    monkeypatch.setattr(os, "pread", read)
    assert check_folder(tmp_path).num_corrupt == 1
    tier = SsdTier(tmp_path, MIB)
    assert hits(tier, 0, 1, 2) == [0, 2]
    assert tier.stats().corrupt == 1
    tier.close()


def test_a_damaged_header_costs_its_block_alone(tmp_path: Path, caplog) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(3):
        store(tier, number)
    tier.close()
    overwrite(find(tmp_path, 1), 20, b"\xff")
    report = check_folder(tmp_path)
    assert (report.num_ok, report.num_corrupt, report.num_torn) == (2, 1, 0)
    tier = SsdTier(tmp_path, MIB)
    assert "1 damaged files" in caplog.text
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
    folder, crashed = tmp_path / "tier", tmp_path / "crashed"
    tier = SsdTier(folder, MIB)
    for number in range(3):
        store(tier, number)
    shutil.copytree(folder, crashed)
    assert tier.clear() == 3
    # The files as they were, with nothing but what clear itself wrote before it returned.
    (crashed / "cleared").write_bytes((folder / "cleared").read_bytes())
    tier.close()
    assert check_folder(crashed).num_dead == 3
    tier = SsdTier(crashed, MIB)
    assert hits(tier, *range(3)) == []
    while not tier.is_idle:
        poll(tier)
    assert tier.stats().used_bytes == 0
    assert not list(crashed.glob("blocks/*/*"))
    store(tier, 1)
    tier.close()
    tier = SsdTier(crashed, MIB)
    assert hits(tier, *range(3)) == [1]
    tier.close()


def test_a_file_that_was_not_finished(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    store(tier, 2)
    tier.close()
    path = find(tmp_path, 2)
    path.rename(f"{path}.tmp")
    report = check_folder(tmp_path)
    assert (report.num_ok, report.num_torn, report.num_corrupt) == (1, 1, 0)
    assert report.problems == [f"torn: {path.name}.tmp"]
    tier = SsdTier(tmp_path, MIB)
    assert hits(tier, 1, 2) == [1]
    assert tier.stats().corrupt == 0
    tier.close()
    assert check_folder(tmp_path).is_clean


def test_the_newer_file_of_a_key_counts(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    old = find(tmp_path, 1)
    image = old.read_bytes()
    old.write_bytes(bytes(len(image)))
    assert load(tier, 1) is TierOutcome.CORRUPT
    store(tier, 1)
    tier.close()
    old.write_bytes(image)
    report = check_folder(tmp_path)
    assert (report.num_ok, report.num_dead) == (1, 1)
    tier = SsdTier(tmp_path, MIB)
    assert load(tier, 1) is TierOutcome.DONE
    while not tier.is_idle:
        poll(tier)
    assert not old.exists()
    tier.close()


@pytest.mark.parametrize("other", [1, 2], ids=["its own key", "another key"])
def test_a_file_under_another_name_is_refused(tmp_path: Path, other: int) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    tier.close()
    path = find(tmp_path, 1)
    path.rename(path.with_name(f"{key(other).hex()}-{5:016x}.block"))
    assert check_folder(tmp_path).num_corrupt == 1
    tier = SsdTier(tmp_path, MIB)
    assert hits(tier, 1, 2) == []
    assert tier.stats().corrupt == 1
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
    assert (report.num_ok, report.num_files) == (4, 4)


def test_check_names_a_corrupt_block(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    store(tier, 1)
    store(tier, 2)
    tier.close()
    path = find(tmp_path, 1)
    overwrite(path, PAGE_BYTES, b"\0\0\0\0")
    report = check_folder(tmp_path)
    assert (report.num_ok, report.num_corrupt, report.is_clean) == (1, 1, False)
    assert report.problems == [f"corrupt: {path.name}"]


def test_a_long_scan_reports_its_progress(tmp_path: Path, caplog) -> None:
    tier = SsdTier(tmp_path, MIB)
    for number in range(3):
        store(tier, number)
    tier.close()
    caplog.set_level(logging.INFO)
    seconds = iter(range(1000))
    folder = Folder(tmp_path)
    recover(folder, lambda: 2.0 * next(seconds))
    folder.close()
    assert "reading the SSD tier's index: 0 of 3 files" in caplog.text


def test_the_loop_is_told_when_room_was_made(tmp_path: Path) -> None:
    """Whoever waits for fd after a refusal gets further, however full the tier is."""
    tier = SsdTier(tmp_path, MIB, queue_depth=1)
    for number in range(300):
        store(tier, number)
    assert tier.stats().stores == 300
    tier.close()
