"""Bounds of a request's body, checked before it becomes objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from typing import Any

import msgspec

from banaserve.api.bodies.shape import measure, upper_bound
from banaserve.errors import BanaServeError, UserError
from banaserve.names import check_known


class BodyRefusedError(BanaServeError):
    """A body is refused before it is parsed.

    Attributes:
        status: Of the answer.
        cause: In metrics and in the log: one of a few words.
    """

    def __init__(self, status: HTTPStatus, cause: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Counts that a body may have at most.

    Attributes:
        containers: JSON objects and arrays; ``keys``: members of objects, all together.
        values: Of all kinds, token ids too; ``strings``: texts and keys.
        depth: Containers within each other.
        object_bytes: Memory of the parsed objects, estimated; strings' texts not counted.
        fields: Of the body, and of one message.
        messages: Of a chat, or of a batch of chats together.
        items: Objects in ``input``: each that is wrong costs the endpoint hundreds of errors.
        parts: Elements of all arrays in messages, items or tools, such as content parts.
        elements: Of any other array that is not of whole numbers alone.
        prompts: Prompts or inputs of one request.
        sequences: Prompts times ``n`` (or ``best_of``).
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
        """The usual bounds with those of ``pairs`` in their place.

        Raises:
            UserError: There is no such bound, or its value is no number above 0.
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


class Outline(msgspec.Struct, frozen=True):
    """What is read of a body; everything stays as it is written until it has been counted."""

    messages: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    stop: msgspec.Raw = _NOTHING
    stop_sequences: msgspec.Raw = _NOTHING
    stop_token_ids: msgspec.Raw = _NOTHING
    bad_words: msgspec.Raw = _NOTHING
    n: msgspec.Raw = _NOTHING
    best_of: msgspec.Raw = _NOTHING
    logprobs: msgspec.Raw = _NOTHING
    top_logprobs: msgspec.Raw = _NOTHING
    prompt_logprobs: msgspec.Raw = _NOTHING
    logit_bias: msgspec.Raw = _NOTHING
    structured_outputs: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    sampling_params: msgspec.Raw = _NOTHING


_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_dict = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_outline = msgspec.json.Decoder(Outline).decode
_text = msgspec.json.Decoder(str).decode
_MAX_NUMBER_BYTES, _BEYOND = 4096, 2**31
_COUNTED = ("messages", "input", "tools", "stop", "stop_sequences", "stop_token_ids", "bad_words")
"""Arrays with bounds of their own."""
_GRAMMARS = ("structured_outputs", "response_format", "text")


def read_outline(body: bytes, bounds: RequestBounds) -> Outline | None:
    """Returns what is read of ``body`` after it has been found within ``bounds``.

    None where it is no JSON object, which the endpoint answers to.

    Raises:
        BodyRefusedError: It is beyond them, or no JSON.
    """
    _check_shape(body, bounds)
    try:
        if not body.lstrip(b" \t\r\n").startswith(b"{"):
            msgspec.json.decode(body, type=msgspec.Raw)
            return None
        outline = _outline(body)
        _check_arrays(_dict(body), bounds)
        _check_outline(outline, bounds)
        if _kind(outline.sampling_params) == "{":
            nested = bytes(outline.sampling_params)
            _check_arrays(_dict(nested), bounds)
            _check_outline(_outline(nested), bounds)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise no_json(error) from None
    return outline


_VALUE_S, _PART_S, _MESSAGE_S = 65e-9, 63e-6, 39e-6
"""What vLLM's validation takes for a token id, a content part and a message."""


def validation_s(outline: Outline, num_values: int) -> float:
    """About how long vLLM's validation of a body within its bounds holds the event loop up.

    Args:
        num_values: That the body has in all, where it is long; else 0.
    """
    messages = _elements(outline.messages)
    if messages and _kind(messages[0]) == "[":
        messages = [one for chat in messages for one in _elements(chat)]
    items = [*messages, *(one for one in _elements(outline.input) if _kind(one) == "{")]
    lists = [one for item in items for one in _dict(item).values() if _kind(one) == "["]
    num_parts = sum(map(_count, lists))
    return _VALUE_S * num_values + _PART_S * num_parts + _MESSAGE_S * len(items)


def no_json(error: Exception) -> BodyRefusedError:
    """Returns the refusal of a body that a parser has raised ``error`` for."""
    words = " ".join(str(error).split())[:200] or type(error).__name__
    return BodyRefusedError(HTTPStatus.BAD_REQUEST, "json", f"the body is no JSON: {words}")


