"""What an engine core says while it starts: the handshake, or the error that ends it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec
import zmq.asyncio

from banaserve.engine.vllm import compat

_ERROR = re.compile(r"\b((?:[\w.]*(?:Error|Exception)): .{1,300})")
_LAST_LINES = 200


async def shake_hands(socket: zmq.asyncio.Socket, addresses: dict[str, str]) -> None:
    """vLLM's start-up handshake: HELLO, our addresses, READY."""
    metadata = compat.EngineHandshakeMetadata(
        addresses=compat.EngineZmqAddresses(
            inputs=[addresses["input"]], outputs=[addresses["output"]]
        ),
        parallel_config={},
    )
    while True:
        identity, body = await socket.recv_multipart()
        status = msgspec.msgpack.decode(body)["status"]
        if status == "HELLO":
            await socket.send_multipart((identity, msgspec.msgpack.encode(metadata)))
        elif status == "READY":
            return


def last_error_in(log: Path) -> str:
    """The last line of a log that tells of an error, and where the log is."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        errors = [m[1] for line in lines if (m := _ERROR.search(line))]
        if errors:
            return f"{errors[-1].strip()} (log: {log})"
    return f"see {log}"
