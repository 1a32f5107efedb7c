"""Request as a policy sees it, read from path and body without changing a byte of them."""

from __future__ import annotations

import contextlib
import re

import msgspec
from msgspec import structs

from banaserve.base.text.json_text import as_utf8
from banaserve.base.types import RequestId
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.policies.interface import FleetView, Request

BYTES_A_TOKEN = 4
"""Approximate bytes per token of English text; only ratios between requests matter to routing."""

MAX_NAME_CHARS = 256
"""Maximum length of a model or user name, in characters: names are kept, compared and logged."""

MAX_OUTPUT_TOKENS = 10**7
"""Cap on the output tokens of a request: clients may ask for any number, which policies add up."""

MAX_CONVERTED_BYTES = 2**20
"""Maximum size of a body to convert to UTF-8: a longer conversion would block everything else."""

_FORM_MODEL = re.compile(rb'; *name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]+)\r\n')
_FORM_BYTES = 16 * 1024
"""Number of bytes at each end of a form in which its model is looked for; a file may be between."""

_NOTHING = msgspec.Raw(b"")
_TRUE = msgspec.Raw(b"true")
_RESPONSES = (b"/v1/responses", b"/v1/responses/render")
_STORED = re.compile(rb"/v1/responses/([^/]{1,256})(?:/cancel)?/?")


_Number = int | float | str | bool | None
"""A number in any form that vLLM accepts, such as ``16.0``."""


class _Body(msgspec.Struct):
    """The parts of an OpenAI request that routing reads; a part of another type fails to decode."""

    model: str | None = None
    user: str | None = None
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    max_tokens: _Number = None
    max_completion_tokens: _Number = None
    stream: msgspec.Raw = _NOTHING


class _Continuation(msgspec.Struct):
    """The part of a request to ``/v1/responses`` that names the response it continues."""

    previous_response_id: str = ""


_decode = msgspec.json.Decoder(_Body).decode
_decode_continuation = msgspec.json.Decoder(_Continuation).decode


def blind_request(request_id: RequestId, message: ClientRequest, now_s: float) -> Request:
    """Return the request as shown to a policy that reads no prompt: its length is estimated."""
    return Request(request_id, max(1, message.size // BYTES_A_TOKEN), arrived_s=now_s)


def read_request(
    request_id: RequestId,
    message: ClientRequest,
    now_s: float,
    allowed_regions: frozenset[str] | None,
    was_forwarded: bool,
) -> Request:
    """Return ``message`` as routing sees it.

    A body that is not a JSON object of the known form is no error here: the replica refuses such a
    body with its own message.
    """
    data = _data(message)
    try:
        body = _decode(data) if data else _NO_BODY
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = _Body(model=_form_model(data)) if data.startswith(b"--") else _NO_BODY
    prompt = bytes(body.messages or body.prompt or body.input)
    max_tokens = body.max_completion_tokens or body.max_tokens
    return Request(
        request_id,
        max(1, len(prompt) // BYTES_A_TOKEN),
        prompt,
        0 if isinstance(max_tokens, str) else int(min(max(0, max_tokens or 0), MAX_OUTPUT_TOKENS)),
        message.session or (body.user or "")[:MAX_NAME_CHARS],
        (body.model or "")[:MAX_NAME_CHARS],
        allowed_regions,
        was_forwarded,
        now_s,
        is_streamed=body.stream == _TRUE,
    )


_NO_BODY = _Body()


def _form_model(data: bytes) -> str | None:
    """Return the model that a form names, such as one with speech to transcribe."""
    found = _FORM_MODEL.search(data[:_FORM_BYTES] + data[-_FORM_BYTES:])
    return found[1].decode("utf-8", "replace") if found else None


def stored_response(message: ClientRequest) -> str:
    """Return the id of the stored response that ``message`` needs; empty if it needs none.

    Of all state that a client of vLLM may leave at a server, only stored responses are in the
    memory of a single replica.
    """
    if (named := _STORED.fullmatch(message.path)) and message.path not in _RESPONSES:
        return named[1].decode("utf-8", "replace")
    if message.path.rstrip(b"/") in _RESPONSES:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _decode_continuation(_data(message)).previous_response_id[:MAX_NAME_CHARS]
    return ""


def _data(message: ClientRequest) -> bytes:
    """Return the body in UTF-8; a long body in another encoding stays as it is, and is not read."""
    body = message.body[0] if len(message.body) == 1 else b"".join(message.body)
    return as_utf8(body) if len(body) <= MAX_CONVERTED_BYTES else body


def without_tried(view: FleetView, tried: set[str]) -> FleetView:
    """Return ``view`` without the targets in ``tried``."""
    left = [one for one in view.replicas if one.id not in tried]
    peers = [one for one in view.peers if one.id not in tried]
    return structs.replace(view, replicas=left, peers=peers, by_id={one.id: one for one in left})
