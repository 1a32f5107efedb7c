"""``banaserve route --processes 2`` as a user starts and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from balancer_log import without_stalls
from ports import free_port
from process_tree import ProcessTree
from waiting import until

WAIT_S = 60.0
"""Only a test that fails waits this long."""


class Streams:
    """A server whose streams have one event until they may end."""

    def __init__(self):
        self.may_end = asyncio.Event()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        while head := await reader.readline():
            while len(await reader.readline()) > 2:
                pass
            if not head.startswith(b"POST"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                continue
            kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
            status = b"400 No" if b"error" in head else b"200 OK"
            writer.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n3\r\none\r\n" % (status, kind))
            await self.may_end.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()


class Route:
    """The command, and everything that it starts."""

    def __init__(self, url, folder):
        self.port, self.config = free_port(), folder / "route.toml"
        self.write(url)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "banaserve", "route", "--config", str(self.config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.tree = ProcessTree(self.process.pid)

    async def __aenter__(self):
        await self.serves()
        return self

    async def serves(self):
        """Returns when it has shown that it serves, once more."""
        line = "-"
        while line and "Ctrl-C" not in line:
            line = await asyncio.to_thread(self.process.stdout.readline)

    async def __aexit__(self, *_):
        self.tree.signal(signal.SIGKILL)
        self.process.communicate()

    def write(self, url, more=""):
        # The server and the clients are this process, which may be slow.
        self.config.write_text(
            f"port = {self.port}\nprocesses = 2\n{more}\nreplicas = [{{ url = '{url}' }}]\n"
            "limits = { connect_timeout_s = 60, drain_s = 60 }\nhealth = { timeout_s = 60 }\n"
        )

    async def status(self):
        """Returns the status of an answer without a key."""
        async with asyncio.timeout(WAIT_S):
            while True:
                # As in ``stream_again``.
                with contextlib.suppress(OSError, IndexError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: b\r\n\r\n")
                    status = (await reader.readline()).split()[1]
                    writer.close()
                    if status != b"503":
                        return status

    async def stream(self, path=b"/v1/completions"):
        """Returns a connection with a stream under way."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n" % path)
        assert b"one" in await asyncio.wait_for(reader.readuntil(b"one\r\n"), WAIT_S)
        return reader, writer

    async def stream_again(self):
        """Returns the writer of a connection with a stream, once one can begin."""
        async with asyncio.timeout(WAIT_S):
            while True:
                # A relay of the process that has ended may answer 503.
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    return (await self.stream())[1]

    async def ended(self):
        """Returns the lines of standard error, once all of its processes have ended."""
        _, error = await asyncio.wait_for(asyncio.to_thread(self.process.communicate), WAIT_S)
        await until(lambda: not self.tree.alive())
        return without_stalls(error.splitlines())

    def is_closed(self):
        """Returns whether no process accepts connections."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) != 0


@pytest.mark.parametrize("to_all", [False, True], ids=["the command", "all processes"])
async def test_a_signal_lets_streams_end_and_leaves_no_process(tmp_path, to_all):
    async with Streams() as server, Route(server.url, tmp_path) as route:
        streams = [await route.stream() for _ in range(4)]
        assert len(route.tree.alive()) == 4
        if to_all:
            route.tree.signal(signal.SIGTERM)
        else:
            route.process.send_signal(signal.SIGINT)
        await until(route.is_closed)
        server.may_end.set()
        for reader, _ in streams:
            assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"two\r\n0\r\n\r\n")
        assert await route.ended() == []
        number = signal.SIGTERM if to_all else signal.SIGINT
        assert route.process.returncode == 128 + number


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (b"/v1/completions", signal.SIGKILL),
        (b"/v1/error", signal.SIGKILL),
        pytest.param(b"/v1/completions", signal.SIGSTOP, marks=pytest.mark.room),
    ],
)
async def test_the_process_that_decides_starts_again_and_streams_go_on(tmp_path, path, number):
    async with Streams() as server, Route(server.url, tmp_path) as route:
        reader, writer = await route.stream(path)
        [decides] = psutil.Process(route.process.pid).children()
        decides.send_signal(number)
        other = await route.stream_again()
        server.may_end.set()
        assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"two\r\n0\r\n\r\n")
        for each in (writer, other):
            each.close()
        route.process.terminate()
        said = "\n".join(await route.ended())
        assert "the process that decides has ended: signal 9" in said
        assert ("it hangs" in said) is (number == signal.SIGSTOP)
        assert route.process.returncode == 128 + signal.SIGTERM


async def test_a_changed_file_holds_for_the_process_that_starts_again(tmp_path):
    async with Streams() as server, Route(server.url, tmp_path) as route:
        assert await route.status() == b"200"
        route.write(server.url, "api_keys = ['k']")
        async with asyncio.timeout(WAIT_S):
            while await route.status() != b"401":
                pass
        [decides] = psutil.Process(route.process.pid).children()
        decides.kill()
        await route.serves()
        assert await route.status() == b"401"


async def test_all_end_as_at_a_signal_after_the_death_of_the_first_process(tmp_path):
    async with Streams() as server, Route(server.url, tmp_path) as route:
        reader, _ = await route.stream()
        route.process.kill()
        await until(route.is_closed)
        server.may_end.set()
        assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"two\r\n0\r\n\r\n")
        await route.ended()


async def test_the_port_of_a_running_balancer_is_in_use(tmp_path):
    async with Streams() as server, Route(server.url, tmp_path) as route:
        argv = ["route", "--replica", server.url, "--port", str(route.port), "--processes", "2"]
        second = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "banaserve", *argv],
            capture_output=True,
            text=True,
        )
        assert second.returncode == 2
        assert f"cannot listen on 127.0.0.1:{route.port}" in second.stderr
