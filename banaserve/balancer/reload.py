"""Hot reload: a changed file becomes the balancer's settings, or a line in the log."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from banaserve.balancer.balancer import Balancer
from banaserve.balancer.config_file import read_settings
from banaserve.errors import UserError

_LOOK_S = 0.5


async def follow(path: Path, balancer: Balancer) -> None:
    """Read ``path`` again whenever it changes; a file with a mistake changes nothing."""
    seen = before = _stamp(path)
    while True:
        await asyncio.sleep(_LOOK_S)
        stamp = _stamp(path)
        is_settled, before = stamp == before, stamp
        # Half a file may be a valid one.
        if stamp == seen or stamp is None or not is_settled:
            continue
        seen = stamp
        try:
            balancer.change(read_settings(path))
        except UserError as error:
            balancer.log(f"{error}; going on as before")
        else:
            balancer.log(f"{path} has been read again: {len(balancer.targets)} targets")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
