"""Files of JSON objects, one a line or in one list, uncompressed or compressed with zstd."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.errors import UserError

MAX_UNPACKED_BYTES = 4 * 2**30
"""Maximum size of one decompressed file: a few kilobytes of zstd may expand beyond any memory."""
_STEP_BYTES = 2**20
_GZIP = b"\x1f\x8b"


def read_records(path: Path, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the first ``limit`` objects of a file with their line numbers, counted from 1.

    Raises:
        UserError: The file cannot be read, or a line is not a JSON object; the message names it.
    """
    return _lines(path, unpacked(path), limit)


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of JSON lines or of one JSON list, with their places.

    A place has the file and, in words, the line or the number of the object.

    Raises:
        UserError: The file cannot be read, or is neither; the message names the place.
    """
    data = unpacked(path)
    if not data.lstrip().startswith(b"["):
        yield from ((f"{path}, line {n}", record) for n, record in _lines(path, data, None))
        return
    try:
        objects = msgspec.json.decode(data, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not a list of JSON objects: {error}") from error
    yield from ((f"{path}, object {n}", one) for n, one in enumerate(objects, start=1))


def _lines(path: Path, data: bytes, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    count = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        if limit is not None and count >= limit:
            return
        count += 1
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a JSON object: {error}") from error
        yield number, record


def unpacked(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if its name ends in ``.zst``, without a UTF-8 mark.

    Raises:
        UserError: The file cannot be read or decompressed, or is larger than ``MAX_UNPACKED_BYTES``
            once decompressed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if data.startswith(_GZIP):
        raise UserError(f"{path} is compressed with gzip: unpack it, or compress it with zstd")
    if path.suffix != ".zst":
        return data.removeprefix(BOM_UTF8)
    try:
        import zstandard
    except ImportError as error:
        raise UserError(
            f"{path} is compressed: install the package zstandard, or unpack the file"
        ) from error
    parts: list[bytes] = []
    num_bytes = 0
    packed = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
    try:
        while part := packed.read(_STEP_BYTES):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > MAX_UNPACKED_BYTES:
                raise UserError(
                    f"{path} is larger than {MAX_UNPACKED_BYTES} bytes unpacked: split it"
                )
    except zstandard.ZstdError as error:
        raise UserError(f"{path} is not a zstd file: {error}") from error
    return b"".join(parts)
