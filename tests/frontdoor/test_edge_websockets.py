"""Realtime sessions of the front door: keys, places, time, silence and bytes."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from banaserve.frontdoor.edge.websockets import SessionLimits
from edge_server import Rig, on_uvloop, patient, refused, serving
from waiting import DEADLINE_S, until

BEARER = {"Authorization": "Bearer good"}


def opened(rig: Rig, headers: dict[str, str] = BEARER) -> connect:
    url = "ws://{}:{}/v1/realtime".format(*rig.address)
    return connect(url, additional_headers=headers, open_timeout=DEADLINE_S, compression=None)


async def echoed(session: ClientConnection, text: str) -> bool:
    await session.send(text)
    return await asyncio.wait_for(session.recv(), DEADLINE_S) == text


async def closed_with(session: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as ended:
        await asyncio.wait_for(session.recv(), DEADLINE_S)
    assert ended.value.rcvd is not None
    return ended.value.rcvd.code, ended.value.rcvd.reason


async def status_of(opening: connect) -> int:
    with pytest.raises(InvalidStatus) as refusal:
        await opening
    return refusal.value.response.status_code


@on_uvloop
async def test_a_session_needs_a_key_and_keeps_its_connection() -> None:
    async with serving(patient(max_connections=6, max_per_address=6)) as rig:
        assert await status_of(opened(rig, {})) == 401
        async with opened(rig) as session:
            assert await echoed(session, "a")
            await rig.silent(20)
            assert await echoed(session, "b")
            assert len(rig.edge.table) <= 6
        await until(lambda: all(not hasattr(one, "queue") for one in rig.edge.table))


@on_uvloop
async def test_a_session_takes_the_place_of_a_request() -> None:
    async with serving(max_requests=2) as rig:
        async with opened(rig) as session, opened(rig):
            assert await echoed(session, "a")
            assert await status_of(opened(rig)) == 429
            assert (await rig.ask())[0] == 429
        await until(lambda: len(rig.edge.table) == 1)
        assert (await rig.ask())[0] == 200


@pytest.mark.parametrize(
    ("limits", "cause", "ended"),
    [
        (SessionLimits(session_s=0.2), "session_time", (1013, "the session has had all its time")),
        (SessionLimits(silent_s=0.2), "session_silent", (1008, "the session was silent")),
    ],
)
@on_uvloop
async def test_a_session_ends_in_time(
    limits: SessionLimits, cause: str, ended: tuple[int, str]
) -> None:
    before = refused(cause)
    async with serving(sessions=limits) as rig, opened(rig) as session:
        assert await closed_with(session) == ended
        assert refused(cause) == before + 1


@on_uvloop
async def test_a_session_that_speaks_is_not_silent() -> None:
    async with serving(sessions=SessionLimits(silent_s=20.0)) as rig, opened(rig) as session:
        for number in range(5):
            assert await echoed(session, str(number))


@on_uvloop
async def test_a_session_has_its_bytes() -> None:
    async with serving(sessions=SessionLimits(max_bytes=100)) as rig, opened(rig) as session:
        assert await echoed(session, "a" * 60)
        await session.send("a" * 60)
        assert await closed_with(session) == (1009, "the session has sent too many bytes")


@on_uvloop
async def test_a_session_whose_client_reads_nothing_is_dropped() -> None:
    before = refused("unread")
    async with serving(patient(unread_s=5.0)) as rig, opened(rig) as session:
        assert await echoed(session, "a")
        session.transport.pause_reading()
        pumping = asyncio.create_task(_pump(session))
        seconds = 0.0

        def dropped() -> bool:
            nonlocal seconds
            seconds += 1.0
            rig.later(seconds)
            return refused("unread") == before + 1

        await until(dropped)
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        session.transport.abort()


async def _pump(session: ClientConnection) -> None:
    while True:
        await session.send("x" * 200_000)
