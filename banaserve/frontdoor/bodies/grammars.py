"""Grammars of a request: JSON schemas, regular expressions, choices, grammars, structural tags."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec

from banaserve.frontdoor.bodies.bounds import Outline

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


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


_NOTHING = msgspec.Raw()


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
    json_schema: _Schema | None = None
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
        text = bytes(getattr(outline, raw))
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
    return _schema(given.json_schema.schema if given.json_schema is not None else given.schema)


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
_text = msgspec.json.Decoder(_Text).decode
_tools = msgspec.json.Decoder(list[_Tool]).decode
_sampling = msgspec.json.Decoder(_Sampling).decode
_READERS: tuple[tuple[str, Callable[[bytes], list[GrammarSpec]]], ...] = (
    ("structured_outputs", lambda text: _of_structured(_structured(text))),
    ("response_format", _response_format),
    ("text", _of_text),
    ("tools", _of_tools),
    ("sampling_params", _of_sampling),
)
