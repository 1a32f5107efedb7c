"""File descriptors of this process: how many there may be, and errors for lack of them."""

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
"""Containers may have a limit of 2**30, and programs that are started later may visit them all."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; returns what holds from here on.

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
    """How many connections of clients ``limit`` descriptors leave room for.

    Args:
        wanted: More is not asked for.
        reserved: Descriptors for everything else; where the limit is low, a quarter of it.
        each: Descriptors of a connection: 2 where a request needs a second one.
    """
    if limit == resource.RLIM_INFINITY:
        return wanted
    left = limit - min(reserved, limit // 4)
    return min(wanted, max(_FEWEST_CONNECTIONS, left // each))


def is_own_fault(error: BaseException) -> bool:
    """Whether a connection has failed for lack of something of ours: it says nothing of the peer.

    The resolver calls a name unknown where it cannot open its files.
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
