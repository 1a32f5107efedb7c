"""Measuring of a link between two machines: a round trip, and bytes a second in one direction.

Both go through TLS in one thread each, as what a server and its nodes say does; KV blocks and
migrations have connections of their own, and more of them.
"""

from __future__ import annotations

import time

from banaserve.errors import ProtocolError
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import CHUNK_BYTES, Data, NodeLink, NodeLostError, connect
from banaserve.nodes.messages import EchoLink, LinkMeasured

_ECHO, _SINK = 1, 2
_NUM_ROUND_TRIPS = 20
_FILL_S = 0.3
_MAX_FILL_BYTES = 256 << 20
_PING = b"."


async def echo(link: NodeLink) -> None:
    """Serve one that measures until it leaves.

    Raises:
        NodeLostError: It has left.
        ProtocolError: It says anything else.
    """
    while True:
        match await link.receive():
            case Data(channel, content):
                if channel == _ECHO:
                    await link.send_data(_ECHO, content)
            case said:
                raise ProtocolError(f"{link.peer} says {type(said).__name__} while it measures")


async def measure_link(host: str, port: int, credentials: ClusterCredentials) -> LinkMeasured:
    """Measure the way to a node whose agent listens at ``host:port``."""
    try:
        link = await connect(host, port, credentials)
    except NodeLostError as error:
        return LinkMeasured(problem=str(error))
    try:
        await link.send(EchoLink())
        round_trips = [await _round_trip_s(link) for _ in range(_NUM_ROUND_TRIPS)]
        return LinkMeasured(min(round_trips), await _bytes_per_s(link))
    except (NodeLostError, ProtocolError) as error:
        return LinkMeasured(problem=str(error))
    finally:
        await link.close()


async def _round_trip_s(link: NodeLink) -> float:
    began_s = time.perf_counter()
    await link.send_data(_ECHO, _PING)
    said = await link.receive()
    if said != Data(_ECHO, _PING):
        raise ProtocolError(f"{link.peer} does not echo")
    return time.perf_counter() - began_s


async def _bytes_per_s(link: NodeLink) -> float:
    chunk, num_bytes = bytes(CHUNK_BYTES), 0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < _FILL_S and num_bytes < _MAX_FILL_BYTES:
        await link.send_data(_SINK, chunk)
        num_bytes += len(chunk)
    await _round_trip_s(link)  # behind all of it
    return num_bytes / (time.perf_counter() - began_s)
