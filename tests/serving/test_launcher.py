"""Parents that fork engines, and processes that are spawned: lost ones, hung ones, late answers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import InstanceDeadError, UserError
from banaserve.base.platform.processes import is_running
from banaserve.mains import engine_parent, spawned
from banaserve.serving.launch import messages
from banaserve.serving.launch.devices import Devices, check_memory
from banaserve.serving.launch.launcher import ForkLauncher, SpawnLauncher
from banaserve.serving.launch.messages import StartEngine, spawn
from banaserve.serving.launch.parent_link import ParentLink, ParentLostError
from waiting import until


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


class Parent:
    """Answers orders, each when it is told to, with the number of the order as process id."""

    def __init__(self, sock: socket.socket) -> None:
        self.orders = 0
        self.may_answer = threading.Semaphore(0)
        self._sock = sock
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while isinstance(order := messages.receive(self._sock), messages.StartEngine):
            self.orders += 1
            self.may_answer.acquire()
            messages.send(self._sock, messages.Started(order.instance_id, self.orders))
        self._sock.close()


async def none_other() -> ParentLink:
    raise ParentLostError("no engine parent can be started: no memory")


async def test_an_order_that_was_cancelled_takes_nobodys_answer(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    parent, launcher = Parent(theirs), ForkLauncher(ParentLink(ours, 0), none_other)
    first = asyncio.create_task(launcher.start(StartEngine("d0", "", str(tmp_path))))
    await until(lambda: parent.orders == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(launcher.start(StartEngine("d1", "", str(tmp_path))))
    await asyncio.sleep(0)
    parent.may_answer.release(2)
    assert await asyncio.wait_for(second, 60) == 2
    launcher.close()


async def test_a_parent_that_cannot_be_replaced_is_told_in_one_line(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    launcher = ForkLauncher(ParentLink(ours, 0), none_other)
    with pytest.raises(InstanceDeadError, match=r"no memory, and no other one .*: see front.log"):
        await launcher.start(StartEngine("d0", "", str(tmp_path)))
    launcher.close()


async def test_a_parent_that_talks_nonsense_is_replaced(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    frame = messages.FRAMING.encode(messages.Started("d0", 1))
    theirs.sendall(frame.replace(b"d0", b"\xff0"))
    _, second = answering()

    async def start_parent() -> ParentLink:
        return second

    launcher = ForkLauncher(ParentLink(ours, 0), start_parent)
    assert await launcher.start(StartEngine("d0", "", str(tmp_path))) == 1
    launcher.close()
    theirs.close()


def answering(pid: int = 0) -> tuple[Parent, ParentLink]:
    """A parent that answers two orders at once."""
    ours, theirs = socket.socketpair()
    parent = Parent(theirs)
    parent.may_answer.release(2)
    return parent, ParentLink(ours, pid)


async def test_an_engine_dies_with_the_parent_that_has_started_it(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    _, first = answering(process.pid)
    _, second = answering(os.getpid())

    async def start_parent() -> ParentLink:
        return second

    launcher = ForkLauncher(first, start_parent)
    await launcher.start(StartEngine("d0", "", str(tmp_path)))
    await launcher.start(StartEngine("d1", "", str(tmp_path)))
    assert not launcher.has_lost_parent("d0")
    first.is_lost = True  # it does not answer: what it has started lives
    await launcher.start(StartEngine("d1", "", str(tmp_path)))
    assert not launcher.has_lost_parent("d0")
    process.kill()
    process.wait()
    lost = [launcher.has_lost_parent(name) for name in ("d0", "d1", "d2")]
    assert lost == [True, False, False]
    second._pid = 0  # it is no child, and none to be ended
    launcher.close()


async def test_orders_at_once_end_each_parent_that_is_left_over_once(tmp_path: Path) -> None:
    launcher = ForkLauncher(answering()[1], none_other)
    launcher._retired = [answering()[1] for _ in range(2)]
    orders = [StartEngine(name, "", str(tmp_path)) for name in ("d0", "d1")]
    pids = await asyncio.gather(*map(launcher.start, orders))
    assert (sorted(pids), launcher._retired) == ([1, 2], [])
    launcher.close()


@pytest.mark.parametrize("is_hung", [False, True], ids=["ended", "hung"])
async def test_a_lost_parent_is_replaced_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    is_hung: bool,
) -> None:
    ours, theirs = socket.socketpair()
    if is_hung:
        monkeypatch.setattr(ParentLink.order, "__defaults__", (0.05,))
    else:
        theirs.close()
    first, (parent, second) = ParentLink(ours, process.pid), answering()
    num_started = 0

    async def start_parent() -> ParentLink:
        nonlocal num_started
        num_started += 1
        monkeypatch.setattr(ParentLink.order, "__defaults__", (30.0,))
        return second

    launcher = ForkLauncher(first, start_parent)
    orders = (launcher.start(StartEngine(name, "", str(tmp_path))) for name in ("d0", "d1"))
    assert sorted(await asyncio.gather(*orders)) == [1, 2]
    assert (num_started, parent.orders) == (1, 2)
    assert process.poll() is None, "it may have engines that are well"
    parent.may_answer.release()
    await launcher.start(StartEngine("d0", "", str(tmp_path)))
    assert not is_running(process.pid), "it has none"
    launcher.close()
    theirs.close()


async def test_a_hung_parent_stays_while_it_has_engines(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen(["sleep", "600"]) as engine:  # noqa: ASYNC220
        ours, theirs = socket.socketpair()
        first, (_, second) = ParentLink(ours, process.pid), answering()
        messages.send(theirs, messages.Started("d0", engine.pid))

        async def start_parent() -> ParentLink:
            return second

        launcher = ForkLauncher(first, start_parent)
        assert await launcher.start(StartEngine("d0", "", str(tmp_path))) == engine.pid
        first.is_lost = True
        await launcher.start(StartEngine("d1", "", str(tmp_path)))
        await launcher.start(StartEngine("d1", "", str(tmp_path)))
        assert process.poll() is None
        engine.kill()
        engine.wait()
        await launcher._sweep()
        assert not is_running(process.pid)
        launcher.close()
        theirs.close()


def test_an_order_that_another_parent_has_got_since_is_not_obeyed() -> None:
    late = messages.StartEngine("d0", "", "", until_s=time.monotonic() - 1.0)
    assert engine_parent._is_late(late)
    assert not engine_parent._is_late(msgspec.structs.replace(late, until_s=time.monotonic() + 1e3))
    assert not engine_parent._is_late(messages.StartEngine("d0", "", ""))


def test_a_fork_that_fails_ends_no_engine_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fails)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        config: Any = None
        parent = engine_parent._EngineParent(config, theirs)
        messages.send(ours, messages.StartEngine("d0", "", ""))
        assert parent._obey()  # otherwise, or after an error, the parent would kill its engines


def test_a_stopped_child_is_ended_and_reaped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    ParentLink(ours, process.pid, process).close(patience_s=0.01)
    theirs.close()
    assert process.returncode is not None


def test_what_is_spawned_says_nothing_on_its_command_line_and_ends_with_its_starter(
    tmp_path: Path,
) -> None:
    """Its starter is not this process: it must not come so far as to import an engine."""
    said = messages.StartEngine(
        "d0", "ipc://nowhere", str(tmp_path / "log"), ("--hf-token", "a-secret")
    )
    process = spawn(said, os.environ)
    try:
        line = b""
        while not line.strip(b"\0") and process.poll() is None:  # it may just be getting it
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"a-secret" not in line
        assert str(os.getpid()).encode() in line.split(b"\0")
    finally:
        process.kill()
        process.wait()
    command = [sys.executable, "-m", spawned.__name__, "1"]
    done = subprocess.run(command, input=b"nonsense", timeout=60.0)
    assert (done.returncode, (tmp_path / "log").exists()) == (1, False)


@pytest.mark.parametrize("in_turn", [False, True])
async def test_engines_that_measure_the_memory_of_one_gpu_start_in_turn(in_turn: bool) -> None:
    devices = Devices({"p0": "0, 1", "d0": "1", "d1": "2"})
    launcher = SpawnLauncher([], devices, in_turn=in_turn)
    began: list[str] = []

    async def start(name: str) -> None:
        async with launcher.turn_to_start(name):
            began.append(name)

    async with asyncio.TaskGroup() as group, launcher.turn_to_start("p0"):
        group.create_task(start("d0"))
        await group.create_task(start("d1"))
        assert began == (["d1"] if in_turn else ["d0", "d1"])
    assert sorted(began) == ["d0", "d1"]


async def test_engines_without_a_gpu_start_at_once() -> None:
    launcher = SpawnLauncher([], Devices({}), in_turn=True)
    async with launcher.turn_to_start("p0"), launcher.turn_to_start("d0"):
        pass


def test_engines_share_the_memory_of_a_gpu() -> None:
    check_memory(["0", "1"], 0.92)
    check_memory(["0", "0", "1"], 0.5)
    with pytest.raises(UserError, match=r"3 instances on GPU 1 take 0\.92 .*utilization 0\.30 too"):
        check_memory(["0,1", "1", "1, 2"], 0.92)
