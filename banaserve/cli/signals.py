"""How a command that starts for a long time hears the signals that end it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import TracebackType

_AGAIN_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Leaving:
    """Within it SIGINT and SIGTERM raise SystemExit with 128 + the signal's number, once.

    Later ones are ignored: what is under way then is the clean-up. Main thread only.
    """

    def __init__(self) -> None:
        self._number = 0
        self._insists = False

    def __enter__(self) -> Leaving:
        self._previous = {number: signal.signal(number, self._leave) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def insisting(self) -> Iterator[None]:
        """Raise again every half second until the block is left.

        One exception is not enough where others' code runs: an import may catch everything, and
        Python drops what is raised in a destructor or a callback from C.
        """
        self._insists = True
        try:
            yield
        finally:
            self._insists = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _leave(self, number: int, _: object) -> None:
        if self._number and not self._insists:
            return
        if number != signal.SIGALRM:
            self._number = self._number or number
        if self._insists:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise SystemExit(128 + self._number)
