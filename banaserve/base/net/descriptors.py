"""File descriptors of this process: their limit, and errors for lack of them."""

from __future__ import annotations

import errno
import os
import resource
import socket

_OWN_FAULTS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)
_FEWEST_CONNECTIONS = 16
_ENOUGH = 2**20
"""Maximum limit set: containers may allow 2**30, and child programs may iterate over them all."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors to the hard limit; return the limit in force.

    The soft limit of 1,024 is for programs that use ``select``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # as in a sandbox
        return soft
    return wanted


def connections_within(limit: int, wanted: int, reserved: int, each: int = 1) -> int:
    """Return the number of client connections that ``limit`` descriptors allow.

    Args:
        wanted: Maximum number of connections to return.
        reserved: Number of descriptors for everything else; at most a quarter of ``limit``.
        each: Number of descriptors per connection: 2 if a request needs a second one.
    """
    if limit == resource.RLIM_INFINITY:
        return wanted
    left = limit - min(reserved, limit // 4)
    return min(wanted, max(_FEWEST_CONNECTIONS, left // each))


def is_own_fault(error: BaseException) -> bool:
    """Return whether a connection has failed for lack of a local resource, not due to the peer.

    The resolver reports a name as unknown when it cannot open its files.
    """
    if isinstance(error, socket.gaierror):
        return _are_used_up()
    return isinstance(error, OSError) and error.errno in _OWN_FAULTS


def _are_used_up() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in _OWN_FAULTS
    return False
