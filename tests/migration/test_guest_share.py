"""What guests may take of a device: the pace of their work, who is told what, what it costs."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

import migration_doubles as doubles
from banaserve.base.errors import MigrationError, UserError
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId
from banaserve.contracts.migration_api import MoveLayers, ShareRequest
from banaserve.kvstore.pool import SlotPool
from banaserve.migration.guest.throttle import ComputeThrottle
from banaserve.serving.moves.guest_monitor import GuestMonitor
from banaserve.serving.moves.guest_pool import GuestPool
from banaserve.serving.moves.placement import placement_of, predicted_slow_down, share
from banaserve.serving.moves.process_stats import CoreWaits, ProcessUsage, look

PIECES = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.floats(1e-3, 1.0)), min_size=1, max_size=30
).map(lambda pairs: [(round(idle, 3), round(work, 3)) for idle, work in pairs])


class Device:
    """A clock that work and rest move on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.used_s = 0.0
        self.share = ComputeThrottle(lambda: self.now_s, lambda: self.used_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, seconds: float) -> tuple[float, float]:
        """When it began and ended."""
        with self.share.computing():
            began_s = self.now_s
            self.now_s += seconds
            self.used_s += seconds
        return began_s, self.now_s


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_work_of_a_gpu_is_waited_for_where_it_is_bounded(
    monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("waits"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    share = ComputeThrottle()
    share.bound(fraction)
    with share.computing():
        waits.append("queues")
    assert waits == (["queues"] if fraction == 1.0 else ["waits", "queues", "waits"])


@given(PIECES, st.floats(0.05, 1.0))
def test_no_window_holds_more_than_the_share_and_one_piece(
    pieces: list[tuple[float, float]], fraction: float
) -> None:
    device = Device()
    device.share.bound(fraction)
    spans = []
    for idle_s, work_s in pieces:
        device.now_s += idle_s
        spans.append(device.work(work_s))
    for first in range(len(spans)):
        for last in range(first, len(spans)):
            window_s = spans[last][1] - spans[first][0]
            busy_s = sum(end - begin for begin, end in spans[first : last + 1])
            most = fraction * window_s + max(end - begin for begin, end in spans[first : last + 1])
            assert busy_s <= most + 1e-9


def test_a_whole_device_never_rests_and_time_with_nothing_to_do_is_rest() -> None:
    device = Device()
    assert [device.work(1.0) for _ in range(2)] == [(0.0, 1.0), (1.0, 2.0)]
    device.share.bound(0.25)
    assert device.work(1.0) == (2.0, 3.0)
    assert device.work(1.0) == (6.0, 7.0)
    device.now_s = 20.0
    assert device.work(1.0) == (20.0, 21.0)
    device.share.bound(1.0)
    assert device.work(1.0) == (21.0, 22.0), "from the next piece of work on"


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_out_of_range_changes_nothing(fraction: float) -> None:
    device = Device()
    with pytest.raises(MigrationError, match="above 0 and at most 1"):
        device.share.bound(fraction)
    assert device.share.fraction == 1.0


@pytest.mark.parametrize("fraction", [0.0, 0.049, 1.1, float("nan")])
def test_a_bound_out_of_range_is_refused(fraction: float, tmp_path: Path) -> None:
    guests = GuestPool(doubles.SleepLauncher(), RunDir(tmp_path, tmp_path), "shm", 0.5)
    with pytest.raises(MigrationError, match=r"0\.05 to 1"):
        guests.set_bound(InstanceId("p0"), fraction)
    assert guests.bound(InstanceId("p0")) == 0.5


def test_half_a_device_makes_steps_twice_as_long() -> None:
    assert predicted_slow_down(0.0) == 1.0
    assert predicted_slow_down(0.5) == 2.0
    assert predicted_slow_down(1.0) == predicted_slow_down(5.0) == pytest.approx(100.0)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[doubles.Cluster]:
    made = doubles.Cluster(tmp_path)
    yield made
    await made.close()


async def test_guests_beside_one_instance_share_its_bound(cluster: doubles.Cluster) -> None:
    told, guests = cluster.engine.shares, cluster.coordinator.guests
    await doubles.done(cluster.coordinator, MoveLayers("d0", "p0", (10, 12)))
    (first,) = [guest.id for guest in guests]
    assert told == {}, "a whole device needs no telling"
    found = await share(cluster.coordinator, ShareRequest("p0", 0.5))
    assert (found.fraction, found.num_guests, told) == (0.5, 1, {first: 0.5})
    await doubles.done(cluster.coordinator, MoveLayers("d0", "p0", (20, 22)))
    (second,) = [guest.id for guest in guests if guest.id != first]
    assert told[second] == 0.25
    await doubles.done(cluster.coordinator, MoveLayers("d0", "p1", (25, 26)))
    await GuestMonitor(cluster.coordinator)._look(0)
    assert told == {first: 0.25, second: 0.25}, "what lies beside another instance is its own"
    await share(cluster.coordinator, ShareRequest("p0", 1.0))
    assert told == {first: 0.5, second: 0.5}


async def test_a_guest_that_cannot_be_told_is_told_later(cluster: doubles.Cluster) -> None:
    await doubles.done(cluster.coordinator, MoveLayers("d0", "p0", (10, 12)))
    cluster.engine.faults = {"share": "it is building: ask later"}
    await share(cluster.coordinator, ShareRequest("p0", 0.5))
    assert cluster.engine.shares == {}
    cluster.engine.faults = {}
    await GuestMonitor(cluster.coordinator)._look(1)
    assert list(cluster.engine.shares.values()) == [0.5]


async def test_what_is_asked_wrongly(cluster: doubles.Cluster) -> None:
    with pytest.raises(MigrationError, match=r"0\.05 to 1 of a device, not 2"):
        await share(cluster.coordinator, ShareRequest("p0", 2.0))
    with pytest.raises(UserError, match="nobody"):
        await share(cluster.coordinator, ShareRequest("nobody", 0.5))


async def test_the_placement_tells_what_guests_cost(cluster: doubles.Cluster) -> None:
    await doubles.done(cluster.coordinator, MoveLayers("d0", "p0", (10, 12)))
    await share(cluster.coordinator, ShareRequest("p0", 0.5))
    (guest,) = cluster.coordinator.guests
    guest.usages = {guest.pids[0]: ProcessUsage(busy_fraction=0.2)}
    cluster.coordinator.hosts[InstanceId("p0")].slow_down = 1.3
    placed = await placement_of(cluster.coordinator)
    (sharing,) = [one.sharing for one in placed.instances if one.id == "p0"]
    assert sharing is not None
    assert (sharing.fraction, sharing.num_guests, sharing.busy_fraction) == (0.5, 1, 0.2)
    assert (sharing.predicted_slow_down, sharing.measured_slow_down) == (1.25, 1.3)
    assert [one.share for one in placed.guests] == [0.5]


def test_the_kernel_tells_what_threads_wait() -> None:
    waits = CoreWaits()
    assert waits.slow_down(os.getpid()) is None, "nothing to compare with"
    until_s = time.process_time() + 0.03
    while time.process_time() < until_s:
        pass
    found = waits.slow_down(os.getpid())
    assert found is not None
    assert found >= 1.0
    assert waits.slow_down(0) is None, "there is no such process"


def test_the_option(monkeypatch: Any) -> None:
    from banaserve.cli.serve.command_line import parse_serve_argv

    monkeypatch.delenv("BANASERVE_ADMIN_KEY", raising=False)
    assert parse_serve_argv(["--migration-guest-share", "0.4"]).migration_guest_share == 0.4
    for wrong in ("0", "1.5", "nan", "-1"):
        with pytest.raises(UserError, match=r"--migration-guest-share .*: 0\.05 to 1 of a device"):
            parse_serve_argv([f"--migration-guest-share={wrong}"])


def test_memory_of_a_guest_includes_its_kv_but_not_the_pool_of_the_store() -> None:
    size = 64 << 20
    before = look(os.getpid(), ProcessUsage())
    pool = SlotPool(size)
    with_pool = look(os.getpid(), ProcessUsage())
    kv = mmap.mmap(-1, size)
    kv.write(bytes(size))
    with_kv = look(os.getpid(), ProcessUsage())
    pool.close()
    kv.close()
    assert None not in (before, with_pool, with_kv)
    assert with_pool.num_bytes - before.num_bytes < size // 2
    assert with_kv.num_bytes - with_pool.num_bytes > size // 2
