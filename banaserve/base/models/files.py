"""Digest of a model's files: equal on two machines if they hold the same model.

Of large files only the length, 64 evenly spread pages and the first page of each tensor of a
safetensors file are read: training changes nearly every page of each tensor that it changes, and
reading all pages would take as long as loading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

_WHOLE_BYTES = 2**20
_NUM_WINDOWS = 64
_WINDOW_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 10**6
"""Maximum length of a safetensors header, as its own readers have it."""
_CONFIGS = {
    "adapter_config.json",
    "config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
}
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


class _Tensor(msgspec.Struct):
    """Entry of a safetensors header; that of its metadata has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


def digest_files(model: Path) -> str:
    """Return the digest of a model's folder or file, as 32 hex digits.

    Raises:
        OSError: A file of the model cannot be read.
    """
    digest = xxhash.xxh3_128()
    add_files(digest, model)
    return digest.hexdigest()


def add_files(digest: xxhash.xxh3_128, folder: Path) -> None:
    """Add names, lengths and pages of a model's files to ``digest``.

    Raises:
        OSError: A file cannot be read.
    """
    for path in _files(folder):
        digest.update(path.name.encode() + b"\0")
        _add_file(digest, path)


def _files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
    elif model.is_dir():
        for path in sorted(model.iterdir()):
            if (path.name in _CONFIGS or path.suffix in _SUFFIXES) and path.is_file():
                yield path


def _add_file(digest: xxhash.xxh3_128, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
            return
        spread = [(size - _WINDOW_BYTES) * i // (_NUM_WINDOWS - 1) for i in range(_NUM_WINDOWS)]
        for offset in (*spread, *_tensor_offsets(file.fileno(), size)):
            digest.update(os.pread(file.fileno(), _WINDOW_BYTES, offset))


def _tensor_offsets(descriptor: int, size: int) -> list[int]:
    """Return where the tensors of a safetensors file begin; nothing for files of another kind."""
    num_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if num_bytes > min(size, _MAX_HEADER_BYTES):
        return []
    try:
        header = msgspec.json.decode(os.pread(descriptor, num_bytes, 8), type=dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    offsets = (8 + num_bytes + tensor.data_offsets[0] for tensor in header.values())
    return [offset for offset in offsets if 0 <= offset < size]
