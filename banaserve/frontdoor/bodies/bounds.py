"""Bounds of a request's body, checked before it becomes objects.

The shape of a long JSON text is read from its bytes, not parsed: numpy scans a MiB at a time and
lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from banaserve.base.errors import BanaServeError, UserError
from banaserve.base.text.json_text import as_strict
from banaserve.base.text.names import check_known


class BodyRefusedError(BanaServeError):
    """Error: a body is refused before it is parsed.

    Attributes:
        status: HTTP status of the answer.
        cause: Cause of the refusal in metrics and in the log: one of a few words.
    """

    def __init__(self, status: HTTPStatus, cause: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Upper bounds of counts in a request's body.

    Attributes:
        containers: JSON objects and arrays; ``keys``: members of all objects together.
        values: Values of all kinds, token ids included; ``strings``: texts and keys.
        depth: Nesting depth of containers.
        object_bytes: Estimated memory of the parsed objects, without the texts of strings.
        fields: Members of the body, and members of each message.
        messages: Messages of a chat, or of all chats of a batch together.
        items: Objects in ``input``: each wrong one costs the endpoint hundreds of errors.
        parts: Elements of all arrays in messages, items or tools, such as content parts.
        elements: Elements of any other array that holds more than whole numbers.
        prompts: Prompts or inputs of one request.
        sequences: Prompts times ``n``.
        stops: Stop strings; also stop token ids and bad words.
        logprobs: ``logprobs``, ``top_logprobs`` and ``prompt_logprobs``.
        logit_bias: Tokens with a bias.
        grammar_bytes: A grammar, regular expression, schema or all choices together.
    """

    containers: int = 16_384
    keys: int = 32_768
    values: int = 2_000_000
    strings: int = 131_072
    depth: int = 64
    object_bytes: int = 128 * 2**20
    fields: int = 128
    messages: int = 1_024
    items: int = 256
    parts: int = 2_048
    elements: int = 4_096
    tools: int = 512
    prompts: int = 2_048
    n: int = 128
    sequences: int = 2_048
    stops: int = 256
    logprobs: int = 1_024
    logit_bias: int = 2_048
    grammar_bytes: int = 256 * 2**10

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, Any]]) -> RequestBounds:
        """Return the default bounds, with those named in ``pairs`` replaced.

        Raises:
            UserError: A name is no bound, or a value is no whole number above 0.
        """
        known = [one.name for one in fields(cls)]
        given: dict[str, int] = {}
        for name, value in pairs:
            check_known("bound of requests", name, known)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"--request-bound {name}={value}: give a number above 0")
            given[name] = value
        return replace(cls(), **given)


_NOTHING = msgspec.Raw()


Outline = dict[str, msgspec.Raw]
"""Members of a body by their names, each kept as raw JSON until it has been counted."""

_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_dict = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_MAX_NUMBER_BYTES, _BEYOND = 4096, 2**31
_COUNTED = ("messages", "input", "tools", "stop", "stop_sequences", "stop_token_ids", "bad_words")
"""Arrays with bounds of their own."""
_GRAMMARS = ("structured_outputs", "response_format", "text", "output_config")
NO_STRICT_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""Errors of msgspec for what is no JSON, or JSON that only Python's reader accepts."""


def read_outline(body: bytes, bounds: RequestBounds) -> Outline | None:
    """Return the outline of ``body`` after checking it against ``bounds``.

    None if the body is no JSON, or no object: the endpoint answers that.

    Raises:
        BodyRefusedError: The body exceeds a bound.
    """
    _check_shape(body, bounds)
    if not body.lstrip(b" \t\r\n").startswith(b"{"):
        return None
    try:
        body.decode()  # strings that stay raw are not looked into
        return _checked_outline(body, bounds)
    except NO_STRICT_JSON:
        pass
    try:
        strict = as_strict(body)
    except (ValueError, RecursionError):
        return None
    return _checked_outline(strict, bounds)


def _checked_outline(body: bytes, bounds: RequestBounds) -> Outline:
    outline = _dict(body)
    _check_outline(outline, bounds)
    if _kind(nested := member(outline, "sampling_params")) == "{":
        _check_outline(_dict(nested), bounds)
    return outline


_VALUE_S, _PART_S, _MESSAGE_S = 65e-9, 63e-6, 39e-6
"""Time of vLLM's validation for a token id, a content part and a message, in seconds."""


def validation_s(outline: Outline, num_values: int) -> float:
    """Estimate the time that vLLM's validation of a body blocks the event loop, in seconds.

    Args:
        num_values: Number of values in a long body; 0 for a short one.
    """
    given = (*_messages(outline), *_elements(member(outline, "input")))
    items = [one for one in given if _kind(one) == "{"]
    lists = [one for item in items for one in _dict(item).values() if _kind(one) == "["]
    num_parts = sum(map(_count, lists))
    return _VALUE_S * num_values + _PART_S * num_parts + _MESSAGE_S * len(items)


