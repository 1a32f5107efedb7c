"""Links between a server and nodes, over real TLS: keys, silence, frames, sockets that go on."""

from __future__ import annotations

import asyncio
import errno
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from banaserve.base.errors import ProtocolError, UserError
from banaserve.base.net.framing import MessageReader
from banaserve.nodes import link as links
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import NodeLink, NodeLostError, accepted, connect
from banaserve.nodes.messages import (
    FRAMING,
    MAX_MESSAGE_BYTES,
    ChannelClosed,
    ChannelOpened,
    Data,
    Done,
    FreePort,
    LogWritten,
    NodeMessage,
    NodeRefused,
    PortFound,
    PrepareNode,
    ProcessDying,
    ProcessEnded,
    SessionOpened,
    SetStorePeers,
)
from banaserve.nodes.places import AgentPlace
from banaserve.nodes.relay import Relay
from banaserve.nodes.server import client as clients
from banaserve.nodes.server import shim
from banaserve.nodes.server.client import NodeClient
from waiting import until

OVERHEAD_BYTES = len(msgspec.msgpack.encode(Data(7, bytes(1 << 19)))) - (1 << 19)
KEY, OTHER = "a-key-of-a-cluster", "a-key-of-another-one"
Serve = Callable[[NodeLink], Awaitable[None]]


@asynccontextmanager
async def door(serve: Serve, key: str = KEY, silent_s: float = 2.5) -> AsyncIterator[int]:
    """Port of a door that serves each link; what fails there fails the test."""
    failed: list[BaseException] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = accepted(reader, writer, silent_s)
        try:
            await serve(link)
        except NodeLostError:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            await link.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=ClusterCredentials.of(key).server)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        assert not failed, failed


async def until_gone(link: NodeLink) -> None:
    while True:
        await link.receive()


async def first_of(port: int, key: str) -> object:
    """What a door says first to who has a key."""
    link = await connect("127.0.0.1", port, ClusterCredentials.of(key))
    try:
        return await link.receive()
    finally:
        await link.close()


def test_messages_and_bytes_arrive_in_their_order() -> None:
    async def echo(link: NodeLink) -> None:
        link.start_beats()
        while True:
            await link.send(await link.receive())

    async def run() -> None:
        async with door(echo) as port:
            link = await connect("127.0.0.1", port, ClusterCredentials.of(KEY))
            large = Data(7, secrets.token_bytes(MAX_MESSAGE_BYTES - OVERHEAD_BYTES))
            await link.send(FreePort())
            await link.send(large)
            await link.send(LogWritten(b"\x00\xff"))
            assert await link.receive() == FreePort()
            assert await link.receive() == large
            assert await link.receive() == LogWritten(b"\x00\xff")
            await link.close()

    asyncio.run(run())


def test_another_key_gets_nowhere() -> None:
    begun: list[NodeLink] = []

    async def note(link: NodeLink) -> None:
        begun.append(link)
        await until_gone(link)

    async def run() -> None:
        async with door(note) as port:
            with pytest.raises(
                NodeLostError, match=rf"node 127.0.0.1:{port}: .*another cluster key"
            ):
                await first_of(port, OTHER)
            bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=bare)
            with suppress(OSError):
                writer.write(bytes(100))
                assert await reader.read() == b""
            writer.close()

    asyncio.run(run())
    assert begun == []


def test_what_was_recorded_opens_nothing() -> None:
    """A client's bytes of a whole session, sent once more, are no client."""
    begun: list[NodeLink] = []
    recorded = bytearray()

    async def note(link: NodeLink) -> None:
        begun.append(link)
        with suppress(NodeLostError):
            assert await link.receive() == FreePort()
            await link.send(PortFound(1))

    async def run() -> None:
        async with door(note) as port:

            async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection("127.0.0.1", port)

                async def answers() -> None:
                    while content := await there.read(65536):
                        writer.write(content)

                answering = asyncio.create_task(answers())
                while content := await reader.read(65536):
                    recorded.extend(content)
                    back.write(content)
                back.close()
                await asyncio.gather(answering, return_exceptions=True)
                writer.close()

            tap = await asyncio.start_server(record, "127.0.0.1", 0)
            link = await connect(
                "127.0.0.1", tap.sockets[0].getsockname()[1], ClusterCredentials.of(KEY)
            )
            await link.send(FreePort())
            assert await link.receive() == PortFound(1)
            await link.close()
            tap.close()
            assert len(begun) == 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bytes(recorded))
            with suppress(OSError):
                async with asyncio.timeout(10.0):
                    await reader.read()
            writer.close()

    asyncio.run(run())
    assert len(begun) == 1
    assert len(recorded) > 500


