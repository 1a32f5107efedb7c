"""Ends of other processes, and work in threads that an event loop does not wait for."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from banaserve.base.platform import processes
from banaserve.base.platform.processes import in_daemon_thread
from forked import Forked
from lives import keeps_a_file, loses_a_thread, obeys, shows_life
from waiting import eventually


@contextmanager
def _running(target: Callable[[], int]) -> Iterator[Forked]:
    with Forked(target, pipes=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def _needs_descriptors_of_threads() -> None:
    try:
        os.close(os.pidfd_open(threading.get_native_id(), processes._PIDFD_THREAD))
    except OSError as error:
        pytest.skip(f"this Linux has no descriptors of threads: {error}")


@pytest.mark.parametrize("target", [shows_life, obeys])
async def test_a_death_is_noticed_whether_life_is_shown_or_not(target: Callable[[], int]) -> None:
    with _running(target) as process:
        dying = asyncio.create_task(processes.wait_dying(process.pid))
        ended = asyncio.create_task(processes.wait_ended(process.pid))
        await asyncio.sleep(0)
        assert not dying.done()
        assert not ended.done()
        process.kill()
        await asyncio.wait_for(asyncio.gather(dying, ended), 60)


async def test_a_process_dies_before_it_has_ended() -> None:
    _needs_descriptors_of_threads()
    with _running(loses_a_thread) as process:
        dying = asyncio.create_task(processes.wait_dying(process.pid))
        ended = asyncio.create_task(processes.wait_ended(process.pid))
        await asyncio.sleep(0)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        await asyncio.wait_for(dying, 60)
        assert not ended.done()
        process.kill()
        await asyncio.wait_for(ended, 60)


@pytest.mark.parametrize("wait", [processes.wait_dying, processes.wait_ended])
async def test_a_live_process_has_not_ended_where_no_descriptor_is_left(
    wait: Callable[[int], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, open_process = asyncio.Event(), os.pidfd_open

    def none_left(pid: int, flags: int = 0) -> int:
        if refused.is_set():
            return open_process(pid, flags)
        refused.set()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(processes, "_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "pidfd_open", none_left)
    with _running(obeys) as process:
        waiting = asyncio.ensure_future(wait(process.pid))
        async with asyncio.timeout(60):
            await refused.wait()
            assert not waiting.done()
            process.kill()
            await waiting


async def test_nobody_is_waited_for_who_is_not_there() -> None:
    with _running(obeys) as process:
        process.kill()
        process.wait(60)
    await asyncio.wait_for(processes.wait_dying(process.pid), 60)
    await asyncio.wait_for(processes.wait_ended(process.pid), 60)


def test_a_loop_closes_though_the_work_never_ends() -> None:
    never = threading.Event()

    async def give_up() -> None:
        working = in_daemon_thread(never.wait)
        await asyncio.sleep(0)
        working.cancel()

    asyncio.run(give_up())
    never.set()


async def test_it_hands_over_the_result_or_the_error() -> None:
    assert await in_daemon_thread(lambda: 7) == 7

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_daemon_thread(fails)


def test_an_end_without_taking_apart_flushes_and_runs_what_is_registered() -> None:
    program = """
import atexit
from banaserve.base.platform.processes import end_now

class Heavy:
    def __del__(self):
        print("taken apart", flush=True)

held, lost = Heavy(), Heavy()
lost.itself = lost
del lost
atexit.register(lambda: [[] for _ in range(100_000)])
atexit.register(print, "registered")
print("buffered")
end_now(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("buffered\nregistered\n", "")
    assert ended.returncode == 3


def test_who_starts_removes_what_those_have_left_who_were_killed(tmp_path: Path) -> None:
    killed = Forked(keeps_a_file, str(tmp_path))
    eventually(lambda: list(tmp_path.glob("*.of/file")) != [])
    (tmp_path / "others.of").mkdir()
    own = processes.own_folder(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(
        [f"{killed.pid}.of", own.name, "others.of"]
    )
    killed.kill()
    killed.wait()
    assert processes.own_folder(tmp_path) == own
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([own.name, "others.of"])
