"""Waits for a whole device, which CUDA refuses to all threads while one captures a graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()


def wait_for(device: torch.device) -> None:
    """Wait for the work of all threads and streams; first for the end of a capture."""
    with _lock:
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """Return a context within which no thread of this process is in ``wait_for``."""
    with _lock:
        yield
