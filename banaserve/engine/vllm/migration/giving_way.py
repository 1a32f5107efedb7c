"""Work that engines on the same cores should not feel."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from banaserve.transport.interface import Transport
from banaserve.transport.memory import PAGE_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STEP = 5
_LOWEST = 19
# torch splits work among its threads in parts of this many elements.
_PARALLEL_ELEMENTS = 32768


def run_giving_way(work: Callable[[], T]) -> T:
    """Run ``work`` at a low priority and return its result; blocks.

    Linux keeps a priority for each thread and lets nobody raise it again, so the thread ends
    with the work. Threads that ``work`` starts inherit the low priority and may outlive it, see
    ``start_threads``. Only for processes whose other threads need nothing meanwhile: whoever waits
    for the GIL waits for the core as well.

    Raises:
        Exception: What ``work`` raises.
    """
    with ThreadPoolExecutor(1, "giving-way", _give_way) as executor:
        return executor.submit(work).result()


def start_threads(transport: Transport) -> None:
    """Start what later serves at this thread's priority, before any work gives way.

    A transport starts the thread that answers peers with its first offer. Intel's OpenMP lends
    the threads of one caller to the next, unless that has its own already.
    """
    transport.offer(PAGE_BYTES, 0).close()
    torch.zeros(torch.get_num_threads() * _PARALLEL_ELEMENTS).add_(1)


def _give_way() -> None:
    thread = threading.get_native_id()
    try:
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, before + _STEP))
    except OSError as refused:
        logger.warning("what should give way to engines does not: %s", refused)