def _check_shape(body: bytes, bounds: RequestBounds) -> None:
    """Check the counts of ``body``, measuring them only if a quick estimate exceeds a bound."""
    shape = upper_bound(body)
    limits = ("containers", "keys", "values", "strings", "depth", "object_bytes")
    if all(getattr(shape, name) <= getattr(bounds, name) for name in limits):
        return
    shape = measure(body)
    for name in limits:
        _limit(name, getattr(shape, name), getattr(bounds, name))


def _check_arrays(members: Outline, bounds: RequestBounds) -> None:
    """Bound fields and arrays: an endpoint lists an error for each element of a wrong type."""
    _limit("fields", len(members), bounds.fields)
    for name, raw in members.items():
        if _kind(raw) == "[" and name not in _COUNTED:
            rows = _elements(raw)
            _limit("elements", len(rows), bounds.elements, name[:32])
            for row in rows:
                _limit("elements", len(_elements(row)), bounds.elements, name[:32])


def member(outline: Outline, name: str) -> msgspec.Raw:
    """Return a member of a body; empty if there is none."""
    return outline.get(name, _NOTHING)


def _check_outline(outline: Outline, bounds: RequestBounds) -> None:
    _check_arrays(outline, bounds)
    _check_messages(outline, bounds)
    inputs = _check_inputs(member(outline, "input"), bounds)
    prompts = len(_elements(member(outline, "prompt")))
    _limit("prompts", max(prompts, inputs), bounds.prompts)
    _limit("tools", _count(member(outline, "tools")), bounds.tools)
    _check_objects("tools", _elements(member(outline, "tools")), bounds)
    for name in ("stop", "stop_sequences", "stop_token_ids", "bad_words"):
        _limit("stops", _count(member(outline, name)), bounds.stops, name)
    _limit("logit_bias", _count(member(outline, "logit_bias")), bounds.logit_bias)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        _limit("logprobs", _number(member(outline, name)), bounds.logprobs, name)
    sequences = max(_number(member(outline, "n")), 1)
    _limit("n", sequences, bounds.n)
    _limit("sequences", sequences * max(1, prompts), bounds.sequences)
    for name in _GRAMMARS:
        raw = member(outline, name)
        num_bytes = len(memoryview(raw)) if _kind(raw) == "{" else 0
        _limit("grammar_bytes", num_bytes, bounds.grammar_bytes, name)


def _messages(outline: Outline) -> list[msgspec.Raw]:
    """Return the messages of a chat, or of all chats of a batch."""
    chats = _elements(member(outline, "messages"))
    return [one for chat in chats for one in _elements(chat) or [chat]]


def _check_messages(outline: Outline, bounds: RequestBounds) -> None:
    messages = _messages(outline)
    _limit("messages", max(len(messages), _count(member(outline, "messages"))), bounds.messages)
    _check_objects("messages", messages, bounds)


def _check_inputs(raw: msgspec.Raw, bounds: RequestBounds) -> int:
    """Return the number of inputs, without the items of a conversation, which are objects."""
    items = _elements(raw)
    objects = [one for one in items if _kind(one) == "{"]
    _limit("items", len(objects), bounds.items)
    _check_objects("input", objects, bounds)
    for row in items:
        _limit("elements", len(_elements(row)), bounds.elements, "input")
    return len(items) - len(objects)


def _check_objects(name: str, items: Sequence[msgspec.Raw], bounds: RequestBounds) -> None:
    parts = 0
    for item in items:
        if _kind(item) == "{":
            members = _dict(item)
            _limit("fields", len(members), bounds.fields, f"fields of one of {name}")
            parts += sum(_count(one) for one in members.values() if _kind(one) == "[")
    _limit("parts", parts, bounds.parts)


def _limit(name: str, count: int, most: int, shown: str = "") -> None:
    if count <= most:
        return
    too_large = name in ("containers", "keys", "values", "object_bytes", "grammar_bytes")
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if too_large else HTTPStatus.BAD_REQUEST
    words = shown or name
    if words != name:
        words = f"{words} ({name})"
    raise BodyRefusedError(
        status, name, f"{words}: {count} are more than {most} (--request-bound {name}=N)"
    )


def _kind(raw: msgspec.Raw) -> str:
    """Return ``[``, ``{``, ``"``, or ``0`` for a number or boolean; empty for nothing or null."""
    first = chr(view[0]) if (view := memoryview(raw)) else ""
    if first in ("", "n"):
        return ""
    return first if first in '[{"' else "0"


