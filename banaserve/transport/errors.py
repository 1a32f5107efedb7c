"""Errors of transports: one class for each way in which the caller can handle a failure."""

from __future__ import annotations

from banaserve.base.errors import BanaServeError


class TransportError(BanaServeError):
    """Base class of a transport's errors."""


class PeerGoneError(TransportError):
    """Error when the peer has died, closed or broken the connection: open another connection."""


class TransferTimeoutError(TransportError):
    """Error when a deadline has passed while the peer may be alive: cancel, or wait longer."""


class TransferCancelledError(TransportError):
    """Error when a transfer was cancelled: its target may hold a mixture of old and new bytes."""


class RefusedError(TransportError):
    """Error for a forbidden request (out of bounds, unknown, wrong key): nothing was done."""


class StaleEpochError(RefusedError):
    """Error for an old epoch: learn the current epoch before the next request."""
