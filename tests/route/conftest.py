"""A balancer on a real socket between real connections; replicas do what each test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import ExitStack

import msgspec
import pytest
import uvloop
from msgspec import structs

from balancer_log import without_stalls
from banaserve.frontdoor.lifecycle.listening_socket import bind
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import (
    BalancerSettings,
    HealthSettings,
    PolicySettings,
    ReplicaSettings,
)
from banaserve_route.balancer.http.listening import listen
from banaserve_route.balancer.relays.processes import Relays
from banaserve_route.balancer.server import tick
from ports import held_port
from region_link import RegionLink
from waiting import until

WAIT_S = 60.0
"""Only a test that fails waits this long."""


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories():
    return {"uvloop": uvloop.new_event_loop}


class Asked:
    """One request as a replica has read it."""

    def __init__(self, head, body, reader, writer):
        lines = head.decode("latin-1").split("\r\n")
        self.line = lines[0]
        self.fields = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
        self.body = body
        self.reader, self.writer = reader, writer

    def field(self, name):
        return next((value for key, value in self.fields if key.lower() == name.lower()), None)

    async def answer(self, status=200, body=b"{}", fields=""):
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
        await self.send(head.encode() + body)

    async def begin_stream(self):
        await self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    async def event(self, text):
        data = f"data: {text}\n\n".encode()
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self):
        await self.send(b"0\r\n\r\n")

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    def kill(self):
        self.writer.transport.abort()

    async def until_gone(self):
        """Return when the other side has closed the connection."""
        with contextlib.suppress(OSError):
            while await self.reader.read(65536):
                pass


class Replica:
    """An HTTP server; ``behave`` is awaited with each request but looks at its health."""

    def __init__(self, behave=None, ssl=None):
        self.ssl = ssl
        self.asked = []
        self.num_connections = 0
        self.health = 200
        self.metrics = b""
        self.num_looks = self.num_reads = 0
        self.behave = behave or (lambda asked: asked.answer())
        self._writers = set()

    async def start(self, port=0):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http{'s' * bool(self.ssl)}://127.0.0.1:{self.port}"
        self.id = f"127.0.0.1:{self.port}"
        return self

    def stop(self):
        """Stop listening and break every connection."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader, writer):
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                asked = Asked(head[:-4], b"", reader, writer)
                asked.body = await reader.readexactly(int(asked.field("content-length") or 0))
                if asked.line.startswith("GET /health "):
                    self.num_looks += 1
                    await asked.answer(self.health)
                elif asked.line.startswith("GET /metrics "):
                    self.num_reads += 1
                    await asked.answer(200, self.metrics)
                else:
                    self.asked.append(asked)
                    await self.behave(asked)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


class Reply:
    """One answer as a client has read it."""

    def __init__(self, status, fields, body, is_whole):
        self.status, self.fields, self.body, self.is_whole = status, fields, body, is_whole

    @property
    def json(self):
        return msgspec.json.decode(self.body)


class Caller:
    """One client's connection; ``settled`` is awaited with it after each answer to ``ask``."""

    def __init__(self, reader, writer, settled):
        self.reader, self.writer, self._settled = reader, writer, settled

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, path="/v1/completions", body=b"{}", fields="", method="POST"):
        head = f"{method} {path} HTTP/1.1\r\nHost: b\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
        await self.send(head.encode("latin-1") + body)
        reply = await self.reply(method == "HEAD")
        await self._settled(self)
        return reply

    @property
    def name(self):
        """Address and port, as the server sees them."""
        return self.writer.get_extra_info("sockname")

    async def head(self):
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)).decode()
        lines = head.split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), fields

    async def reply(self, to_head=False):
        """Read one answer; its own parser, so that the balancer's is not tested with itself."""
        status, fields = await self.head()
        if to_head or status == 204:
            return Reply(status, fields, b"", True)
        try:
            if "content-length" in fields:
                body = await self._exactly(int(fields["content-length"]))
            elif fields.get("transfer-encoding") == "chunked":
                body = b"".join([chunk async for chunk in self.chunks()])
            else:
                body = await asyncio.wait_for(self.reader.read(), WAIT_S)
        except (asyncio.IncompleteReadError, OSError):
            return Reply(status, fields, b"", False)
        return Reply(status, fields, body, True)

    async def chunks(self):
        while True:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), WAIT_S), 16)
            data = await self._exactly(size + 2)
            assert data.endswith(b"\r\n")
            if size == 0:
                return
            yield data[:-2]

    async def _exactly(self, num_bytes):
        return await asyncio.wait_for(self.reader.readexactly(num_bytes), WAIT_S)

    def hang_up(self):
        self.writer.transport.abort()


