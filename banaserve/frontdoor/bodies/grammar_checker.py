"""Check of grammars before an engine gets them, in a helper process that they may crash."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from http import HTTPStatus

import msgspec

from banaserve.frontdoor.bodies.bounds import BodyRefusedError
from banaserve.frontdoor.bodies.grammar_process import STARTED, Compiled, GrammarLimits, Order
from banaserve.frontdoor.bodies.grammars import GrammarSpec

_AT_ONCE = 2
_MAX_WAITING = 64
_REMEMBERED = 4096
_PATIENCE_S = 180.0
"""Timeout of a check, in seconds: longer than a fork of the helper may live."""


class _Verdict(Enum):
    COMPILES = "compiles"
    EXPLODES = "explodes"
    UNKNOWN = "unknown"


class GrammarChecker:
    """Checker that compiles each grammar once, in a process with bounded time and memory.

    Verdicts are remembered. The helper process starts with the first grammar.

    Args:
        vocabulary: Returns xgrammar's vocabulary of the model as JSON, empty for none: then only
            the grammar itself is compiled, without masks of tokens. Blocking.
    """

    def __init__(self, vocabulary: Callable[[], str], limits: GrammarLimits | None = None) -> None:
        self._vocabulary, self._limits = vocabulary, limits or GrammarLimits()
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._starting = asyncio.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, specs: Sequence[GrammarSpec]) -> None:
        """Return if each grammar compiles, or is wrong in a way that vLLM itself reports.

        Raises:
            BodyRefusedError: 400 if a grammar takes too long or too much memory; 503 if too many
                wait or the helper fails.
        """
        for spec in specs:
            verdict = await self._verdict(spec)
            if verdict is _Verdict.EXPLODES:
                raise BodyRefusedError(
                    HTTPStatus.BAD_REQUEST,
                    "grammar",
                    f"the {spec.kind} grammar takes more than {self._limits.cpu_s} s or "
                    f"{self._limits.memory_bytes >> 20} MiB to compile: make it simpler",
                )
            if verdict is _Verdict.UNKNOWN:
                raise BodyRefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "grammar_check",
                    "grammars cannot be checked at the moment; try again shortly",
                )

    async def _verdict(self, spec: GrammarSpec) -> _Verdict:
        digest = spec.digest
        if (known := self._verdicts.get(digest)) is not None:
            self._verdicts.move_to_end(digest)
            return known
        if (task := self._under_way.get(digest)) is None:
            if len(self._under_way) >= _MAX_WAITING:
                return _Verdict.UNKNOWN
            task = asyncio.create_task(self._find(spec))
            self._under_way[digest] = task
            task.add_done_callback(lambda _: self._under_way.pop(digest, None))
        # Shielded: others may wait for the task, and its verdict is of use without this client.
        return await asyncio.shield(task)

    async def _find(self, spec: GrammarSpec) -> _Verdict:
        async with self._places:
            verdict = await self._try(spec)
            if verdict is _Verdict.UNKNOWN:  # the helper may have died
                self.close()
                verdict = await self._try(spec)
        if verdict is not _Verdict.UNKNOWN:
            self._verdicts[spec.digest] = verdict
            while len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
        return verdict

    async def _try(self, spec: GrammarSpec) -> _Verdict:
        order = msgspec.msgpack.encode(Order(spec, self._limits))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await self._ask(order)
        except OSError:
            return _Verdict.UNKNOWN
        if not answer.startswith(STARTED):
            return _Verdict.UNKNOWN
        try:
            msgspec.msgpack.decode(answer[len(STARTED) :], type=Compiled)
        except msgspec.DecodeError:
            return _Verdict.EXPLODES
        # A wrong grammar counts as compiled: vLLM refuses it with its own message.
        return _Verdict.COMPILES

    async def _ask(self, order: bytes) -> bytes:
        async with self._starting:
            if self._control is None:
                await self._start()
            control = self._control
        assert control is not None
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(control, [b"g"], [theirs.fileno()])
            return await _exchange(ours, order)

    async def _start(self) -> None:
        vocabulary = await asyncio.to_thread(self._vocabulary)
        control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "banaserve.frontdoor.bodies.grammar_process"]
            self._process = await asyncio.to_thread(
                subprocess.Popen,
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._control = control
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(control, [b"v"], [theirs.fileno()])
            await _exchange(ours, vocabulary.encode())

    def close(self) -> None:
        """End the helper process; a later check starts another."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._control = self._process = None


async def _exchange(pair: socket.socket, sent: bytes) -> bytes:
    """Return everything that is answered to ``sent``."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(pair, sent)
    pair.shutdown(socket.SHUT_WR)
    parts = []
    while part := await loop.sock_recv(pair, 2**16):
        parts.append(part)
    return b"".join(parts)
