"""Survey of nodes: their resources, and the links between them.

A link is measured by the round trip of a message between a server and its nodes, inside TLS, and by
the bytes that cross a plain TCP connection, as KV blocks and migrations do; the receiver sends back
their count.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from banaserve.base.errors import ProtocolError
from banaserve.nodes import messages
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import NodeLink, NodeLostError, connect
from banaserve.nodes.places import AgentPlace
from banaserve.transport.threaded_server import listen_tcp

_NUM_ROUND_TRIPS = 20
_PING = messages.Data(1, b".")
_FILL_S = 0.3
_SOCKET_S = 5.0
_CHUNK_BYTES = 1 << 20
_TOKEN_BYTES = 32
_COUNT_BYTES = 8


async def echo(link: NodeLink, host: str) -> None:
    """Serve a peer that measures the link, until the peer leaves.

    Args:
        host: Address to listen on for the bytes.

    Raises:
        NodeLostError: The peer has left.
        ProtocolError: The peer has sent an unexpected message.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    with listen_tcp(host) as listening:
        listening.settimeout(_SOCKET_S)
        counting = asyncio.create_task(asyncio.to_thread(_count, listening, token))
        try:
            await link.send(messages.EchoOpened(listening.getsockname()[1], token))
            while True:
                match said := await link.receive():
                    case messages.Data():
                        await link.send(said)
                    case _:
                        raise ProtocolError(f"{link.peer} says {type(said).__name__} to an echo")
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
            await asyncio.gather(counting, return_exceptions=True)


async def measure_link(
    host: str, port: int, credentials: ClusterCredentials
) -> messages.LinkMeasured:
    """Measure the link to a node whose agent listens at ``host:port``."""
    try:
        link = await connect(host, port, credentials)
    except NodeLostError as error:
        return messages.LinkMeasured(problem=str(error))
    try:
        await link.send(messages.EchoLink())
        opened = await link.receive()
        if not isinstance(opened, messages.EchoOpened):
            raise ProtocolError(f"{link.peer} opens no echo")
        round_trips = [await _round_trip_s(link) for _ in range(_NUM_ROUND_TRIPS)]
        bytes_per_s = await asyncio.to_thread(_filled, host, opened)
        return messages.LinkMeasured(min(round_trips), bytes_per_s)
    except (NodeLostError, ProtocolError) as error:
        return messages.LinkMeasured(problem=str(error))
    except OSError as error:
        return messages.LinkMeasured(problem=f"{link.peer}: {error.strerror or error}")
    finally:
        await link.close()


async def _round_trip_s(link: NodeLink) -> float:
    began_s = time.perf_counter()
    await link.send(_PING)
    if await link.receive() != _PING:
        raise ProtocolError(f"{link.peer} does not echo")
    return time.perf_counter() - began_s


def _filled(host: str, opened: messages.EchoOpened) -> float:
    """Return the measured throughput, in bytes per second; blocking.

    Raises:
        OSError: The bytes do not get through.
    """
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection((host, opened.port), _SOCKET_S) as sock:
        sock.sendall(opened.token)
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < _FILL_S:
            sock.sendall(chunk)
        sock.shutdown(socket.SHUT_WR)
        count = _exactly(sock, _COUNT_BYTES)
        elapsed_s = time.perf_counter() - began_s
    return int.from_bytes(count) / elapsed_s


def _count(listening: socket.socket, token: bytes) -> None:
    """Discard the bytes of a peer that knows the token, and send their count back; blocking."""
    with suppress(OSError):
        sock, _ = listening.accept()
        with sock:
            sock.settimeout(_SOCKET_S)
            if not hmac.compare_digest(_exactly(sock, _TOKEN_BYTES), token):
                return
            into, num_bytes = bytearray(_CHUNK_BYTES), 0
            while got := sock.recv_into(into):
                num_bytes += got
            sock.sendall(num_bytes.to_bytes(_COUNT_BYTES))


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    got = b""
    while len(got) < num_bytes:
        part = sock.recv(num_bytes - len(got))
        if not part:
            raise OSError("the other side has closed the connection")
        got += part
    return got


T = TypeVar("T", bound=messages.NodeMessage)
HERE = "this machine"
_ANSWER_S = 60.0
"""Maximum time for an answer, in seconds: reading a large model from a slow disk takes long."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report on a node.

    Attributes:
        name: ``HOST:PORT`` of the node.
        found: Resources of the node; None if it does not answer.
        ahead_s: Lead of the node's clock over this machine's clock, in seconds.
        problem: Reason why the node does not answer; empty if it does.
    """

    name: str
    found: messages.Inspected | None
    ahead_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Report on the link from one node, or from this machine, to another node."""

    source: str
    target: str
    measured: messages.LinkMeasured


async def survey_nodes(
    places: Sequence[AgentPlace], credentials: ClusterCredentials, asked: messages.Inspect
) -> tuple[list[NodeReport], list[LinkReport]]:
    """Inspect all nodes, then measure the links of all pairs sequentially.

    Returns:
        The nodes in their order; links from here to each node, then between all that answer.
    """
    nodes = await asyncio.gather(*(inspected(place, credentials, asked) for place in places))
    there = [place for place, node in zip(places, nodes, strict=True) if node.found is not None]
    links = [
        LinkReport(HERE, one.name, await measure_link(one.host, one.port, credentials))
        for one in there
    ]
    for source, target in itertools.permutations(there, 2):
        measured = await measured_from(source, target, credentials)
        links.append(LinkReport(source.name, target.name, measured))
    return list(nodes), links


async def inspected(
    place: AgentPlace, credentials: ClusterCredentials, asked: messages.Inspect
) -> NodeReport:
    """Return a report on the node at ``place``, without taking the node."""
    try:
        found = await _asked(place, credentials, asked, messages.Inspected)
    except (NodeLostError, ProtocolError) as error:
        return NodeReport(place.name, None, problem=str(error))
    return NodeReport(place.name, found, found.time_s - time.time())


async def measured_from(
    source: AgentPlace, target: AgentPlace, credentials: ClusterCredentials
) -> messages.LinkMeasured:
    """Let one node measure the link to another."""
    question = messages.MeasureLink(target.host, target.port)
    try:
        return await _asked(source, credentials, question, messages.LinkMeasured)
    except (NodeLostError, ProtocolError) as error:
        return messages.LinkMeasured(problem=str(error))


async def _asked(
    place: AgentPlace,
    credentials: ClusterCredentials,
    question: messages.NodeMessage,
    kind: type[T],
) -> T:
    link = await connect(place.host, place.port, credentials)
    try:
        await link.send(question)
        async with asyncio.timeout(_ANSWER_S):
            answer = await link.receive()
    except TimeoutError:
        raise NodeLostError(f"node {place.name} does not answer") from None
    finally:
        await link.close()
    if not isinstance(answer, kind):
        raise ProtocolError(f"it says {type(answer).__name__}")
    return answer