class House:
    """The balancer under test with its replicas and clients."""

    def __init__(self, processes):
        self.processes = processes
        self.log = []
        self.balancers, self.relays = [], []
        self._open = []
        self._ports = ExitStack()

    async def replica(self, behave=None, port=0, ssl=None):
        # One that is started again finds its port free.
        made = await Replica(behave, ssl).start(port or held_port(self._ports))
        self._open.append(made.stop)
        return made

    async def balance(self, *replicas, health=None, **settings):
        """Start a balancer over ``replicas``, which take turns: servers, URLs or settings."""
        settings.setdefault("policy", PolicySettings(name="round_robin"))
        told = []
        for one in replicas:
            url = one if isinstance(one, str) else getattr(one, "url", None)
            told.append(one if isinstance(one, ReplicaSettings) else ReplicaSettings(url=url))
        health = health or HealthSettings(interval_s=0.05, breaker_pause_s=0.05)
        told = BalancerSettings(replicas=tuple(told), health=health, **settings)
        self.balancer, self.port, _ = await self.open(told)
        return self.balancer

    async def first_probes(self, replicas):
        """Return when the probes that come with a start are over, and drop their connections.

        A break of a connection that a probe has used would be no fault.
        """
        targets = self.balancer.targets.values()
        await self.until(lambda: all(one.num_looks == 2 for one in replicas))
        # Those that have been idle for long are closed.
        await self.until(lambda: all(len(one.pool._idle) == len(one.pool._all) for one in targets))
        for target in targets:
            target.pool.drop_idle()

    async def open(self, settings, port=0, log=None):
        """Returns a balancer that serves, its port, and a function that kills it."""
        # Each relay binds the port too.
        port = port or held_port(self._ports)
        # A time limit that ends as all of this process stands still is no replica's fault.
        settings = structs.replace(
            settings,
            port=port,
            processes=self.processes,
            limits=structs.replace(settings.limits, connect_timeout_s=WAIT_S, drain_s=WAIT_S),
            health=structs.replace(settings.health, timeout_s=WAIT_S),
        )
        lines = self.log if log is None else log
        balancer = Balancer(settings, lambda line: lines.extend(without_stalls([line])))
        await balancer.start()
        shared = self.processes > 1
        socks = [bind("127.0.0.1", port, is_shared=shared) for _ in range(self.processes)]
        self.listening = socks
        if shared:
            life, held = os.pipe()
            for descriptor in (life, held):
                self._ports.callback(os.close, descriptor)
            server = Relays(balancer, socks, life)
            self.relays.append(server)
            await server.start()
        else:
            server = await listen(balancer, socks[0])
        ticking = asyncio.get_running_loop().create_task(tick(balancer))

        def kill():
            server.close()
            ticking.cancel()
            balancer.close()

        self._open.append(kill)
        self.balancers.append(balancer)
        return balancer, port, kill

    async def link(self, to_port, delay_s):
        made = await RegionLink(to_port, delay_s).start()
        self._open.append(made.stop)
        return made

    async def caller(self, port=None, ssl=None):
        opened = await asyncio.open_connection("127.0.0.1", port or self.port, ssl=ssl)
        return Caller(*opened, self._settled)

    async def _settled(self, caller):
        """Return once balancers know of the end of an answer, which a relay tells its client too.

        A balancer without relays knows it first.
        """
        clients = (
            one
            for relays in self.relays
            for each in relays._all
            if each._link is not None  # that of a balancer that starts has none yet
            for one in each._link._clients.values()
        )
        mine = [one for one in clients if one.peer == caller.name]
        await self.until(lambda: not any(one.request for one in mine))

    async def ask(self, *args, **kwargs):
        caller = await self.caller()
        reply = await caller.ask(*args, **kwargs)
        caller.hang_up()
        return reply

    async def until(self, holds):
        """Return when ``holds()``; the balancer's own ticks make it so."""
        await until(holds, WAIT_S)

    def close(self):
        for close in reversed(self._open):
            close()
        self._ports.close()


def pytest_generate_tests(metafunc):
    given = [one.args[0] for one in metafunc.definition.iter_markers("parametrize")]
    if "processes" in metafunc.fixturenames and "processes" not in given:
        is_alone = metafunc.definition.get_closest_marker("one_process") is not None
        several = () if is_alone else (pytest.param(2, marks=pytest.mark.room),)
        metafunc.parametrize("processes", [1, *several])


@pytest.fixture
async def house(processes):
    made = House(processes)
    yield made
    made.close()
    for relays in made.relays:
        await relays.end()
    for balancer in made.balancers:
        await made.until(lambda: not len(balancer.connections))  # noqa: B023
        balancer.fleet.check()
        assert balancer.buffered_bytes == 0
        assert not balancer.fleet._flights
