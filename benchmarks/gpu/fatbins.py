"""Removal of GPU code for other architectures from a shared library.

A library of vLLM holds the same kernels for many architectures; a machine needs one of them. The
code of the others is overwritten with zeros, which compress to nothing. Sizes and offsets stay as
they are, so the driver still reads the containers and picks the code of its architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""Beginning of a container: magic number, version, size of its header in bytes."""
_HEADER_BYTES = 16
_PTX, _MACHINE_CODE = 1, 2
_KINDS = (_PTX, _MACHINE_CODE, 8, 16, 32, 64)
_LEAST_ENTRY_BYTES = 64
_ARCHITECTURE_AT = 28


class _Code(NamedTuple):
    """Code of one architecture in a container.

    Attributes:
        start: Offset of the code in the library, in bytes.
    """

    kind: int
    architecture: int
    start: int
    size: int


def keep_architectures(library: bytes, wanted: Collection[int]) -> bytes:
    """Return the library with zeros in place of all GPU code but machine code for ``wanted``.

    A kernel without machine code of these architectures fails when it is launched.

    Args:
        wanted: Compute capabilities times ten, such as 90.
    """
    changed = bytearray(library)
    for code in _codes(library):
        if not (code.kind == _MACHINE_CODE and code.architecture in wanted):
            changed[code.start : code.start + code.size] = bytes(code.size)
    return bytes(changed)


def _codes(library: bytes) -> Iterator[_Code]:
    at = library.find(_MAGIC)
    while at >= 0:
        yield from _container(library, at)
        at = library.find(_MAGIC, at + len(_MAGIC))


def _container(library: bytes, start: int) -> list[_Code]:
    """Return the entries of the container at ``start``; none if this is no container."""
    found = []
    try:
        (size,) = struct.unpack_from("<Q", library, start + len(_MAGIC))
        at, end = start + _HEADER_BYTES, start + _HEADER_BYTES + size
        if end > len(library):
            return []
        while at + _LEAST_ENTRY_BYTES <= end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", library, at)
            (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE_AT)
            code = _Code(kind, architecture, at + header, payload)
            at = code.start + payload
            if kind not in _KINDS or header < _LEAST_ENTRY_BYTES or at > end:
                return []
            found.append(code)
    except struct.error:
        return []
    return found if at == end else []
