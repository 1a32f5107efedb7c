"""Decisions in a process of their own: seconds of forecasts must not stop the event loop.

The process reads a situation and writes a decision, each a MessagePack message behind its length.
It has the lowest priority, so that it computes with what serving leaves over, and ends when its
input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import subprocess
import sys
from typing import BinaryIO

import msgspec

from banaserve.elastic.decision import Decision, Situation
from banaserve.elastic.options import ElasticOptions
from banaserve.elastic.policy import decide
from banaserve.errors import NoAnswerError

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20
_ANSWER_S = 120.0
_NICE = 19


class _Ask(msgspec.Struct, array_like=True):
    situation: Situation
    options: ElasticOptions


class DecisionProcess:
    """Runs ``decide`` elsewhere; starts the process at the first question, and again if it died."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def decide(self, situation: Situation, options: ElasticOptions) -> Decision:
        """Returns the decision.

        Raises:
            NoAnswerError: The process has ended, or has not answered in two minutes; the next
                question starts another one.
        """
        async with self._lock:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(_ANSWER_S):
                    body = msgspec.msgpack.encode(_Ask(situation, options))
                    process.stdin.write(_LENGTH.pack(len(body)) + body)
                    await process.stdin.drain()
                    (size,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
                    answer = await process.stdout.readexactly(size)
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as failure:
                await self._end()
                why = str(failure) or type(failure).__name__
                raise NoAnswerError(f"the process that forecasts has not answered: {why}") from None
            except BaseException:
                await self._end()  # its answer would be taken for that of the next question
                raise
            return msgspec.msgpack.decode(answer, type=Decision)

    async def stop(self) -> None:
        """End the process."""
        async with self._lock:
            await self._end()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "banaserve.elastic.process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions from ``asks`` until it closes, be it within one.

    Raises:
        SystemExit: A question is absurdly long.
    """
    while (question := _read(asks)) is not None:
        ask = msgspec.msgpack.decode(question, type=_Ask)
        body = msgspec.msgpack.encode(decide(ask.situation, ask.options))
        answers.write(_LENGTH.pack(len(body)) + body)
        answers.flush()


def _read(asks: BinaryIO) -> bytes | None:
    """The next question; None where ``asks`` closes before its end."""
    head = asks.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > _MAX_BYTES:
        raise SystemExit(f"a question of {size} bytes: {_MAX_BYTES} are the most")
    body = asks.read(size)
    return body if len(body) == size else None


if __name__ == "__main__":
    os.nice(_NICE)
    serve(sys.stdin.buffer, sys.stdout.buffer)
