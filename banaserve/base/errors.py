"""Exceptions: one class for each reaction that a caller can have."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class BanaServeError(Exception):
    """Base of every error that banaserve raises on purpose."""


class UserError(BanaServeError):
    """Error that the user can fix: its one-line message says what is wrong and what to do.

    The command line prints the message without a traceback and exits with 2.
    """


class StoreUnavailableError(BanaServeError):
    """The KV cache store cannot be reached: go on without it and recompute."""


class FingerprintError(UserError):
    """A client and the store disagree about what a KV block is: refuse to share blocks."""


class ProtocolError(BanaServeError):
    """A peer sent bytes that break the protocol: close its connection."""


class InstanceDeadError(BanaServeError):
    """An instance died while it held a request: try another or give up."""


class NoInstanceError(BanaServeError):
    """The requested role has no serving instance at present: answer 503 and try later."""


class PolicyError(BanaServeError):
    """A policy failed, which is a bug in its code: answer 500 and go on serving."""


class DeadlineExceededError(BanaServeError):
    """The request ran out of its time budget."""


class MigrationError(UserError):
    """A move cannot begin or continue: the host is unchanged."""


class NoAnswerError(MigrationError):
    """An engine has not answered in time: ask it again later."""


class GuestLostError(BanaServeError):
    """A guest died, stalled or sent an invalid answer: its modules come home without their KV."""


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` in one line, after its class unless it is a ``UserError``."""
    words = _ADDRESS.sub("", " ".join(str(error).split()))
    if isinstance(error, UserError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
