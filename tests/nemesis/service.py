"""A server that is started again at the same port when it has ended, as a service manager does."""

from __future__ import annotations

from collections.abc import Callable

from observing import until
from server_run import Run

END_DEADLINE_S = 90.0


class Service:
    """One ``banaserve serve``, whichever run of it is the present one.

    Attributes:
        run: The present one.

    Args:
        start: Starts the next one and returns when it serves.
    """

    def __init__(self, run: Run, start: Callable[[], Run] | None = None) -> None:
        self.run = run
        self._start = start

    def start_again(self) -> int:
        """Wait for the end of what was killed or told to end; returns the exit code."""
        assert self._start is not None
        until(self.run.is_gone, "every process of the server has ended", END_DEADLINE_S)
        code = self.run.process.returncode
        self.run = self._start()
        return code
