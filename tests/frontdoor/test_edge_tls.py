"""TLS of the front door: its suites, handshakes that do not end, certificates that change."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from connection_invariants import check_connections

pytest.importorskip("vllm")

from certificates import serial_of, write_certificate
from edge_server import HEAD, KEY, Caller, Rig, on_uvloop, patient, refused, serving
from waiting import DEADLINE_S, until


def files(folder: Path, serial: int = 1) -> dict[str, Any]:
    certificate, key = write_certificate(folder, serial)
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def client_context(folder: Path, **attributes: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    for name, value in attributes.items():
        setattr(context, name, value)
    return context


async def shaken(rig: Rig, context: ssl.SSLContext) -> Caller:
    """A connection behind its handshake."""
    opening = asyncio.open_connection(*rig.address, ssl=context)
    return Caller(*await asyncio.wait_for(opening, DEADLINE_S))


async def ask(caller: Caller) -> tuple[int, bytes]:
    await caller.send(f"{HEAD}{KEY}Content-Length: 2\r\n\r\n{{}}")
    return await caller.answer()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@on_uvloop
async def test_suites_are_modern(version: ssl.TLSVersion, tmp_path: Path) -> None:
    async with serving(**files(tmp_path)) as rig:
        context = client_context(tmp_path, minimum_version=version, maximum_version=version)
        caller = await shaken(rig, context)
        name, spoken, bits = caller.writer.get_extra_info("cipher")
        assert spoken == version.name.replace("_", ".")
        assert any(word in name for word in ("GCM", "CHACHA20"))
        assert bits >= 128
        assert await ask(caller) == (200, b"{}")


@pytest.mark.parametrize("suites", ["ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES256-SHA384"])
@on_uvloop
async def test_block_chaining_is_not_offered(suites: str, tmp_path: Path) -> None:
    async with serving(**files(tmp_path)) as rig:
        context = client_context(tmp_path, maximum_version=ssl.TLSVersion.TLSv1_2)
        context.set_ciphers(suites)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shaken(rig, context)


@on_uvloop
async def test_suites_that_are_given_hold(tmp_path: Path) -> None:
    chosen = "ECDHE-ECDSA-AES256-GCM-SHA384"
    given = {**files(tmp_path), "ssl_ciphers": chosen}
    async with serving(**given) as rig:
        context = client_context(tmp_path, maximum_version=ssl.TLSVersion.TLSv1_2)
        caller = await shaken(rig, context)
        assert caller.writer.get_extra_info("cipher")[0] == chosen


@on_uvloop
async def test_handshakes_that_do_not_end_keep_nobody_out(tmp_path: Path) -> None:
    before = refused("connections")
    async with serving(patient(max_connections=8, max_per_address=8), **files(tmp_path)) as rig:
        known = await shaken(rig, client_context(tmp_path))
        assert await ask(known) == (200, b"{}")
        await rig.silent(30)
        await until(lambda: refused("connections") >= before + 23)
        assert len(rig.edge.table) <= 8
        assert await ask(known) == (200, b"{}")
        assert await ask(await shaken(rig, client_context(tmp_path))) == (200, b"{}")
        check_connections(rig.edge.table)


@on_uvloop
async def test_a_handshake_has_its_time(tmp_path: Path) -> None:
    before = refused("tls_handshake")
    async with serving(patient(handshake_s=0.1), **files(tmp_path)) as rig:
        silent = await rig.caller()
        assert await silent.is_closed()
        await until(lambda: refused("tls_handshake") == before + 1)
        nonsense = await rig.caller()
        await nonsense.send("GET / HTTP/1.1\r\n\r\n")
        await until(lambda: refused("tls_handshake") == before + 2)
        await until(lambda: len(rig.edge.table) == 0)


@on_uvloop
async def test_changed_certificates_are_read_again(tmp_path: Path) -> None:
    async with serving(**files(tmp_path)) as rig:

        async def serial() -> int:
            caller = await shaken(rig, client_context(tmp_path, check_hostname=False))
            assert await ask(caller) == (200, b"{}")
            found = serial_of(caller.writer.get_extra_info("ssl_object").getpeercert(True))
            caller.hang_up()
            return found

        kept = await shaken(rig, client_context(tmp_path))
        assert await ask(kept) == (200, b"{}")
        assert await serial() == 1
        tls_of_door = rig.door._server._tls
        assert tls_of_door is not None
        before = tls_of_door.context
        write_certificate(tmp_path, serial=2)
        await until(lambda: tls_of_door.context is not before)
        assert await serial() == 2
        assert await ask(kept) == (200, b"{}")


@on_uvloop
async def test_a_client_that_never_reads_is_dropped(tmp_path: Path) -> None:
    before = refused("unread")
    async with serving(**files(tmp_path)) as rig:
        caller = await shaken(rig, client_context(tmp_path))
        caller.writer.transport.pause_reading()
        await caller.send("GET /metrics HTTP/1.1\r\nHost: d\r\n\r\n")
        seconds = 0.0

        def is_dropped() -> bool:
            nonlocal seconds
            seconds += rig.limits.unread_s / 3
            rig.later(seconds)
            return refused("unread") == before + 1

        await until(is_dropped)
        await until(lambda: len(rig.edge.table) == 0)
        caller.hang_up()
