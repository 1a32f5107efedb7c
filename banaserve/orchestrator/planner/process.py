"""Decisions in a separate process: forecasts take seconds and must not block the event loop.

The process reads a situation and writes a decision, each a frame of ``base/net/framing.py``.
It runs at the lowest priority, so that it only uses processor time that serving leaves, and ends
when its input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import BinaryIO

import msgspec

from banaserve.base.errors import NoAnswerError, ProtocolError
from banaserve.base.net.framing import Framing, MessageReader, receive, receive_async
from banaserve.orchestrator.planner.decision import Decision, Situation
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.policy import decide

_MAX_BYTES = 64 << 20
_ANSWER_S = 120.0
_NICE = 19


class _Ask(msgspec.Struct, array_like=True):
    situation: Situation
    options: ElasticOptions


_ASKS: Framing[_Ask] = Framing(_Ask, _MAX_BYTES)
_DECISIONS: Framing[Decision] = Framing(Decision, _MAX_BYTES)


class DecisionProcess:
    """Client of a process that runs ``decide``; started at the first call, and again if it died."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def decide(self, situation: Situation, options: ElasticOptions) -> Decision:
        """Return the decision of the process.

        Raises:
            NoAnswerError: The process has ended, or has not answered within two minutes; the next
                call starts another process.
        """
        async with self._lock:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(_ANSWER_S):
                    process.stdin.write(_ASKS.encode(_Ask(situation, options)))
                    await process.stdin.drain()
                    reader = MessageReader(_DECISIONS)
                    answer = await receive_async(process.stdout.read, reader)
                if answer is None:
                    raise EOFError("it has ended")
            except (TimeoutError, OSError, EOFError, ProtocolError) as failure:
                await self._end()
                why = str(failure) or type(failure).__name__
                raise NoAnswerError(f"the process that forecasts has not answered: {why}") from None
            except BaseException:
                await self._end()  # else its answer would be taken for that of the next call
                raise
            return answer

    async def stop(self) -> None:
        """End the process."""
        async with self._lock:
            await self._end()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "banaserve.orchestrator.planner.process"),
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
    """Answer the questions of ``asks`` until it closes, even in the middle of a question.

    Raises:
        ProtocolError: The bytes are not questions.
    """
    reader = MessageReader(_ASKS)
    while (ask := receive(asks.read, reader)) is not None:
        answers.write(_DECISIONS.encode(decide(ask.situation, ask.options)))
        answers.flush()


if __name__ == "__main__":
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the server ends it
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except ProtocolError as error:
        sys.exit(str(error))
