"""Size limit of a run's logs, which all processes of the run write.

Every process of a run appends to its log through descriptors that its libraries share, so a log is
not replaced by a new file: its content is copied to another file, and the log is truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from banaserve.base.platform.processes import in_daemon_thread
from banaserve.base.tasks import end_tasks

logger = logging.getLogger(__name__)
_INTERVAL_S = 5.0


def rotate(log: Path, max_bytes: int) -> bool:
    """Move a log's content to ``LOG.1`` if it exceeds ``max_bytes``; return whether it did.

    Writers must append. A line written between copy and truncation is lost. Without space for the
    copy the content is discarded: a full disk would break more than a log.

    Raises:
        OSError: The log cannot be truncated.
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
        await end_tasks(keeping)
