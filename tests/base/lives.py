"""What processes do whose deaths ``test_processes`` watches: each says it is ready, then obeys.

In a module of its own: a forked process imports it by name, which it cannot do with a test file.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from banaserve.base.platform import processes
from waiting import eventually


def shows_life() -> int:
    """Until its standard input ends."""
    processes.show_life()
    return obeys()


def loses_a_thread() -> int:
    """One of the threads that show its life ends at the first line, the process at the next."""
    until = threading.Event()
    thread = threading.Thread(target=processes._live, args=(until,))
    thread.start()
    threads = Path("/proc/self/task")
    # It names itself.
    eventually(lambda: any(processes._LIFE in it.read_text() for it in threads.glob("*/comm")))
    obeys()
    until.set()
    thread.join()
    return obeys()


def obeys() -> int:
    """One line of its standard input."""
    print("ready", flush=True)
    sys.stdin.readline()
    return 0


def keeps_a_file(folder: str) -> int:
    """Lives on with a file in a folder of its own."""
    (processes.own_folder(Path(folder)) / "file").touch()
    signal.pause()
    return 0
