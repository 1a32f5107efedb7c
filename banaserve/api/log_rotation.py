"""Logs of a run that stay within a size, whoever writes them.

Every process of a run appends to its log through descriptors that its libraries share, so a log is
not replaced: its content is copied away and it is cut, and the next line begins it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from banaserve.platform.processes import in_daemon_thread

logger = logging.getLogger(__name__)
_INTERVAL_S = 5.0


def rotate(log: Path, max_bytes: int) -> bool:
    """Move what a log holds into ``LOG.1`` where it is longer than ``max_bytes``; whether it was.

    Its writers append. A line that is written between the copy and the cut is lost. Where there is
    no room for the copy the content is lost instead: a full disk would end more than a log.

    Raises:
        OSError: The log cannot be cut.
    """
    if log.stat().st_size <= max_bytes:
        return False
    descriptor = os.open(log, os.O_RDWR)
    with os.fdopen(descriptor, "r+b") as file:
        older = log.with_name(f"{log.name}.1")
        try:
            older.unlink(missing_ok=True)
            with open(os.open(older, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
        except OSError as error:
            logger.warning("what %s held is lost: %s", log.name, error.strerror)
            older.unlink(missing_ok=True)
        file.truncate(0)
    return True


def rotate_all(folder: Path, max_bytes: int) -> None:
    """Rotate every log of a run."""
    for log in folder.glob("*.log"):
        try:
            rotate(log, max_bytes)
        except OSError as error:
            logger.warning("%s cannot be cut: %s", log, error.strerror)


@contextlib.asynccontextmanager
async def rotating(folder: Path, max_bytes: int) -> AsyncIterator[None]:
    """Rotate the logs in ``folder`` while the block lasts; 0 bytes: do nothing."""

    async def keep_small() -> None:
        while True:
            await in_daemon_thread(lambda: rotate_all(folder, max_bytes))
            await asyncio.sleep(_INTERVAL_S)

    keeping = asyncio.create_task(keep_small()) if max_bytes else None
    try:
        yield
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