def test_silence_is_noticed_and_beats_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BEAT_S", 0.02)
    lives, is_over = asyncio.Event(), asyncio.Event()

    async def beat_for_a_while(link: NodeLink) -> None:
        link.start_beats()
        await lives.wait()
        await link.close()  # no more beats; the connection stays open in effect for the test below

    async def stand_still(link: NodeLink) -> None:
        await is_over.wait()

    async def opened(port: int, silent_s: float) -> NodeLink:
        tls = ClusterCredentials.of(KEY).client
        ends = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="")
        return NodeLink(*ends, "the node", silent_s)

    async def run() -> None:
        async with door(beat_for_a_while) as port:
            # A busy machine may keep this process, which sends the beats too, from running.
            link = await opened(port, silent_s=1.0)
            receiving = asyncio.create_task(link.receive())
            done, _ = await asyncio.wait({receiving}, timeout=1.5)
            assert not done
            lives.set()
            with pytest.raises(NodeLostError):
                await receiving
            await link.close()
        async with door(stand_still) as port:
            link = await opened(port, silent_s=0.3)
            with pytest.raises(NodeLostError, match=r"said nothing for 0\.3 seconds"):
                await link.receive()
            is_over.set()
            await link.close()

    asyncio.run(run())


def test_a_stall_of_the_whole_machine_does_not_count_as_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead_s = 0.0
    monkeypatch.setattr(links, "since_received_s", lambda _: 10.0)

    def stall() -> None:
        nonlocal ahead_s
        ahead_s += 10.0

    async def stall_between_messages(link: NodeLink) -> None:
        for _ in range(3):
            asyncio.get_running_loop().call_soon(stall)  # both sides run in this loop
            for _ in range(10):  # the other side's timer is handled before this side sends
                await asyncio.sleep(0)
            await link.send(Done())

    async def run() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: time.monotonic() + ahead_s
        async with door(stall_between_messages) as port:
            tls = ClusterCredentials.of(KEY).client
            ends = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="")
            link = NodeLink(*ends, "the node", silent_s=0.3)
            for _ in range(3):
                assert await link.receive() == Done()
            await link.close()

    asyncio.run(run())


@pytest.mark.deep
def test_a_node_that_prepares_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SILENT_S", 0.2)

    async def stand_still(link: NodeLink, for_s: float) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.receive(), for_s)

    async def prepare_slowly(link: NodeLink) -> None:
        await link.receive()
        await link.send(SessionOpened("1", "/tmp", (), 0, 1))
        await link.receive()
        await stand_still(link, 0.6)
        await link.send(Done())
        await until_gone(link)

    async def run() -> None:
        async with door(prepare_slowly) as port:
            place = AgentPlace("127.0.0.1", port)
            client = NodeClient(place, ClusterCredentials.of(KEY), "a server", lambda: None)
            await client.open()
            await client.prepare(PrepareNode((), forks=True))
            assert client.is_ready
            await client.wait_lost()
            assert "has said nothing for 0.2 seconds" in client.problem
            await client.close()

    asyncio.run(run())


def test_an_answer_that_nobody_awaits_any_more_is_not_that_to_the_next_question() -> None:
    is_asked, is_given_up = asyncio.Event(), asyncio.Event()

    async def answer_late(link: NodeLink) -> None:
        await link.receive()
        await link.send(SessionOpened("1", "/tmp", (), 0, 1))
        assert await link.receive() == FreePort()
        is_asked.set()
        await is_given_up.wait()
        await link.send(PortFound(1))
        assert await link.receive() == SetStorePeers(())
        await link.send(Done())
        assert await link.receive() == FreePort()
        await link.send(PortFound(2))
        await until_gone(link)

    async def run() -> None:
        async with door(answer_late) as port:
            place = AgentPlace("127.0.0.1", port)
            client = NodeClient(place, ClusterCredentials.of(KEY), "a server", lambda: None)
            await client.open()
            asking = asyncio.create_task(client.free_port())
            await is_asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            is_given_up.set()
            await client.set_store_peers(())
            assert await client.free_port() == 2
            await client.close()

    asyncio.run(run())


