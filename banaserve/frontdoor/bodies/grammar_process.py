"""Helper process that compiles grammars, each in its own fork with bounded time and memory.

``python -m banaserve.frontdoor.bodies.grammar_process FD`` takes orders from the socket FD: a byte
with one end of a fresh socket pair. The first pair carries the vocabulary, each later pair a
grammar. The process ends when FD closes.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
STARTED = b"+"
"""First byte of an answer: the fork has succeeded."""
_NICE = 5
_WALL_S = 120
_PROBE_VOCABULARY = ("a", "b", "<end>")


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar as the request contains it.

    Attributes:
        text: JSON of a schema, of choices or of a structural tag; else the grammar's own text.
    """

    kind: Kind
    text: str

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode()).digest()


class GrammarLimits(msgspec.Struct, frozen=True):
    """Limits of compiling one grammar.

    Attributes:
        cpu_s: Processor time in whole seconds; unlike wall time it does not depend on the load.
        memory_bytes: Memory beyond the process's size at its start.
    """

    cpu_s: int = 10
    memory_bytes: int = 2**30


class Order(msgspec.Struct, frozen=True):
    """A grammar to compile.

    Attributes:
        skips_xgrammar: True if vLLM gives the grammar to guidance without trying xgrammar.
    """

    spec: GrammarSpec
    limits: GrammarLimits
    skips_xgrammar: bool = False


class Compiled(msgspec.Struct, frozen=True):
    """Answer: the grammar is compiled, or ``error`` is the library's message on it."""

    error: str = ""


def main() -> None:
    """Take orders until the other end closes the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(_NICE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks leave nothing behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    grammar_library = importlib.import_module("xgrammar")
    importlib.import_module("llguidance")
    vocabulary: Any = None
    while (pair := _next(control)) is not None:
        if vocabulary is None:
            vocabulary = _read_vocabulary(grammar_library, pair)
            continue
        try:
            is_child = os.fork() == 0
        except OSError:
            is_child = False  # the closed pair reports the failure
        if is_child:
            control.close()
            _compile_and_exit(grammar_library, vocabulary, pair)
        pair.close()
    os._exit(0)


def _next(control: socket.socket) -> socket.socket | None:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if message and descriptors else None


def _read_vocabulary(library: Any, pair: socket.socket) -> Any:
    with pair:
        text = pair.makefile("rb").read().decode()
        if text:
            return library.TokenizerInfo.deserialize_json(text)
        return library.TokenizerInfo(list(_PROBE_VOCABULARY))


def _compile_and_exit(library: Any, vocabulary: Any, pair: socket.socket) -> None:
    """Compile in this process, then exit; if a limit kills the process, no answer is sent."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_WALL_S)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        pair.sendall(STARTED)
        order = msgspec.msgpack.decode(pair.makefile("rb").read(), type=Order)
        _limit(order.limits)
        compiler = library.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        error = "skipped"
        if not order.skips_xgrammar:
            error = _error_of(_compile, compiler, order.spec)
        if error:  # vLLM tries guidance next
            error = _error_of(_validate, importlib.import_module("llguidance"), order.spec)
        answer = Compiled(error)
        pair.sendall(msgspec.msgpack.encode(answer))
        status = 0
    finally:
        os._exit(status)


def _limit(limits: GrammarLimits) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory_bytes = pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _error_of(attempt: Callable[[Any, GrammarSpec], None], tool: Any, spec: GrammarSpec) -> str:
    """Return the error in a grammar; empty if there is none.

    Raises:
        MemoryError: Compiling the grammar needs more memory than allowed.
    """
    try:
        attempt(tool, spec)
    except MemoryError:
        raise
    except Exception as error:
        if "bad_alloc" in str(error):
            raise MemoryError from None
        return str(error) or type(error).__name__
    return ""


def _compile(compiler: Any, spec: GrammarSpec) -> None:
    if spec.kind == "json":
        compiler.compile_json_schema(spec.text)
    elif spec.kind == "regex":
        compiler.compile_regex(spec.text)
    elif spec.kind == "choice":
        choices = msgspec.json.decode(spec.text, type=list[str])
        words = (choice.replace("\\", "\\\\").replace('"', '\\"') for choice in choices)
        compiler.compile_grammar("root ::= " + " | ".join(f'"{word}"' for word in words))
    elif spec.kind == "grammar" and "::=" not in spec.text:
        compiler.compile_lark(spec.text)
    elif spec.kind == "grammar":
        compiler.compile_grammar(spec.text)
    else:
        _compile_tag(compiler, spec.text)


def _compile_tag(compiler: Any, text: str) -> None:
    tag = msgspec.json.decode(text)
    if not isinstance(tag, dict) or "structures" not in tag:
        compiler.compile_structural_tag(text)
        return
    for structure in tag["structures"]:
        compiler.compile_json_schema(msgspec.json.encode(structure["schema"]).decode())


def _validate(library: Any, spec: GrammarSpec) -> None:
    """Build a grammar as guidance does; as vLLM, of a structural tag its schemas."""
    texts = [spec.text]
    if spec.kind == "structural_tag":
        structures = msgspec.json.decode(spec.text)["structures"]
        texts = [msgspec.json.encode(one["schema"]).decode() for one in structures]
    matcher = library.LLMatcher
    for text in texts:
        if spec.kind in ("json", "structural_tag"):
            made = matcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True})
        else:
            made = library.grammar_from(spec.kind, text)
        if error := matcher.validate_grammar(made, None):
            raise ValueError(error)


if __name__ == "__main__":
    main()
