"""Table of connections, descriptors, the pace of the refusal log, and writes that stand still."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.base.net.connections import ConnectionTable, address_of
from banaserve.base.net.refusal_log import RefusalLog
from banaserve.base.net.sockets import (
    IDLE_S,
    connections_within,
    is_own_fault,
    keep_alive,
    raise_descriptor_limit,
)
from banaserve.base.net.stalled_writes import StalledWrites, num_unread_bytes
from connection_invariants import check_connections


class Connection:
    def evict(self) -> None:
        """Nothing: the table only says which one."""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("open", "show a key", "close")),
            st.integers(0, 3),
            st.integers(0, 7),
        ),
        max_size=80,
    )
)
def test_whoever_has_shown_a_key_is_never_closed_for_another(
    steps: list[tuple[str, int, int]],
) -> None:
    table: ConnectionTable[Connection] = ConnectionTable(6, 3)
    is_open: dict[tuple[str, int], Connection] = {}
    with_key: set[tuple[str, int]] = set()
    for what, address, port in steps:
        peer = (f"10.0.0.{address}", port)
        if what == "open" and peer not in is_open:
            made = is_open[peer] = Connection()
            evicted = table.add(made, peer)
            gone = next((at for at, one in is_open.items() if one is evicted), None)
            assert (gone is None) == (evicted is None)
            if gone is not None:
                assert gone not in with_key
                del is_open[gone]
        elif what == "show a key" and peer in is_open:
            table.authenticated(is_open[peer], peer)
            with_key.add(peer)
        elif what == "close" and peer in is_open:
            table.remove(is_open.pop(peer), peer)
            with_key.discard(peer)
        check_connections(table)
        assert list(table) == list(is_open.values())
        for each in range(4):
            name = f"10.0.0.{each}"
            assert sum(at[0] == name and at not in with_key for at in is_open) <= 3


def test_the_oldest_without_a_key_makes_way() -> None:
    table: ConnectionTable[Connection] = ConnectionTable(3, 3)
    first, second, third, late, later = (Connection() for _ in range(5))
    for port, one in enumerate((first, second, third)):
        assert table.add(one, ("a", port)) is None
    table.authenticated(first, ("a", 0))
    assert table.add(late, ("b", 0)) is second
    table.authenticated(third, ("a", 2))
    table.authenticated(late, ("b", 0))
    assert table.add(later, ("c", 0)) is later
    assert len(table) == 3


def test_another_protocol_takes_the_place_of_the_first() -> None:
    table: ConnectionTable[Connection] = ConnectionTable(1, 1)
    handshake, behind_it = Connection(), Connection()
    peer = ("a", 1)
    assert table.add(handshake, peer) is None
    assert table.add(behind_it, peer) is None
    table.remove(handshake, peer)
    assert list(table) == [behind_it]
    table.authenticated(behind_it, peer)
    check_connections(table)
    table.remove(behind_it, peer)
    assert len(table) == 0
    check_connections(table)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (("10.0.0.1", 1), ("10.0.0.1", 2), True),
        (("10.0.0.1", 1), ("10.0.0.2", 1), False),
        (("2001:db8::1", 1, 0, 0), ("2001:db8::ffff:1", 2, 0, 0), True),
        (("2001:db8::1", 1, 0, 0), ("2001:db8:0:1::1", 1, 0, 0), False),
        (("fe80::1%eth0", 1, 0, 2), ("fe80::2%eth0", 1, 0, 2), True),
        (("::ffff:10.0.0.1", 1, 0, 0), ("10.0.0.1", 2), True),
        (("::ffff:10.0.0.1", 1, 0, 0), ("::ffff:10.0.0.2", 1, 0, 0), False),
    ],
)
def test_whom_an_address_is_counted_as(one: object, other: object, is_same: bool) -> None:
    assert (address_of(one) == address_of(other)) is is_same  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "wanted", "reserved", "each", "allowed"),
    [
        (1024, 16384, 256, 2, 384),
        (1024, 16384, 512, 1, 768),
        (65536, 16384, 512, 1, 16384),
        (65536, 100, 512, 1, 100),
        (256, 16384, 512, 2, 96),
        (8, 16384, 512, 2, 16),
        (resource.RLIM_INFINITY, 16384, 512, 1, 16384),
    ],
)
def test_connections_are_what_descriptors_leave_room_for(
    limit: int, wanted: int, reserved: int, each: int, allowed: int
) -> None:
    assert connections_within(limit, wanted, reserved, each) == allowed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), 4096),
        ((1024, 2**30), 2**20),
        ((1024, resource.RLIM_INFINITY), 2**20),
        ((2**22, 2**30), 2**22),
        ((4096, 4096), 4096),
    ],
)
def test_a_limit_is_raised_as_far_as_is_sensible(
    before: tuple[int, int], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: held.append(limits))
    assert raise_descriptor_limit() == after
    assert held[-1] == (after, before[1])


def test_the_soft_limit_becomes_the_hard_one() -> None:
    script = (
        "import resource as r\n"
        "from banaserve.base.net.sockets import raise_descriptor_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 300))\n"
        "print(raise_descriptor_limit(), *r.getrlimit(r.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["300", "300", "300"]


def test_a_limit_that_cannot_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_descriptor_limit() == 100


def test_what_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
        assert is_own_fault(OSError(number, ""))
    assert not is_own_fault(ConnectionRefusedError(errno.ECONNREFUSED, ""))
    assert not is_own_fault(TimeoutError())
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert not is_own_fault(unknown)

    def used_up(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", used_up)
    assert is_own_fault(unknown)


def test_accepted_connections_are_probed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        keep_alive(listening)
        with (
            socket.create_connection(listening.getsockname()),
            listening.accept()[0] as accepted,
        ):
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == IDLE_S


def test_a_cause_is_logged_once_a_second_and_says_what_was_left_out() -> None:
    lines: list[str] = []
    now_s = 100.0
    log = RefusalLog(lines.append, lambda: now_s)
    for _ in range(5):
        log.say("head", "a head")
    log.say("body", "a body")
    assert lines == ["a head", "a body"]
    now_s += 1.0
    log.say("head", "a head")
    assert lines[2:] == ["a head (4 more since the last line)"]


def test_what_clients_name_makes_no_lines_of_its_own() -> None:
    lines: list[str] = []
    RefusalLog(lines.append).say("elements", "refused: a\nERROR forged\x1b[2J\r\u2028b\u0085")
    (line,) = lines
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert "ERROR forged" in line


def test_bytes_that_change_are_not_stalled() -> None:
    stalled = StalledWrites()
    for now_s, num_bytes, expected_s in (
        (0.0, 0, 0.0),
        (10.0, 100, 0.0),
        (20.0, 100, 10.0),
        (30.0, 90, 0.0),
        (40.0, 90, 10.0),
        (50.0, 0, 0.0),
        (60.0, 0, 0.0),
        (70.0, 90, 0.0),
    ):
        assert stalled.stalled_s(num_bytes, now_s) == expected_s


@pytest.mark.parametrize(
    ("has_tls", "waiting", "counts_the_kernels"),
    [(True, 0, True), (False, 0, False), (True, 7, True), (False, 7, True)],
)
def test_what_waits_in_the_kernel_is_unread_too(
    has_tls: bool, waiting: int, counts_the_kernels: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    extra = {"socket": server, "sslcontext": object() if has_tls else None}
    transport: Any = SimpleNamespace(
        get_write_buffer_size=lambda: waiting, get_extra_info=extra.__getitem__
    )
    with client, server:
        server.setblocking(False)
        assert num_unread_bytes(transport) == waiting
        with contextlib.suppress(BlockingIOError):
            while True:
                server.send(bytes(2**16))
        found = num_unread_bytes(transport)
        assert found > waiting if counts_the_kernels else found == waiting
        stalled = StalledWrites()
        stalled.stalled_s(found, 100.0)
        assert stalled.stalled_s(num_unread_bytes(transport), 230.0) == (130.0 if found else 0.0)
    assert num_unread_bytes(transport) == waiting
