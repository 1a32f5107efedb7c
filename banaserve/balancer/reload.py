"""Hot reload: a changed file becomes the balancer's settings, or a line in the log."""

from __future__ import annotations

import os
from pathlib import Path

from banaserve.balancer.balancer import Balancer
from banaserve.balancer.config_file import read_settings
from banaserve.balancer.rounds import over_and_over
from banaserve.errors import UserError

_LOOK_S = 0.5


async def follow(path: Path, balancer: Balancer) -> None:
    """Read ``path`` again whenever it changes; a file with a mistake changes nothing."""
    look = _File(path, balancer).look
    await over_and_over(look, _LOOK_S, balancer.log, f"reading {path} again")


class _File:
    def __init__(self, path: Path, balancer: Balancer) -> None:
        self._path, self._balancer = path, balancer
        self._seen = self._before = _stamp(path)

    async def look(self) -> None:
        stamp = _stamp(self._path)
        is_settled, self._before = stamp == self._before, stamp
        # Half a file may be a valid one.
        if stamp == self._seen or stamp is None or not is_settled:
            return
        self._seen = stamp
        balancer = self._balancer
        try:
            balancer.change(read_settings(self._path))
        except UserError as error:
            balancer.log(f"{error}; going on as before")
        else:
            balancer.log(f"{self._path} has been read again: {len(balancer.targets)} targets")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