def _check_shape(body: bytes, bounds: RequestBounds) -> None:
    """Look closely only at bodies that may be beyond a bound."""
    shape = upper_bound(body)
    limits = ("containers", "keys", "values", "strings", "depth", "object_bytes")
    if all(getattr(shape, name) <= getattr(bounds, name) for name in limits):
        return
    shape = measure(body)
    for name in limits:
        _limit(name, getattr(shape, name), getattr(bounds, name))


def _check_arrays(members: dict[str, msgspec.Raw], bounds: RequestBounds) -> None:
    """An endpoint lists an error for each element that is no whole number where it wants one."""
    _limit("fields", len(members), bounds.fields)
    for name, raw in members.items():
        if _kind(raw) == "[" and name not in _COUNTED:
            rows = _elements(raw)
            _limit("elements", len(rows), bounds.elements, name[:32])
            for row in rows:
                _limit("elements", len(_elements(row)), bounds.elements, name[:32])


def _check_outline(outline: Outline, bounds: RequestBounds) -> None:
    _check_messages(outline.messages, bounds)
    inputs = _check_inputs(outline.input, bounds)
    prompts = len(_elements(outline.prompt))
    _limit("prompts", max(prompts, inputs), bounds.prompts)
    _limit("tools", _count(outline.tools), bounds.tools)
    _check_objects("tools", _elements(outline.tools), bounds)
    for name in ("stop", "stop_sequences", "stop_token_ids", "bad_words"):
        _limit("stops", _count(getattr(outline, name)), bounds.stops, name)
    _limit("logit_bias", _count(outline.logit_bias), bounds.logit_bias)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        _limit("logprobs", _number(getattr(outline, name)), bounds.logprobs, name)
    sequences = max(_number(outline.n), _number(outline.best_of), 1)
    _limit("n", sequences, bounds.n)
    _limit("sequences", sequences * max(1, prompts), bounds.sequences)
    for name in _GRAMMARS:
        raw = getattr(outline, name)
        num_bytes = len(memoryview(raw)) if _kind(raw) == "{" else 0
        _limit("grammar_bytes", num_bytes, bounds.grammar_bytes, name)


def _check_messages(raw: msgspec.Raw, bounds: RequestBounds) -> None:
    messages = _elements(raw)
    _limit("messages", max(len(messages), _count(raw)), bounds.messages)
    if messages and all(_kind(one) == "[" for one in messages):  # a batch of chats
        messages = [one for chat in messages for one in _elements(chat)]
        _limit("messages", len(messages), bounds.messages)
    _check_objects("messages", messages, bounds)


def _check_inputs(raw: msgspec.Raw, bounds: RequestBounds) -> int:
    """Returns how many inputs there are; items of a conversation count as messages."""
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
        if _kind(item) != "{":
            raise BodyRefusedError(
                HTTPStatus.BAD_REQUEST, "messages", f"{name}: each has to be a JSON object"
            )
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
    """``[``, ``{``, ``"``, ``0`` for a number or a word; empty for nothing or null."""
    first = chr(view[0]) if (view := memoryview(raw)) else ""
    if first in ("", "n"):
        return ""
    return first if first in '[{"' else "0"


def _elements(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Elements of an array that holds more than whole numbers; none of anything else."""
    return _list(raw) if _kind(raw) == "[" and not _is_numbers(raw) else []


def _is_numbers(raw: msgspec.Raw) -> bool:
    """Whether an array holds whole numbers alone: a prompt's token ids may be a million."""
    return not bytes(raw)[1:-1].translate(None, b"0123456789, \t\r\n")


def _count(raw: msgspec.Raw) -> int:
    """Elements of an array or members of an object; 0 of anything else."""
    kind = _kind(raw)
    if kind == "[":
        return bytes(raw).count(b",") + 1 if _is_numbers(raw) else len(_list(raw))
    return len(_dict(raw)) if kind == "{" else 0


def _number(raw: msgspec.Raw) -> int:
    """A number as pydantic would read it, from a string too; 0 for anything else.

    Beyond every bound where it is written longer than any number needs.
    """
    kind = _kind(raw)
    if kind not in ("0", '"'):
        return 0
    if len(memoryview(raw)) > _MAX_NUMBER_BYTES:
        return _BEYOND
    # Spaces, zeros and escapes may stand before what counts.
    text = (_text(raw) if kind == '"' else bytes(raw).decode("ascii", "replace")).strip()
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return _BEYOND if text[:1].isdigit() or text.startswith("inf") else 0