def _elements(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the elements of an array that holds more than whole numbers; else an empty list."""
    return _list(raw) if _kind(raw) == "[" and not _is_numbers(raw) else []


def _is_numbers(raw: msgspec.Raw) -> bool:
    """Return whether an array holds only whole numbers: a prompt may have a million token ids."""
    return not bytes(raw)[1:-1].translate(None, b"0123456789, \t\r\n")


def _count(raw: msgspec.Raw) -> int:
    """Return the number of elements of an array or members of an object; 0 of anything else."""
    kind = _kind(raw)
    if kind == "[":
        return bytes(raw).count(b",") + 1 if _is_numbers(raw) else len(_list(raw))
    return len(_dict(raw)) if kind == "{" else 0


def _number(raw: msgspec.Raw) -> int:
    """Return a number as pydantic would read it, from a string too; 0 for anything else.

    A text that is longer than any number needs exceeds every bound.
    """
    kind = _kind(raw)
    if kind not in ("0", '"'):
        return 0
    if len(memoryview(raw)) > _MAX_NUMBER_BYTES:
        return _BEYOND
    # Spaces, zeros and escapes may precede the digits that count.
    text = (_text(raw) if kind == '"' else bytes(raw).decode("ascii", "replace")).strip()
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return _BEYOND if text[:1].isdigit() or text.startswith("inf") else 0


_STEP_BYTES = 2**20
_QUOTE, _COMMA, _COLON, _OPENS, _CLOSES = 0x22, 0x2C, 0x3A, 0x7B, 0x7D
_CASE_BIT = 0x20
"""Bit that turns ``[`` and ``]`` into ``{`` and ``}``."""

_CONTAINER_BYTES, _STRING_BYTES, _NUMBER_BYTES = 240, 80, 40
"""Memory that Python needs for an empty object or array, a short string or key, and a number, each
with the reference to it."""


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Counts of a JSON text's objects.

    Attributes:
        containers: Number of objects and arrays.
        keys: Number of members of objects.
        values: Number of members of objects and elements of arrays; 1 for an empty container.
        strings: Number of strings, keys included.
        depth: Nesting depth of containers.
    """

    containers: int = 0
    keys: int = 0
    values: int = 0
    strings: int = 0
    depth: int = 0

    @property
    def object_bytes(self) -> int:
        """Return the estimated memory of the parsed objects, without the text of the strings."""
        numbers = max(0, self.values - self.strings + self.keys)
        return (
            self.containers * _CONTAINER_BYTES
            + self.strings * _STRING_BYTES
            + numbers * _NUMBER_BYTES
        )


def upper_bound(body: bytes) -> JsonShape:
    """Return counts that no JSON text of these bytes exceeds; quick, does not skip strings.

    The commas of prose in strings count as well, so the bound of such a text is high.
    """
    containers = body.count(b"{") + body.count(b"[")
    return JsonShape(
        containers=containers,
        keys=body.count(b":"),
        values=body.count(b",") + containers,
        strings=body.count(b'"') // 2,
        depth=containers,
    )


def measure(body: bytes) -> JsonShape:
    """Return the counts of ``body``; a text that is no JSON yields some counts too."""
    containers = keys = commas = quotes = depth = deepest = 0
    for part in _parts(body):
        is_quote = part == _QUOTE
        # uint8 wraps around, which keeps the parity.
        is_outside = (np.cumsum(is_quote, dtype=np.uint8) + (quotes & 1)) & 1 == 0
        quotes += int(np.count_nonzero(is_quote))
        outside = part[is_outside]
        commas += int(np.count_nonzero(outside == _COMMA))
        keys += int(np.count_nonzero(outside == _COLON))
        outside = outside | _CASE_BIT
        brackets = outside[(outside == _OPENS) | (outside == _CLOSES)]
        if brackets.size:
            steps = np.where(brackets == _OPENS, 1, -1).cumsum(dtype=np.int64)
            containers += int(np.count_nonzero(brackets == _OPENS))
            deepest = max(deepest, depth + int(steps.max()))
            depth += int(steps[-1])
    return JsonShape(containers, keys, commas + containers, quotes // 2, deepest)


def _parts(body: bytes) -> Iterator[np.ndarray]:
    """Yield ``body`` in parts, with escapes masked: an escaped quote does not end a string."""
    start = 0
    while start < len(body):
        part = body[start : start + _STEP_BYTES]
        num_slashes = len(part) - len(part.rstrip(b"\\"))
        if num_slashes % 2:
            part = body[start : start + len(part) + 1]
        start += len(part)
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        yield np.frombuffer(part, np.uint8)
