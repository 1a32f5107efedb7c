"""Replica that costs next to nothing: ``python -m benchmarks.router.replica --port PORT``.

Answers completions at once, or streams parts at a pace that all its streams share, as an engine's
steps do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

STEP_S = 0.01
NUM_PARTS = 64

_USAGE = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
_WHOLE = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "text": " a b c d", "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
).encode()
_PART = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    }
).encode()
_EVENT = b"data: %b\n\n" % _PART
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"x"}]}'


def _answer(body: bytes) -> bytes:
    return b"%bcontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b" % (
        _HEAD,
        len(body),
        body,
    )


class _Connection(asyncio.Protocol):
    def __init__(self, streams: dict[_Connection, int]) -> None:
        self._streams = streams
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            _, found, rest = head.partition(b"content-length:")
            size = int(rest.split(b"\r\n")[0]) if found else 0
            if len(self._data) < end + 4 + size:
                return
            body = self._data[end + 4 : end + 4 + size]
            self._data = self._data[end + 4 + size :]
            self._serve(head, body)

    def _serve(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /v1/models"):
            self.transport.write(_answer(_MODELS))
        elif head.startswith(b"get"):
            self.transport.write(_answer(b"{}"))
        elif b'"stream":true' in body.replace(b" ", b""):
            kind = b"content-type: text/event-stream; charset=utf-8\r\n"
            self.transport.write(_HEAD + kind + b"transfer-encoding: chunked\r\n\r\n")
            self._streams[self] = NUM_PARTS
        else:
            self.transport.write(_answer(_WHOLE))


async def _serve(port: int) -> None:
    streams: dict[_Connection, int] = {}
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Connection(streams), "127.0.0.1", port)
    while True:
        await asyncio.sleep(STEP_S)
        for connection, left in list(streams.items()):
            connection.transport.write(_CHUNK if left else _LAST)
            if left:
                streams[connection] = left - 1
            else:
                del streams[connection]


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[2])))
