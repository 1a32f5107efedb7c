"""A listening socket goes from one server to another: over a Unix socket, whoever speaks there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

pytest.importorskip("vllm")

from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import AdminAccess, find_offer, open_run_dir, write_admin
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.frontdoor.app import ApiServer
from banaserve.frontdoor.lifecycle import listening_socket
from banaserve.frontdoor.lifecycle.listening_socket import (
    ClaimLostError,
    Offer,
    Refusal,
    SocketClaim,
    SocketOffer,
)
from certificates import write_certificate
from waiting import until

ADDRESS = ("127.0.0.1", 8000)
OFFER = Offer(os.getpid(), *ADDRESS, "http")
_said = listening_socket._encode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "door"


@pytest.fixture
def front() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@contextlib.asynccontextmanager
async def offering(path: Path, front: socket.socket) -> AsyncIterator[SocketOffer]:
    offer = SocketOffer(path, front, OFFER)
    async with offer.open():
        yield offer


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60.0)
    sock.connect(str(path))
    return sock


async def taken_over(offer: SocketOffer, path: Path) -> socket.socket:
    """All of a take-over from the claimant's side."""
    claim = await asyncio.to_thread(SocketClaim, path, *ADDRESS)
    with contextlib.closing(claim):
        assert claim.offer == OFFER
        given = await asyncio.to_thread(claim.take)
        assert not offer.taken.is_set()
        serving = asyncio.create_task(asyncio.to_thread(claim.report))
        await asyncio.wait_for(offer.taken.wait(), 60)
        assert not serving.done()
        offer.retired.set()
        await serving
    return given


async def test_the_socket_is_the_same_and_both_accept_on_it(
    path: Path, front: socket.socket
) -> None:
    async with offering(path, front) as offer:
        with await taken_over(offer, path) as given:
            assert offer.taker == os.getpid()
            assert given.getsockname() == front.getsockname()
            front.close()  # what has come to it and is not accepted is the other's
            with socket.create_connection(given.getsockname()) as client:
                given.settimeout(60.0)
                with given.accept()[0] as connection:
                    client.sendall(b"still here")
                    assert connection.recv(100) == b"still here"
    assert os.listdir(path.parent) == []


async def test_what_is_in_the_queue_goes_along(path: Path, front: socket.socket) -> None:
    with socket.create_connection(front.getsockname()) as waiting:
        async with offering(path, front) as offer:
            given = await taken_over(offer, path)
        front.close()
        given.settimeout(60.0)
        with given, given.accept()[0] as connection:
            assert connection.getpeername() == waiting.getsockname()


@pytest.mark.parametrize("stage", ["claimed", "taken"])
async def test_a_claimant_that_ends_changes_nothing(
    stage: str, path: Path, front: socket.socket
) -> None:
    async with offering(path, front) as offer:
        claim = await asyncio.to_thread(SocketClaim, path, *ADDRESS)
        if stage == "taken":
            (await asyncio.to_thread(claim.take)).close()
        with pytest.raises(UserError, match=f"process {os.getpid()} is taking it over"):
            await asyncio.to_thread(SocketClaim, path, *ADDRESS)
        claim.close()
        await until(lambda: not offer._claimant)
        assert not offer.taken.is_set()
        (await taken_over(offer, path)).close()


@pytest.mark.parametrize(
    "says",
    [
        [],
        [b"no message"],
        [b"\xff" * 5000],
        [_said("take")],
        [_said("ask"), _said("serves")],
        [_said("ask"), _said("take"), _said("take")],
        [_said("ask"), _said("take"), b"\x81"],
    ],
    ids=["end", "garbage", "much", "too early", "untaken", "twice", "garbage at the end"],
)
async def test_a_peer_that_says_something_else_gets_nothing(
    says: list[bytes], path: Path, front: socket.socket
) -> None:
    async with offering(path, front) as offer:
        with connected(path) as peer:
            for one in says:
                peer.send(one)
            peer.shutdown(socket.SHUT_WR)
            while await asyncio.to_thread(peer.recv, 5000):
                pass
        await until(lambda: len(offer._tasks) == 1)
        assert not offer.taken.is_set()
        (await taken_over(offer, path)).close()


async def test_a_peer_that_says_nothing_keeps_nobody_waiting(
    path: Path, front: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offering(path, front) as offer:
        with connected(path):
            (await taken_over(offer, path)).close()
    monkeypatch.setattr(listening_socket, "_ANSWER_S", 0.01)
    async with offering(path, front):
        with connected(path) as silent:
            assert await asyncio.to_thread(silent.recv, 100) == b""


async def test_another_user_gets_nothing(
    path: Path, front: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_socket, "peer_of", lambda _: (1, os.getuid() + 1))
    async with offering(path, front) as offer:
        with connected(path) as stranger:
            stranger.send(_said("ask"))
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 100) == b""
        with pytest.raises(UserError, match="another user's"):
            await asyncio.to_thread(SocketClaim, path, *ADDRESS)
        assert not offer._claimant


