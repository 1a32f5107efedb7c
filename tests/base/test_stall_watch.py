"""Silence of a process: a stall where it does no work, and work without a word in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from banaserve.base.platform import stall_watch
from banaserve.base.platform.processes import is_running
from banaserve.base.platform.stall_watch import StallWatch
from waiting import eventually


class Worker:
    """A process without children that works when it is told to, and at no other time."""

    _STEPS = """if True:
        import os, sys, time
        print(flush=True)
        for _ in iter(sys.stdin.readline, ""):
            began_s = time.process_time()
            while time.process_time() - began_s < 3 / os.sysconf("SC_CLK_TCK"):
                pass
            print(flush=True)
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process
        self._rest()

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Worker]:
        command = [sys.executable, "-c", cls._STEPS]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            yield cls(process)
            process.kill()

    def use_some_ticks(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._rest()

    def _rest(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()
        eventually(lambda: psutil.Process(self.pid).status() == psutil.STATUS_SLEEPING)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker.started() as worker:
        yield worker


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """It does nothing more: one that still starts would be at work."""
    waits = ["sh", "-c", "echo; read _"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        eventually(lambda: psutil.Process(started.pid).status() == psutil.STATUS_SLEEPING)
        yield started
        started.kill()


def test_only_silence_without_work_is_a_stall(
    process: subprocess.Popen[bytes], worker: Worker
) -> None:
    watch = StallWatch(10.0, 1e9, counts_work=True)
    assert not watch.has_stalled(process.pid, 0.0, 10.0)
    assert watch.has_stalled(process.pid, 0.0, 10.1)
    assert not watch.has_stalled(process.pid, 5.0, 15.0)
    assert watch.has_stalled(worker.pid, 0.0, 20.0)  # seen for the first time
    worker.use_some_ticks()
    assert not watch.has_stalled(worker.pid, 0.0, 25.0)
    assert watch.has_stalled(process.pid, 0.0, 26.0)
    worker.use_some_ticks()
    assert not watch.has_stalled(0, 0.0, 1e6)


def test_work_without_a_word_is_a_stall_in_the_end(
    process: subprocess.Popen[bytes], worker: Worker
) -> None:
    watch = StallWatch(10.0, 100.0, counts_work=True)
    assert not watch.has_stalled(worker.pid, 90.0, 94.0)
    for now_s in (95.0, 99.0, 101.0):
        worker.use_some_ticks()
        assert watch.has_stalled(worker.pid, 0.0, now_s) is (now_s > 100.0)
    assert not watch.has_stalled(worker.pid, 95.0, 101.0)
    on_gpu = StallWatch(10.0, 100.0, counts_work=False)
    assert not on_gpu.has_stalled(process.pid, 0.0, 99.0), "it may wait for its device"
    assert on_gpu.has_stalled(process.pid, 0.0, 101.0)


def test_one_that_waits_for_a_compiler_does_not_stand_still() -> None:
    spins = "import os; os.read(0, 1)\nwhile True: pass"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spins!r}])"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        eventually(lambda: len(children_of(engine.pid)) == 1)
        (compiler,) = children_of(engine.pid)
        quick, slow = (StallWatch(10.0, 1e9, counts_work=True) for _ in range(2))
        engine.send_signal(signal.SIGSTOP)
        quick.has_stalled(engine.pid, 0.0, 6.0)
        engine.stdin.write(b"x")
        engine.stdin.flush()
        began = ticks_of(compiler)
        eventually(lambda: ticks_of(compiler) > began + 2)
        assert not quick.has_stalled(engine.pid, 0.0, 12.0), "its compiler works"
        os.kill(compiler, signal.SIGKILL)
        eventually(lambda: not is_running(compiler))
        slow.has_stalled(engine.pid, 0.0, 6.0)
        assert slow.has_stalled(engine.pid, 0.0, 17.0)
        engine.kill()


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ticks_of(pid: int) -> int:
    return stall_watch._ticks(pid)


def test_one_that_starts_is_watched_from_when_it_is_first_seen(
    process: subprocess.Popen[bytes], worker: Worker
) -> None:
    watch = StallWatch(10.0, 20.0, counts_work=True)
    assert not watch.has_stalled_starting(process.pid, 1000.0)
    assert not watch.has_stalled_starting(process.pid, 1010.0)
    assert watch.has_stalled_starting(process.pid, 1010.1)
    assert not watch.has_stalled_starting(0, 1e6)
    assert not watch.has_stalled_starting(worker.pid, 2000.0)
    for now_s in (2009.0, 2018.0, 2027.0):
        worker.use_some_ticks()
        assert not watch.has_stalled_starting(worker.pid, now_s)
    assert not StallWatch(1.0, 2.0, counts_work=False).has_stalled_starting(process.pid, 9e9)
