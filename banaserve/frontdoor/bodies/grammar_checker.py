"""Check of grammars before an engine gets them, in a helper process that they may crash."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from http import HTTPStatus

import msgspec

from banaserve.engine.compat.front.server import is_beyond_xgrammar
from banaserve.frontdoor.bodies.bounds import BodyRefusedError, Outline, member
from banaserve.frontdoor.bodies.grammar_process import (
    STARTED,
    Compiled,
    GrammarLimits,
    GrammarSpec,
    Kind,
    Order,
)

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
        order = msgspec.msgpack.encode(Order(spec, self._limits, _skips_xgrammar(spec)))
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
        return await _exchange(control, order)

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
        await _exchange(control, vocabulary.encode())

    def close(self) -> None:
        """End the helper process; a later check starts another."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._control = self._process = None


async def _exchange(control: socket.socket, sent: bytes) -> bytes:
    """Return everything that is answered to ``sent``, on a pair of sockets of its own."""
    loop, parts = asyncio.get_running_loop(), []
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            socket.send_fds(control, [b"+"], [theirs.fileno()])
        await loop.sock_sendall(ours, sent)
        ours.shutdown(socket.SHUT_WR)
        while part := await loop.sock_recv(ours, 2**16):
            parts.append(part)
    return b"".join(parts)


def _skips_xgrammar(spec: GrammarSpec) -> bool:
    if spec.kind != "json":
        return False
    try:
        return is_beyond_xgrammar(json.loads(spec.text))
    except Exception:  # vLLM's walk through a malformed schema may raise anything
        return False


_NOTHING, _NULL = msgspec.Raw(), msgspec.Raw(b"null")


class _Structured(msgspec.Struct):
    json: msgspec.Raw = _NOTHING
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class _Schema(msgspec.Struct):
    schema: msgspec.Raw = _NOTHING


class _Format(msgspec.Struct):
    type: str = ""
    json_schema: msgspec.Raw = _NULL
    schema: msgspec.Raw = _NOTHING


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Sampling(msgspec.Struct):
    structured_outputs: _Structured | None = None


class _Function(msgspec.Struct):
    parameters: msgspec.Raw = _NOTHING


class _Tool(msgspec.Struct):
    function: _Function | None = None
    parameters: msgspec.Raw = _NOTHING
    input_schema: msgspec.Raw = _NOTHING


def grammars_of(outline: Outline) -> list[GrammarSpec]:
    """Return every grammar of a request once; those of wrong types are left to vLLM's answer."""
    found: dict[GrammarSpec, None] = {}
    for raw, read in _READERS:
        text = bytes(member(outline, raw))
        if text not in (b"", b"null"):
            with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
                found.update(dict.fromkeys(read(text)))
    return list(found)


def _of_structured(given: _Structured | None) -> list[GrammarSpec]:
    if given is None:
        return []
    found = _schema(given.json)
    if given.choice is not None:
        found.append(GrammarSpec("choice", msgspec.json.encode(given.choice).decode()))
    for kind in _TEXTS:
        if (text := getattr(given, kind)) is not None:
            found.append(GrammarSpec(kind, text))
    return found


def _schema(raw: msgspec.Raw) -> list[GrammarSpec]:
    """Return a schema, given as an object or as its text; none for ``true`` and the like."""
    schema = bytes(raw)
    if schema.startswith(b'"'):
        return [GrammarSpec("json", _string(schema))]
    return [GrammarSpec("json", schema.decode())] if schema.startswith(b"{") else []


def _response_format(text: bytes) -> list[GrammarSpec]:
    given = _format(text)
    if given.type == "structural_tag":
        return [GrammarSpec("structural_tag", text.decode())]
    if given.type == "json_object":  # of Cohere's API, where no object holds the schema
        return _schema(given.json_schema)
    holder = _holder(given.json_schema)
    return _schema(holder.schema if holder is not None else given.schema)


def _of_text(text: bytes) -> list[GrammarSpec]:
    given = _text(text).format
    return _schema(given.schema) if given is not None else []


def _of_tools(text: bytes) -> list[GrammarSpec]:
    found = []
    for tool in _tools(text):
        function = tool.function.parameters if tool.function is not None else _NOTHING
        for schema in (function, tool.parameters, tool.input_schema):
            found += _schema(schema)
    return found


def _of_sampling(text: bytes) -> list[GrammarSpec]:
    return _of_structured(_sampling(text).structured_outputs)


_TEXTS: tuple[Kind, ...] = ("regex", "grammar", "structural_tag")
_string = msgspec.json.Decoder(str).decode
_structured = msgspec.json.Decoder(_Structured).decode
_format = msgspec.json.Decoder(_Format).decode
_holder = msgspec.json.Decoder(_Schema | None).decode
_text = msgspec.json.Decoder(_Text).decode
_tools = msgspec.json.Decoder(list[_Tool]).decode
_sampling = msgspec.json.Decoder(_Sampling).decode
_READERS: tuple[tuple[str, Callable[[bytes], list[GrammarSpec]]], ...] = (
    ("structured_outputs", lambda text: _of_structured(_structured(text))),
    ("response_format", _response_format),
    ("text", _of_text),
    ("output_config", _of_text),
    ("tools", _of_tools),
    ("sampling_params", _of_sampling),
)