def test_a_peers_process_and_user_are_the_systems_word() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert listening_socket.peer_of(ours) == (os.getpid(), os.getuid())


# ---- the running server says what it should not


@contextlib.contextmanager
def server_that(path: Path, speaks: Callable[[socket.socket], None]) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(path))
        door.listen()

        def attend() -> None:
            with door.accept()[0] as connection:
                connection.settimeout(60.0)
                speaks(connection)

        thread = threading.Thread(target=attend)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"", "no server of this version can be asked .* has ended"),
        (b"garbage", "no server of this version .* what nobody knows"),
        (_said("given"), "given came and an offer was due"),
        (_said(Refusal("process 7 is taking it over")), "process 7 is taking it over: wait"),
    ],
)
def test_a_claim_that_is_not_answered_by_an_offer_is_an_error(
    said: bytes, message: str, path: Path
) -> None:
    def speaks(connection: socket.socket) -> None:
        connection.recv(100)
        if said:
            connection.send(said)

    with server_that(path, speaks), pytest.raises(UserError, match=message):
        SocketClaim(path, *ADDRESS)


def test_a_claim_without_an_answer_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_socket, "_ANSWER_S", 0.01)
    with (
        server_that(path, lambda connection: connection.recv(100) and connection.recv(100)),
        pytest.raises(UserError, match="does not answer"),
    ):
        SocketClaim(path, *ADDRESS)


def test_a_claim_where_nobody_listens_is_an_error(path: Path) -> None:
    with pytest.raises(UserError, match=r"no server of this version .* \(No such file"):
        SocketClaim(path, *ADDRESS)
    path.touch()
    with pytest.raises(UserError, match=r"no server of this version .* refused"):
        SocketClaim(path, *ADDRESS)


def test_what_is_given_must_be_one_socket_that_listens(path: Path, front: socket.socket) -> None:
    """No descriptor stays open of what is not."""
    with socket.socket() as deaf, open(os.devnull) as file:
        for answer, numbers, message in [
            ("given", [], "no socket that listens"),
            ("given", [deaf.fileno()], "no socket that listens"),
            ("given", [file.fileno()], "no socket that listens"),
            ("retired", [front.fileno()], "retired came and given was due"),
        ]:
            path.unlink(missing_ok=True)

            def speaks(
                connection: socket.socket, answer: Any = answer, numbers: list[int] = numbers
            ) -> None:
                connection.recv(100)
                connection.send(_said(OFFER))
                connection.recv(100)
                socket.send_fds(connection, [_said(answer)], numbers)
                connection.recv(100)

            with (
                server_that(path, speaks),
                contextlib.closing(SocketClaim(path, *ADDRESS)) as claim,
            ):
                before = sorted(os.listdir("/proc/self/fd"))
                with pytest.raises(ClaimLostError, match=message):
                    claim.take()
                assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_server_that_ends_in_the_middle_is_lost(path: Path) -> None:
    def speaks(connection: socket.socket) -> None:
        connection.recv(100)
        connection.send(_said(OFFER))

    with server_that(path, speaks), contextlib.closing(SocketClaim(path, *ADDRESS)) as claim:
        with pytest.raises(ClaimLostError):
            claim.take()
        with pytest.raises(ClaimLostError):
            claim.report()


@pytest.mark.parametrize(
    ("host", "port", "scheme", "message"),
    [
        ("127.0.0.1", 8000, "http", ""),
        ("127.0.0.1", 8001, "http", r"listens on 127.0.0.1:8000 and not on 127.0.0.1:8001: give"),
        ("0.0.0.0", 8000, "http", r"not on 0.0.0.0:8000"),
        ("127.0.0.1", 8000, "https", r"speak http and this one would serve https"),
    ],
)
async def test_another_address_or_scheme_is_refused(
    host: str, port: int, scheme: str, message: str, path: Path, front: socket.socket
) -> None:
    async with offering(path, front) as offer:
        refused = pytest.raises(UserError, match=message) if message else contextlib.nullcontext()
        with refused:
            claim = await asyncio.to_thread(SocketClaim, path, host, port)
            with contextlib.closing(claim):
                claim.check_scheme(scheme)
        assert not offer.taken.is_set()


# ---- where the running server has ended before


@contextlib.contextmanager
def lost_claim(path: Path, front: socket.socket) -> Iterator[SocketClaim]:
    """A claim on the address of ``front``, of a server that has ended."""
    host, port = front.getsockname()

    def offers(connection: socket.socket) -> None:
        connection.recv(100)
        connection.send(_said(Offer(os.getpid(), host, port, "http")))

    with server_that(path, offers):
        claim = SocketClaim(path, host, port)
    with contextlib.closing(claim):
        yield claim


