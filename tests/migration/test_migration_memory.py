"""Written blocks, slabs, and tensors on their way."""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import banaserve
from banaserve.base.errors import ProtocolError, UserError
from banaserve.base.platform.stall_watch import Pulse
from banaserve.migration.guest.throttle import run_low_priority, start_threads
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, Written, spans
from banaserve.migration.kv.host_kv import HostKv, blocks_gained, make_slab
from banaserve.migration.kv.slabs import GpuSlab, Slab, merged, no_wait
from banaserve.migration.rpc.tensors import TensorBundle, from_wire, restore, to_wire
from banaserve.transport.interface import TransportOptions
from banaserve.transport.registry import create
from waiting import eventually

PAGE = mmap.PAGESIZE


class CopiedBlocks(RuleBasedStateMachine):
    """A copier beside an engine: after the commit between two steps it has every byte.

    ``here`` and ``there`` hold each block's version. A step marks, then writes; a copy may come
    in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = DirtyBlockTracker(6)
        self.here = [0] * 6
        self.there: dict[int, int] = {}
        self.open: set[int] = set()
        self.watch = None

    @rule(blocks=st.lists(st.integers(0, 5), max_size=4))
    def begin_step(self, blocks: list[int]) -> None:
        for block in self.open:
            self.here[block] += 1
        self.written.step_ended()
        self.written.mark(np.array(blocks, np.int64))
        self.open = set(blocks)

    @rule(block=st.integers(0, 5))
    def write_early(self, block: int) -> None:
        if block in self.open:
            self.here[block] += 1

    @precondition(lambda self: self.watch is None)
    @rule()
    def begin_move(self) -> None:
        self.watch = self.written.watch()
        self.there = {}

    @precondition(lambda self: self.watch is not None)
    @rule()
    def copy_round(self) -> None:
        for block in self.watch.take():
            self.there[block] = self.here[block]

    @precondition(lambda self: self.watch is not None)
    @rule()
    def commit(self) -> None:
        for block in self.open:
            self.here[block] += 1
        self.open = set()
        self.written.step_ended()
        self.copy_round()
        assert self.there == {b: v for b, v in enumerate(self.here) if v}
        self.watch.end()
        self.watch = None

    @invariant()
    def counts(self) -> None:
        written = sum(version > 0 for version in self.here)
        assert written <= len(self.written) <= 6


TestCopiedBlocks = CopiedBlocks.TestCase


def test_forgotten_blocks_are_not_copied() -> None:
    written = DirtyBlockTracker(6)
    written.mark([1, 2])
    written.step_ended()
    watch = written.watch()
    written.forget()
    assert watch.take() == []
    written.mark([3])
    written.step_ended()
    assert watch.take() == [3]


def test_an_engine_does_not_wait_for_what_a_gpu_knows_of_its_step() -> None:
    written, read = DirtyBlockTracker(6), []

    def slots_of(*blocks: int) -> Written:
        read.append(blocks)
        return [*blocks], [*blocks[1:]]

    written.mark_later(lambda: slots_of(1, 2))
    assert not read, "the GPU computes"
    written.step_ended()
    assert (written.ids(), written.full()) == ([1, 2], [2])
    written.mark_later(lambda: slots_of(3))
    assert written.ids() == [1, 2, 3]
    written.mark_later(lambda: slots_of(4))
    written.forget()
    written.step_ended()
    assert (written.ids(), read) == ([], [(1, 2), (3,)])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=12))
def test_merged_ranges_cover_the_same_bytes(ranges: list[tuple[int, int]]) -> None:
    found = merged(ranges)
    assert bytes_in(found) == bytes_in(ranges)
    assert all(sum(a) < b[0] for a, b in itertools.pairwise(found))


def bytes_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {i for start, length in ranges for i in range(start, start + length)}


def test_a_slab_takes_memory_when_touched_and_gives_it_back() -> None:
    slab = Slab(64 * PAGE)
    assert slab.resident_bytes() == 0
    slab.populate(32 * PAGE)
    assert slab.resident_bytes() == 32 * PAGE
    slab.bytes[: 32 * PAGE] = 7
    # Half a page at either end stays, with what is in it.
    assert slab.give_back([(PAGE // 2, 2 * PAGE), (10 * PAGE, PAGE)]) == 2 * PAGE
    assert slab.resident_bytes() == 30 * PAGE
    assert slab.bytes[PAGE // 2] == 7
    assert not slab.bytes[PAGE : 2 * PAGE].any()
    assert not slab.bytes[10 * PAGE : 11 * PAGE].any()
    assert slab.bytes[3 * PAGE] == 7


@pytest.fixture
def host_kv() -> HostKv:
    """Three layers, four blocks, three heads of one page each."""
    shape = (4, 3, PAGE // 8, 2)
    return HostKv({f"l{i}": torch.zeros(shape, dtype=torch.float32) for i in range(3)}, 2.5)


def test_each_layer_and_each_head_is_freed_alone(host_kv: HostKv) -> None:
    assert (host_kv.num_blocks, host_kv.max_blocks) == (4, 10)
    assert host_kv.tensors["l0"].shape[0] == 10
    assert host_kv.resident_bytes == 3 * 4 * 3 * PAGE
    for tensor in host_kv.tensors.values():
        tensor[:4] = 1
    assert host_kv.free("l1", None) == (12 * PAGE, 12 * PAGE)
    assert host_kv.free("l2", (0, 2)) == (8 * PAGE, 8 * PAGE)
    host_kv.populate("l1", 4)
    assert host_kv.resident_bytes == (12 + 12 + 4) * PAGE
    assert host_kv.tensors["l0"][:4].eq(1).all()
    assert host_kv.tensors["l2"][:4, 1].eq(1).all()
    assert host_kv.tensors["l2"][:4, [0, 2]].eq(0).all()


def test_poison_hits_what_moved_and_nothing_else(host_kv: HostKv) -> None:
    host_kv.poison("l0", (1,), [2])
    assert host_kv.tensors["l0"][2, 1].isnan().all()
    assert host_kv.tensors["l0"].isnan().sum() == host_kv.tensors["l0"][2, 1].numel()


def test_runs_join_neighbouring_heads(host_kv: HostKv) -> None:
    assert spans((2, 0, 1, 5)) == [(0, 3), (5, 1)]
    assert [tuple(run) for run in host_kv.runs((0, 2))] == [(0, PAGE), (2 * PAGE, PAGE)]
    assert [tuple(run) for run in host_kv.runs(None)] == [(0, 3 * PAGE)]


@pytest.mark.parametrize(
    ("num_blocks", "max_blocks", "away", "kept", "gained"),
    [
        (21, 42, 10, 20, 10),
        (21, 25, 10, 20, 4),
        (21, 42, 0, 30, 0),
        (90, 180, 1, 89, 1),
        (20, 40, 1, 89, 0),
    ],
)
def test_blocks_come_only_where_every_layer_that_stays_can_grow(
    num_blocks: int, max_blocks: int, away: int, kept: int, gained: int
) -> None:
    assert blocks_gained(num_blocks, max_blocks, away, kept) == gained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_travel_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).view(2, 3, 4).transpose(0, 2).to(dtype)
    there = from_wire(to_wire(tensor))
    assert there.dtype == dtype
    assert torch.equal(there, tensor)


def test_values_travel_by_name() -> None:
    bundle = TensorBundle()
    values = {"a": torch.ones(2), "n": 3, "none": None, "np": np.arange(4), "flag": True}
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(bundle.put_all(values)))
    back = restore(packed, bundle.tensors)
    assert torch.equal(back["a"], values["a"])
    assert isinstance(back["np"], np.ndarray)
    assert (back["n"], back["none"], back["flag"]) == (3, None, True)


@pytest.mark.parametrize("packed", [{"a": [1]}, {"a": [-1]}, {"a": []}, {"a": ["x"]}])
def test_a_tensor_that_did_not_come_is_a_breach(packed: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="did not come"):
        restore(packed, [to_wire(torch.ones(1))])


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        TensorBundle().put_all({"a": object()})


def test_a_pulse_is_seen_while_a_process_works_and_not_while_it_stands() -> None:
    working = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", working]) as child:
        try:
            pulse = Pulse(child.pid)
            assert pulse.is_known
            assert pulse.last_worked_s(1.0) == 0.0, "the first look only remembers"
            now_s = 1.0
            while pulse.last_worked_s(now_s) == 0.0:
                now_s += 1.0
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            last_s = pulse.last_worked_s(now_s + 1)
            assert pulse.last_worked_s(now_s + 1000) == last_s
        finally:
            child.kill()
    assert pulse.last_worked_s(now_s + 2000) == last_s, "a dead one does not work"
    assert not Pulse(None).is_known


def test_a_pulse_is_seen_while_a_child_works_for_a_process_that_waits() -> None:
    spins = "import os; os.read(0, 1)\nwhile True: pass"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spins!r}])"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as guest:
        try:
            assert guest.stdin is not None
            eventually(lambda: len(psutil.Process(guest.pid).children()) == 1)
            (compiler,) = psutil.Process(guest.pid).children()
            os.kill(guest.pid, signal.SIGSTOP)
            pulse = Pulse(guest.pid)
            pulse.last_worked_s(1.0)
            guest.stdin.write(b"x")
            guest.stdin.flush()
            now_s = 2.0
            eventually(lambda: pulse.last_worked_s(now_s) == now_s)
            compiler.kill()
            eventually(lambda: compiler.status() == psutil.STATUS_ZOMBIE)
            last_s = pulse.last_worked_s(now_s + 1)
            assert pulse.last_worked_s(now_s + 1000) == last_s
        finally:
            guest.kill()


@pytest.mark.skipif(
    importlib.util.find_spec("banaserve._native_cuda") is not None, reason="built with CUDA"
)
def test_a_slab_on_a_gpu_needs_a_build_with_cuda() -> None:
    with pytest.raises(UserError, match="BANASERVE_CUDA=1"):
        GpuSlab(PAGE, torch.device("cuda", 0))


def test_a_slab_on_a_gpu_gets_what_torch_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of the scripted driver is full until torch gives back what it keeps."""
    kept = [PAGE]

    class Driver:
        address, num_bytes, granule_bytes = 0, 2 * PAGE, PAGE

        def __init__(self, num_bytes: int, device: int) -> None:
            pass

        def map(self, offset: int, num_bytes: int) -> list[int]:
            if kept:
                raise MemoryError("std::bad_alloc")
            return []

    native = SimpleNamespace(GpuSlab=Driver)
    monkeypatch.setitem(sys.modules, "banaserve._native_cuda", native)
    monkeypatch.setattr(banaserve, "_native_cuda", native, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    with no_wait():  # a guest may be lost during a capture
        GpuSlab(2 * PAGE, torch.device("cuda", 0)).populate(PAGE)
    assert not kept


def test_a_slab_on_a_gpu_is_zero_before_another_stream_writes_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    made = SimpleNamespace(
        address=0, num_bytes=PAGE, granule_bytes=PAGE, map=lambda first, num_bytes: [0]
    )
    native = SimpleNamespace(GpuSlab=lambda num_bytes, device: made)
    monkeypatch.setitem(sys.modules, "banaserve._native_cuda", native)
    monkeypatch.setattr(banaserve, "_native_cuda", native, raising=False)
    granule = SimpleNamespace(zero_=lambda: done.append("zero"))
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(GpuSlab, "_bytes", lambda *_: granule)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    GpuSlab(PAGE, torch.device("cuda", 0)).populate(PAGE)
    assert done == ["zero", "waited"]


def test_a_device_without_slabs_keeps_what_it_holds() -> None:
    slab = make_slab(2 * PAGE, torch.device("meta"))
    tensor = slab.tensor((2, 3), torch.float32)
    assert (tensor.device.type, tensor.shape, slab.num_bytes) == ("meta", (2, 3), 2 * PAGE)
    slab.populate(PAGE)
    assert slab.give_back([(0, PAGE)]) == 0
    assert slab.resident_bytes() == 2 * PAGE


def test_work_gives_way_and_nothing_else_does() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert run_low_priority(priority) == min(19, own + 5)
    assert priority() == own
    with pytest.raises(ZeroDivisionError):
        run_low_priority(lambda: 1 // 0)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_threads_that_serve_do_not_give_way(name: str, tmp_path: Path) -> None:
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    transport, before = create(name, options), set(threading.enumerate())
    start_threads(transport)
    run_low_priority(lambda: transport.offer(PAGE, 1))
    started = set(threading.enumerate()) - before
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert started
    assert {os.getpriority(os.PRIO_PROCESS, t.native_id or 0) for t in started} == {own}
    transport.close()


IN_PARALLEL = """
import os, sys, torch
from banaserve.migration.guest.throttle import run_low_priority, start_threads
from banaserve.transport.interface import TransportOptions
from banaserve.transport.registry import create

def busy_ns():
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            found[thread] = int(file.read().split()[0])
    return found

def work():
    torch.set_num_threads(3)
    torch.zeros(1 << 20).add_(1)

torch.set_num_threads(3)
start_threads(create("shm", TransportOptions(folder=sys.argv[1], secret=bytes(32))))
run_low_priority(work)
before = busy_ns()
for _ in range(200):
    work()
used = [t for t, ran in busy_ns().items() if ran - before.get(t, 0) > 1_000_000]
own = os.getpriority(os.PRIO_PROCESS, 0)
print({os.getpriority(os.PRIO_PROCESS, int(t)) for t in used} == {own})
"""


def test_threads_of_intels_openmp_do_not_give_way_either(tmp_path: Path) -> None:
    library = Path(sys.prefix) / "lib/libiomp5.so"
    if not library.exists():
        pytest.skip("Intel's OpenMP is not installed")
    # Threads that wait for work sleep: only those that have some are seen to run.
    environment = os.environ | {"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "0"}
    said = subprocess.check_output(
        [sys.executable, "-c", IN_PARALLEL, str(tmp_path)], env=environment, text=True
    )
    assert said == "True\n"
