"""What tells two models apart that go by one name: replaced files, a quantization, an override."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

_WHOLE_BYTES = 2**20
_NUM_WINDOWS = 64
_WINDOW_BYTES = 4096
_CONFIGS = {"adapter_config.json", "config.json"}
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def describe_weights(model_config: Any, load_format: str) -> str:
    """32 hex digits that differ where weights, or what is made of them, differ.

    Of a model's large files only the length and 64 pages, evenly spread, are looked at:
    training changes nearly every page, and reading all of them would take as long as loading.

    Args:
        model_config: vLLM's.
        load_format: vLLM's; only whether weights are real counts.

    Raises:
        OSError: A file of the model cannot be read.
    """
    overrides = model_config.hf_overrides
    if callable(overrides):
        overrides = f"{overrides.__module__}.{overrides.__qualname__}"
    said = {
        "quantization": model_config.quantization,
        "overrides": overrides,
        "dummy": load_format == "dummy",
        "length": _length(model_config),
    }
    digest = xxhash.xxh3_128(msgspec.json.encode(said, order="sorted", enc_hook=str))
    _add_files(digest, _local(str(model_config.model), model_config.revision, "config.json"))
    return digest.hexdigest()


def describe_adapter(path: str) -> str:
    """32 hex digits that differ where a LoRA adapter's weights or settings differ.

    Args:
        path: Its folder or its name on the hub, as it was loaded.

    Raises:
        OSError: A file of it cannot be read.
    """
    digest = xxhash.xxh3_128()
    _add_files(digest, _local(os.path.expanduser(path), None, "adapter_config.json"))
    return digest.hexdigest()


def _add_files(digest: xxhash.xxh3_128, folder: Path) -> None:
    for path in _files(folder):
        digest.update(path.name.encode() + b"\0")
        _add_file(digest, path)


def _length(model_config: Any) -> int | None:
    """The longest context, where it decides the positions of short ones too, as in LongRoPE."""
    config = model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return int(model_config.max_model_len) if "long_factor" in rope else None


def _local(model: str, revision: str | None, config: str) -> Path:
    """Where a model's files lie: itself, or the hub's snapshot that ``config`` came from."""
    # Not every name is one of the hub's: a URL of a bucket, for instance.
    with suppress(HFValidationError):
        if not Path(model).exists():
            cached = try_to_load_from_cache(model, config, revision=revision)
            if isinstance(cached, str):
                return Path(cached).parent
    return Path(model)


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
        for number in range(_NUM_WINDOWS):
            offset = (size - _WINDOW_BYTES) * number // (_NUM_WINDOWS - 1)
            digest.update(os.pread(file.fileno(), _WINDOW_BYTES, offset))