def test_a_link_is_closed_although_its_closing_was_cancelled() -> None:
    async def run() -> None:
        async with door(until_gone) as port:
            link = await connect("127.0.0.1", port, ClusterCredentials.of(KEY))
            closing = asyncio.create_task(link.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert link._writer.transport.is_closing()

    asyncio.run(run())


def test_a_refusal_and_nonsense_are_one_line_each() -> None:
    async def refuse(link: NodeLink) -> None:
        await link.send(NodeRefused("it is full"))
        await until_gone(link)

    async def lie(link: NodeLink) -> None:
        link._writer.write((2**31).to_bytes(4, "little"))
        await until_gone(link)

    async def babble(link: NodeLink) -> None:
        link._writer.write((9).to_bytes(4, "little") + b"\xa8nonsense")
        await until_gone(link)

    async def run() -> None:
        for serve, kind, words in (
            (refuse, NodeLostError, "refuses: it is full"),
            (lie, ProtocolError, "is too large"),
            (babble, ProtocolError, "not a message"),
        ):
            async with door(serve) as port:
                link = await connect("127.0.0.1", port, ClusterCredentials.of(KEY))
                with pytest.raises(kind, match=words):
                    await link.receive()
                await link.close()

    asyncio.run(run())


def test_nobody_there_is_one_line() -> None:
    async def run() -> None:
        with pytest.raises(NodeLostError, match=r"node 127.0.0.1:1: .*[Rr]efused"):
            await connect("127.0.0.1", 1, ClusterCredentials.of(KEY))
        with pytest.raises(NodeLostError, match=r"node a\.\.b:1: .*label empty"):
            await connect("a..b", 1, ClusterCredentials.of(KEY))

    asyncio.run(run())
    with pytest.raises(UserError, match=r"16 characters or more.*give --cluster-key-file"):
        ClusterCredentials.of("short")


@pytest.mark.parametrize(
    "body", [b"", b"\x80", b"\x81\xa4type\xa4Beat\xa1x\x01", b"\xdc\xff\xff", bytes(range(256))]
)
def test_hostile_bodies_are_protocol_errors(body: bytes) -> None:
    reader = MessageReader(FRAMING)
    reader.feed(len(body).to_bytes(4, "little") + body)
    with pytest.raises(ProtocolError, match="not a message"):
        reader.take()


def test_sockets_of_a_node_lead_to_those_of_the_server(tmp_path: Path) -> None:
    """What connects to a socket there talks with who listens here, both ways, until one closes."""
    here = tmp_path / "here.h"
    seen: list[bytes] = []

    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(65536):
            seen.append(content)
            writer.write(content.upper())
            await writer.drain()
        writer.close()

    async def follow(link: NodeLink, relay: Relay, targets: dict[str, str]) -> None:
        with suppress(NodeLostError):
            while True:
                match said := await link.receive():
                    case Data():
                        await relay.took(said)
                    case ChannelOpened():
                        await relay.opened(said, targets)
                    case ChannelClosed():
                        relay.closed(said)

    async def node(link: NodeLink) -> None:
        relay = Relay(link)
        await relay.listen(tmp_path / "there", ["h", "x"])
        await follow(link, relay, {})
        await relay.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(upper, here)
        async with door(node) as port:
            link = await connect("127.0.0.1", port, ClusterCredentials.of(KEY))
            relay = Relay(link)
            following = asyncio.create_task(
                follow(link, relay, {"h": str(here), "x": str(tmp_path / "nobody")})
            )
            await until((tmp_path / "there.x").exists)
            large = secrets.token_hex(1 << 20).encode()
            reader, writer = await asyncio.open_unix_connection(tmp_path / "there.h")
            writer.write(large)
            assert await reader.readexactly(len(large)) == large.upper()
            writer.close()
            lost, refused = await asyncio.open_unix_connection(tmp_path / "there.x")
            assert await lost.read() == b""
            refused.close()
            await until(lambda: not relay._open)
            await relay.close()
            await link.close()
            await asyncio.gather(following, return_exceptions=True)
        server.close()

    asyncio.run(run())
    assert sum(map(len, seen)) == 2 << 20


def test_a_full_disk_takes_the_log_of_a_node_s_engine_but_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life, said = threading.Event(), [LogWritten(b"words"), ProcessDying(), ProcessEnded()]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def receive() -> NodeMessage:
        return said.pop(0)

    async def run() -> None:
        link: Any = SimpleNamespace(receive=receive)
        with monkeypatch.context() as patch:
            patch.setattr("banaserve.nodes.server.shim.os.write", full)
            await shim._follow(link, Relay(link), {}, life)

    asyncio.run(run())
    assert life.is_set()


def test_a_socket_that_nobody_has_offered_is_refused() -> None:
    async def open_another(link: NodeLink) -> None:
        await link.send(ChannelOpened(1, "secret"))
        await until_gone(link)

    async def run() -> None:
        async with door(open_another) as port:
            link = await connect("127.0.0.1", port, ClusterCredentials.of(KEY))
            said = await link.receive()
            assert isinstance(said, ChannelOpened)
            with pytest.raises(ProtocolError, match="what nobody has offered"):
                await Relay(link).opened(said, {"h": "/nowhere"})
            await link.close()

    asyncio.run(run())
