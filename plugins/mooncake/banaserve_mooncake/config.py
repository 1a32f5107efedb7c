"""Configuration of Mooncake from one URL, checked before anything starts."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from urllib.parse import parse_qsl, urlsplit

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.sizes import parse_size

_EXAMPLE = "mooncake://HOST:PORT?segment=1GiB"
_PROTOCOLS = ("rdma", "tcp")
_OPTIONS = (
    "block", "depth", "devices", "host", "metadata", "protocol", "segment", "timeout",
)  # fmt: skip


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration with which to join a Mooncake Store.

    Attributes:
        master: ``HOST:PORT`` of mooncake_master.
        metadata: Server where Mooncake keeps addresses of peers; ``P2PHANDSHAKE`` needs none.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas.
        host: Address under which peers reach this machine; empty for its address on the route to
            the master.
        segment_bytes: Size of the memory that this process lends to the store; 0 lends none.
        max_block_bytes: Maximum size of a block, a multiple of the page size; larger blocks are
            not stored.
        depth: Maximum number of loads and stores under way; each has ``max_block_bytes`` of
            address space.
        timeout_s: Maximum wait for a load, a store or the master, in seconds.
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    segment_bytes: int = 2**30
    max_block_bytes: int = 16 * 2**20
    depth: int = 8
    timeout_s: float = 5.0


def parse_url(url: str) -> MooncakeConfig:
    """Parse ``mooncake://HOST:PORT?option=value&...`` into a configuration.

    Options: metadata, protocol, devices, host, segment, block, depth, timeout (s).

    Raises:
        UserError: The URL is invalid, or an option or value is unknown; one line says which.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise UserError(f"{url!r} is not {_EXAMPLE}: {error}") from error
    if parts.scheme != "mooncake" or not host or not port or parts.path not in ("", "/"):
        raise UserError(f"{url!r} is not {_EXAMPLE}")
    if ":" in host:
        raise UserError(f"{url!r} has an IPv6 address: give an IPv4 address or a name")
    for name, _ in given:
        check_known("option of mooncake://", name, _OPTIONS)
    options = dict(given)
    protocol = options.get("protocol", "tcp")
    check_known("protocol of mooncake://", protocol, _PROTOCOLS)
    block_bytes = parse_size(options.get("block", "16MiB"))
    segment = options.get("segment", "1GiB")
    return MooncakeConfig(
        master=f"{host}:{port}",
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        protocol=protocol,
        devices=options.get("devices", ""),
        host=options.get("host", ""),
        segment_bytes=0 if segment == "0" else parse_size(segment),
        max_block_bytes=-(-block_bytes // PAGE_BYTES) * PAGE_BYTES,
        depth=int(_number("depth", options.get("depth", "8"), 1, 256)),
        timeout_s=_number("timeout", options.get("timeout", "5"), 0.1, 3600),
    )


def check_installed() -> None:
    """Check that Mooncake's client can be loaded.

    Raises:
        UserError: A package or library is missing; the message says what to install.
    """
    if find_spec("mooncake") is None:
        raise UserError(
            "the mooncake tier needs Mooncake: pip install mooncake-transfer-engine-non-cuda"
        )
    try:
        # Mooncake links to this library for every protocol, tcp included.
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise UserError(
            "Mooncake needs libibverbs.so.1: install the system's package "
            "(Debian and Ubuntu: libibverbs1; Fedora: libibverbs)"
        ) from error


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise UserError(f"{name}={text} of mooncake://: give a number from {least:g} to {most:g}")
    return value
