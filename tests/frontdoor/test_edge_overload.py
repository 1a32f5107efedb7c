"""Overload of the front door, resource by resource, by clients without a key.

Each case exceeds the cap of one resource while a stream of a client with a key is under way, which
has to come to its end, and while another client with a key has to be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from time import monotonic

import pytest

pytest.importorskip("vllm")

from banaserve.frontdoor.app import ApiServer
from banaserve.frontdoor.edge import http_protocol, refusals
from banaserve.frontdoor.edge.limits import EdgeLimits
from connection_invariants import check_connections
from edge_server import (
    HEAD,
    KEY,
    LARGE_BYTES,
    NO_TLS,
    Application,
    Caller,
    Rig,
    on_uvloop,
    patient,
    refused,
    serving,
    serving_a_stream,
)
from slow_reading import reads_some, served_end
from waiting import until

DEFAULT = patient()
ARGS = Namespace(
    **NO_TLS, ssl_cert_reqs=0, uvicorn_log_level="error", disable_uvicorn_access_log=True
)


@on_uvloop
async def test_silent_connections_keep_nobody_out() -> None:
    before = refused("connections")
    async with serving_a_stream(patient(max_connections=12, max_per_address=12)) as rig:
        await rig.silent(60)
        await until(lambda: refused("connections") >= before + 48)
        assert len(rig.edge.table) <= 12
        check_connections(rig.edge.table)


@on_uvloop
async def test_one_address_takes_no_place_of_another() -> None:
    async with serving_a_stream(patient(max_connections=40, max_per_address=5)) as rig:
        others = await rig.silent(5, "127.0.0.2")
        await until(lambda: len(rig.edge.table) == 6)
        many = await rig.silent(30)
        for one in many[:25]:
            assert await one.is_closed()
        await until(lambda: len(rig.edge.table) == 11)
        for one in others:
            await one.send(f"{HEAD}{KEY}Content-Length: 2\r\n\r\n{{}}")
            assert await one.answer() == (200, b"{}")


@on_uvloop
async def test_a_new_connection_is_refused_where_all_others_have_shown_a_key() -> None:
    async with serving(patient(max_connections=3)) as rig:
        kept = []
        for _ in range(3):
            caller = await rig.caller()
            await caller.send(f"{HEAD}{KEY}Content-Length: 2\r\n\r\n{{}}")
            assert await caller.answer() == (200, b"{}")
            kept.append(caller)
        assert await (await rig.caller()).refusal() == (
            503,
            "too many connections are open; try again shortly",
        )
        for caller in kept:
            await caller.send(f"{HEAD}{KEY}Content-Length: 2\r\n\r\n{{}}")
            assert await caller.answer() == (200, b"{}")


@on_uvloop
async def test_a_head_without_end_is_cut_off() -> None:
    async with serving_a_stream() as rig:
        for start in (HEAD + "X: ", "POST /v1/", f"{HEAD}Content-Length: 5\r\nCookie: "):
            caller = await rig.caller()
            await caller.send(start)
            await _flood(caller, b"a" * 65536, 64)
            assert await caller.answer() == await _refusal_431()
            assert await caller.is_closed()


async def _refusal_431() -> tuple[int, bytes]:
    said = f"the head has more than {DEFAULT.max_head_bytes} bytes or {DEFAULT.max_fields} fields"
    answer = refusals.closing_answer(refusals.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, said)
    return 431, answer.partition(b"\r\n\r\n")[2]


async def _flood(caller: Caller, piece: bytes, number: int) -> None:
    """Send until the other side has had enough."""
    for _ in range(number):
        if caller.writer.transport.is_closing():
            return
        try:
            caller.writer.write(piece)
            await asyncio.wait_for(caller.writer.drain(), 0.2)
        except (OSError, TimeoutError):
            return


@on_uvloop
async def test_fields_without_number_are_cut_off() -> None:
    async with serving_a_stream() as rig:
        caller = await rig.caller()
        await caller.send(HEAD + "a:b\r\n" * (DEFAULT.max_fields + 1))
        status, said = await caller.refusal()
        assert status == 431
        assert "256 fields" in said


@on_uvloop
async def test_as_many_fields_as_are_allowed_are_no_fault() -> None:
    async with serving() as rig:
        caller = await rig.caller()
        await caller.send(HEAD + KEY + "a:b\r\n" * (DEFAULT.max_fields - 3) + "\r\n")
        assert (await caller.answer())[0] == 200


@on_uvloop
async def test_trailers_are_bounded_and_change_nothing() -> None:
    async with serving_a_stream() as rig:
        chunked = f"{HEAD}{KEY}Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"
        caller = await rig.caller()
        await caller.send(chunked + "a: b\r\n" * 300)
        assert (await caller.refusal())[0] == 431
        caller = await rig.caller()
        await caller.send(chunked + "Authorization: Bearer other\r\n\r\n")
        assert await caller.answer() == (200, b"ab")


@on_uvloop
async def test_half_a_head_has_its_time() -> None:
    async with serving_a_stream() as rig:
        caller, kept = await rig.caller(), await rig.caller()
        await caller.send(HEAD)
        await kept.send(f"{HEAD}{KEY}\r\n")
        assert (await kept.answer())[0] == 200
        await kept.send("POST /v1/")
        await until(lambda: _pending(rig) == 2)
        rig.later(DEFAULT.head_s / 2)
        assert _pending(rig) == 2
        rig.later(DEFAULT.head_s + 1)
        for one in (caller, kept):
            status, said = await one.answer()
            assert (status, b"head took too long" in said) == (408, True)
        rig.later(DEFAULT.head_s + 4)
        assert await caller.is_closed()
        assert await kept.is_closed()


def _pending(rig: Rig) -> int:
    """Connections on which part of a head has come."""
    return sum(one._framing_bytes > 0 and not one._is_refused for one in rig.edge.table)


@on_uvloop
async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with serving_a_stream() as rig:
        caller = await rig.caller()
        await until(lambda: len(rig.edge.table) == 2)
        rig.later(DEFAULT.head_s + 1)
        assert await caller.is_closed()


@on_uvloop
async def test_time_passes_by_itself_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        door = ApiServer(Application(), sock, ARGS, EdgeLimits(head_s=0.05))
        closed = await door.open()
        caller = Caller(*await asyncio.open_connection(*sock.getsockname()))
        await until(lambda: len(door._edge.table) == 1)
        [one] = door._edge.table
        accepted = one.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert await caller.is_closed()
        door.close()
        await closed


@on_uvloop
async def test_bodies_without_a_key_take_no_places() -> None:
    async with serving_a_stream(max_requests=4) as rig:
        for number in range(16):
            caller = await rig.caller()
            path = ("/v1/completions", "/ping", "/health")[number % 3]
            await caller.send(f"POST {path} HTTP/1.1\r\nHost: d\r\nContent-Length: 1000\r\n\r\nx")
            assert (await caller.answer())[0] == 401
        assert (await rig.ask())[0] == 200


@pytest.mark.parametrize("keys", [(), ("good",)])
@on_uvloop
async def test_bodies_that_never_come_take_no_places(keys: tuple[str, ...]) -> None:
    """Not even where no key is needed, or where a key has been shown."""
    async with serving_a_stream(max_requests=4, keys=keys) as rig:
        callers = await rig.silent(16)
        for caller in callers:
            await caller.send(f"{HEAD}{KEY}Content-Length: 1000\r\n\r\nx")
        await until(lambda: sum(one._body_bytes for one in rig.edge.table) == 16)
        assert (await rig.ask())[0] == 200
        rig.later(DEFAULT.body_s + 1)
        for caller in callers:
            assert (await caller.answer())[0] == 408


@on_uvloop
async def test_a_body_has_its_time_in_all_however_it_trickles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_s = 0.0
    monkeypatch.setattr(http_protocol, "monotonic", lambda: monotonic() + passed_s)
    async with serving_a_stream(patient(body_bytes_per_s=1000.0)) as rig:
        slow, steady = await rig.caller(), await rig.caller()
        for caller in (slow, steady):
            await caller.send(f"{HEAD}{KEY}Content-Length: 1000000\r\n\r\n")
        half = b"a" * 500_000
        await steady.send(half)
        for number in range(10):
            await until(lambda: _num_body_bytes(rig) == 500_000 + number)  # noqa: B023
            rig.later(passed_s)
            passed_s += DEFAULT.body_s / 10
            await slow.send(b"a")
        await until(lambda: _num_body_bytes(rig) == 500_010)
        rig.later(DEFAULT.body_s + 100)
        assert await slow.refusal() == (408, "the body took too long")
        await steady.send(half)
        assert await steady.answer() == (200, half + half)


def _num_body_bytes(rig: Rig) -> int:
    return sum(one._body_bytes for one in rig.edge.table)


@on_uvloop
async def test_the_rest_of_a_refused_body_has_its_time_too() -> None:
    async with serving_a_stream() as rig:
        caller = await rig.caller()
        await caller.send(f"{HEAD}Content-Length: 1000\r\n\r\n")
        assert (await caller.answer())[0] == 401
        for _ in range(3):
            await caller.send("x")
        await until(lambda: any(one._body_bytes == 3 for one in rig.edge.table))
        rig.later(DEFAULT.body_s + 1)
        assert await caller.is_closed()


@on_uvloop
async def test_a_body_without_end_behind_its_answer_is_cut_off() -> None:
    before = refused("unwanted")
    async with serving_a_stream(EdgeLimits(max_unwanted_bytes=2**20)) as rig:
        callers = [await rig.caller() for _ in range(2)]
        for caller in callers:
            await caller.send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n")
            assert (await caller.answer())[0] == 401
        endless, fine = callers
        chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
        await fine.send(15 * chunk + b"0\r\n\r\n")
        await fine.send(f"{HEAD}{KEY}Content-Length: 2\r\n\r\nhi")
        assert await fine.answer() == (200, b"hi")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await endless.send(chunk)
        assert await endless.is_closed()
        assert (await rig.ask())[0] == 200
    assert refused("unwanted") == before + 1


@on_uvloop
async def test_a_client_that_never_reads_is_dropped_and_a_slow_one_is_not() -> None:
    before = refused("unread")
    async with serving_a_stream() as rig:
        ask = "GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n"
        deaf, slow = await rig.caller(), await rig.caller()
        for one in (deaf, slow):
            one.writer.transport.pause_reading()
            await one.send(ask)
        await until(lambda: _num_unread(rig) == 2)
        # Until their buffers are full, their number of bytes still changes.
        deadline_s, body = 0.0, 0
        served = served_end((one.transport for one in rig.edge.table), slow.writer)
        while len(rig.edge.table) == 3:
            body += await reads_some(slow.reader, slow.writer, served)
            deadline_s += DEFAULT.unread_s / 3
            rig.later(deadline_s)
        assert refused("unread") == before + 1
        assert deadline_s >= DEFAULT.unread_s
        slow.writer.transport.resume_reading()
        while body < LARGE_BYTES:
            part = await slow.within(slow.reader.read(2**20))
            assert part, "the slow reader was dropped"
            body += len(part)


def _num_unread(rig: Rig) -> int:
    return sum(one.transport.get_write_buffer_size() > 0 for one in rig.edge.table)


@on_uvloop
async def test_what_is_no_http_is_refused_in_one_line_and_logged_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(refusals, "_log", refusals.RefusalLog(lines.append, lambda: 100.0))
    before = refused("no_request")
    async with serving_a_stream() as rig:
        for _ in range(5):
            caller = await rig.caller()
            await caller.send("nonsense\r\n\r\n")
            assert await caller.refusal() == (400, "this is no valid HTTP/1.1 request")
    assert refused("no_request") == before + 5
    assert lines == ["refused (400): this is no valid HTTP/1.1 request"]


@on_uvloop
async def test_nonsense_behind_a_request_is_not_taken_for_its_answer() -> None:
    async with serving_a_stream() as rig:
        caller = await rig.caller()
        await caller.send(f"POST /v1/stream HTTP/1.1\r\nHost: d\r\n{KEY}Content-Length: 0\r\n\r\n")
        assert (await caller.head())[0] == 200
        await caller.send("nonsense\r\n\r\n")
        rest = await asyncio.wait_for(caller.reader.read(), 60)
        assert b"HTTP/1.1" not in rest


@on_uvloop
async def test_an_unknown_upgrade_is_answered_once() -> None:
    async with serving_a_stream() as rig:
        caller = await rig.caller()
        upgrade = "Connection: Upgrade\r\nUpgrade: h2c\r\n"
        await caller.send(f"{HEAD}{KEY}{upgrade}Content-Length: 2\r\n\r\n{{}}")
        status, fields = await caller.head()
        assert (status, fields["connection"]) == (200, "close")


MANY = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(400)]
print("open", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process can open so many more, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@on_uvloop
async def test_connections_without_number_leave_descriptors_for_what_has_to_be_opened() -> None:
    before = refused("connections")
    with descriptors_left(70):
        async with serving_a_stream(patient(max_connections=30, max_per_address=30)) as rig:
            besieging = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", MANY, str(rig.address[1])),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert besieging.stdin is not None
            assert besieging.stdout is not None
            assert await asyncio.wait_for(besieging.stdout.readline(), 60) == b"open\n"
            await until(lambda: refused("connections") >= before + 370)
            assert len(rig.edge.table) <= 30
            for _ in range(5):
                assert (await rig.ask())[0] == 200
            besieging.stdin.close()
            assert await asyncio.wait_for(besieging.wait(), 60) == 0