async def test_an_address_that_has_become_free_is_bound_and_said(
    path: Path, front: socket.socket
) -> None:
    """Engines of the server that has ended keep its socket for a moment."""
    said: list[str] = []
    address = front.getsockname()
    with lost_claim(path, front) as claim:
        obtaining = asyncio.create_task(claim.obtain(said.append))
        await until(lambda: bool(said))
        assert not obtaining.done()
        front.close()
        with await obtaining as sock:
            assert sock.getsockname() == address
            await claim.serves(said.append)
    assert len(said) == 1
    assert said[0].startswith("nothing to take over (the other server has ")
    assert said[0].endswith(": listening anew")


async def test_an_address_that_does_not_become_free_is_an_error(
    path: Path, front: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_socket, "_FREE_AGAIN_S", 0.01)
    with lost_claim(path, front) as claim, pytest.raises(UserError, match="cannot listen on"):
        await claim.obtain(lambda _: None)


# ---- which server runs


def test_a_run_is_found_by_its_folder_or_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with open_run_dir(None) as run, open_run_dir(tmp_path / "other") as other:
        with pytest.raises(UserError, match=r"no banaserve of yours serves on port 8000"):
            find_offer(None, 8000)  # it starts
        write_admin(run.logs, AdminAccess("http://127.0.0.1:8000", "key"))
        write_admin(other.logs, AdminAccess("http://127.0.0.1:8001", "key"))
        assert find_offer(None, 8000) == run.offer
        assert find_offer(other.logs, 8000) == other.offer  # the claim says that it is another port
        with pytest.raises(UserError, match="on port 8001"):
            find_offer(None, 8001)
        with pytest.raises(UserError, match=f"serves in {tmp_path}/nothing"):
            find_offer(tmp_path / "nothing", 8000)
        note = run.logs / "run.json"
        note.write_text(json.dumps({"pid": os.getpid()}))
        with pytest.raises(UserError, match=r"cannot read .*sockets"):
            find_offer(None, 8000)
    with pytest.raises(UserError, match="no banaserve of yours"):
        find_offer(None, 8000)


def test_another_users_folder_is_said_to_be_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuses)
    with pytest.raises(UserError, match=r"admin.json: Permission denied"):
        find_offer(tmp_path, 8000)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--take-over"], ""),
        (["--take-over", "--port", "9000"], ""),
        (["m", "--take-over", "/runs/one", "--port", "9000"], "/runs/one"),
    ],
)
def test_the_option_names_a_run_or_none(argv: list[str], expected: str | None) -> None:
    assert parse_serve_argv(argv).take_over == expected


# ---- the door between two servers


ARGS = Namespace(
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ciphers")),
    ssl_cert_reqs=0,
    uvicorn_log_level="error",
    disable_uvicorn_access_log=True,
)


class Named:
    """Answers each request with its name, a POST only once it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_end = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.num_begun += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["method"] == "POST":
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": self.name.encode()})


async def _requests_on_either_side_of_it(
    front: socket.socket, certificate: Path | None, key: Path | None
) -> None:
    scheme = "https" if certificate else "http"
    url = "{}://{}:{}".format(scheme, *front.getsockname())
    args = Namespace(**{**vars(ARGS), "ssl_certfile": certificate, "ssl_keyfile": key})
    old, new = Named("old"), Named("new")
    first, second = ApiServer(old, front.dup(), args), ApiServer(new, front.dup(), args)
    closed = [await first.open()]
    trusted = ssl.create_default_context(cafile=certificate) if certificate else True
    options: dict[str, Any] = {"base_url": url, "timeout": 60.0, "verify": trusted}
    options["limits"] = httpx.Limits(keepalive_expiry=None)
    async with (
        httpx.AsyncClient(**options) as kept,
        httpx.AsyncClient(**options) as busy,
        httpx.AsyncClient(**options, headers={"Connection": "close"}) as fresh,
    ):
        stream = asyncio.create_task(busy.post("/"))
        await until(lambda: old.num_begun == 1)
        assert (await kept.get("/")).text == "old"
        closed.append(await second.open())
        first.retire()
        last = await kept.get("/")
        assert (last.text, last.headers["connection"]) == ("old", "close")
        again = await kept.get("/")
        assert (again.text, again.headers.get("connection")) == ("new", None)
        for _ in range(20):
            assert (await fresh.get("/")).text == "new"
        assert first.num_connections() > 0
        old.may_end.set()
        assert (await stream).text == "old"
        assert (await busy.get("/")).headers["connection"] == "close"
    await until(lambda: first.num_connections() == 0)
    assert new.num_begun == 21
    for door in (first, second):
        door.close()
    await asyncio.gather(*closed)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
def test_no_connection_is_refused_and_those_that_are_open_end_with_an_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    is_tls: bool,
    front: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    certificate, key = write_certificate(tmp_path) if is_tls else (None, None)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_requests_on_either_side_of_it(front, certificate, key))
