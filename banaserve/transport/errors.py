"""Errors of transports: one class for each thing that the caller can do about a failure."""

from __future__ import annotations

from banaserve.errors import BanaServeError


class TransportError(BanaServeError):
    """Base of what a transport raises."""


class PeerGoneError(TransportError):
    """The peer has died, closed or broken the connection: open another."""


class TransferTimeoutError(TransportError):
    """The deadline has passed and the peer may still live: cancel, or wait on."""


class TransferCancelledError(TransportError):
    """The transfer was cancelled: its target holds any mixture of old and new bytes."""


class RefusedError(TransportError):
    """What was asked is not allowed and nothing was done: out of bounds, unknown, wrong key."""


class StaleEpochError(RefusedError):
    """The epoch has moved on: learn the present one before asking again."""
