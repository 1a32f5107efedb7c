"""The other process of the transport tests.

``offer`` takes JSON commands, one a line, and answers each with one line; ``echo`` prints its
address and answers every request with itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import msgspec

from banaserve.transport.backends import cuda_ipc
from banaserve.transport.backends.cuda_ipc import CudaIpcTransport
from banaserve.transport.channels.connect import over_tcp, over_unix, tcp_address
from banaserve.transport.errors import PeerGoneError, TransportError
from banaserve.transport.interface import Transport, TransportOptions
from banaserve.transport.registry import create
from banaserve.transport.threaded_server import listen_tcp, listen_unix
from emulated_gpu import EmulatedGpu

NIXL_OF_GPUS = "nixl of GPUs"
# Libraries print to standard output too.
ANSWER = "answer: "


def make(name: str, options: TransportOptions) -> Transport:
    """Return a transport; those of GPU memory have an emulated GPU."""
    if name == cuda_ipc.NAME:
        return CudaIpcTransport(options, EmulatedGpu())
    if name == NIXL_OF_GPUS:
        from banaserve.transport.backends.nixl import NixlTransport

        return NixlTransport(options, EmulatedGpu())
    return create(name, options)


def offer(name: str, folder: str, secret: bytes) -> None:
    transport = make(name, TransportOptions(folder=folder, secret=secret))
    regions: dict[str, Any] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = obey(transport, regions, **command)
        except TransportError as error:
            answer = type(error).__name__
        print(ANSWER + json.dumps(answer), flush=True)


def obey(transport: Any, regions: dict[str, Any], do: str, region: str = "", **given: Any) -> Any:
    if do == "offer":
        made = transport.offer(given["num_bytes"], given["epoch"])
        key = made.descriptor.region_id.hex()
        regions[key] = made
        return [key, msgspec.msgpack.encode(made.descriptor).hex()]
    found = regions[region]
    if do == "digest":
        first, end = given["first"], given["end"]
        return hashlib.sha256(found.memory.view()[first:end]).hexdigest()
    if do == "fill":
        found.memory.view()[:] = given["value"]
    if do == "advance":
        found.advance(given["epoch"], 2.0)
    if do == "release":
        return found.release(given["first"], given["num_bytes"])
    if do == "close":
        regions.pop(region).close()
    return "done"


def echo(kind: str, folder: str, secret: bytes) -> None:
    options = TransportOptions(folder=folder, secret=secret)
    listener, path = (
        listen_unix(folder, "channel") if kind == "unix" else (listen_tcp(options.host), None)
    )
    print(tcp_address(listener) if path is None else f"unix:{path}", flush=True)
    while True:
        try:
            sock, _ = listener.accept()
            if path is not None:
                serve(over_unix(sock))
            else:
                serve(over_tcp(sock, secret, time.monotonic() + 3600.0, listening=True))
        except TransportError:
            continue


def serve(channel: Any) -> None:
    try:
        while True:
            message = channel.receive(3600.0)
            channel.min_epoch = max(channel.min_epoch, message.epoch)
            if message.token:
                channel.reply(message, message, 3600.0)
    except PeerGoneError:
        channel.close()
