"""What a server under test may answer: something else than HTTP, models or metrics."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from banaserve.base.clock import WallClock
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.metrics_page import fetch
from banaserve_bench.loadgen.modelled_time import modelled_time
from banaserve_bench.loadgen.target import find_target
from banaserve_bench.serving import timeline

Answering = Callable[[bytes], str]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts a server that gives everybody the same bytes; returns its address."""
    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(65536)
                    peer.sendall(answer)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in opened:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
        len(body),
        body,
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (page(b'{"data": [1]}'), "lists no models"),
        (page(b"<html>"), "is no OpenAI API"),
    ],
)
def test_what_is_no_server_of_models(answering: Answering, answer: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_target(answering(answer), None, None)


@pytest.mark.parametrize("body", [b"<html><body>hi {</body></html>", b'{"detail": "no"}', b"\xff"])
def test_a_page_that_is_not_of_metrics_tells_nothing(answering: Answering, body: bytes) -> None:
    assert modelled_time(answering(page(body))) is None


class ShowingKey(http.server.BaseHTTPRequestHandler):
    """Handler that answers a question with its key."""

    def do_GET(self) -> None:
        self.wfile.write(page(self.headers.get("Authorization", "no key").encode()))

    def log_message(self, *_: object) -> None:
        pass


def test_a_redirect_takes_the_key_to_no_other_server(answering: Answering) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ShowingKey) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}/"
        head = f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nConnection: close\r\n\r\n"
        try:
            assert fetch(url, "secret") == "Bearer secret"
            assert fetch(answering(head.encode()), "secret") == "no key"
        finally:
            other.shutdown()


async def test_a_look_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    has_failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look(url: str, api_key: str | None, timeout_s: float) -> str:
        looks.append(url)
        if len(looks) == 1:
            raise http.client.IncompleteRead(b"")
        loop.call_soon_threadsafe(has_failed.set)
        return ""

    monkeypatch.setattr(timeline, "fetch", look)
    monkeypatch.setattr(timeline, "_EVERY_S", 0.0)
    async with timeline.watched("http://nowhere", WallClock()):
        await asyncio.wait_for(has_failed.wait(), 60)
    assert set(looks) == {"http://nowhere/metrics"}
