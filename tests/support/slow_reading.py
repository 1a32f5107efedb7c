"""A client that reads slowly, so that a server can tell it from one that reads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from banaserve.base.net.stalled_writes import num_unread_bytes

_PART_BYTES = 2**17
_WAIT_S = 60.0


def served_end(
    transports: Iterable[asyncio.Transport], writer: asyncio.StreamWriter
) -> asyncio.Transport:
    """The one of a server's ``transports`` whose client is ``writer``'s."""
    own = writer.get_extra_info("sockname")
    [found] = [one for one in transports if one.get_extra_info("peername") == own]
    return found


async def reads_some(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, served: asyncio.Transport
) -> int:
    """Read until another number of bytes waits at ``served``, or none; returns how many were read.

    The client reads nothing before and after, and takes no part that its socket gets meanwhile.
    """
    waited, num_read = num_unread_bytes(served), 0
    while True:
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        part = await asyncio.wait_for(reader.read(_PART_BYTES), _WAIT_S)
        assert part, "the slow reader was dropped"
        num_read += len(part)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        if (waiting := num_unread_bytes(served)) != waited or not waiting:
            return num_read
