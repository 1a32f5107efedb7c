"""Fingerprint of KV blocks: all that two instances must agree on to read each other's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from banaserve.base.errors import FingerprintError

PAGE_BYTES = 4096
_MAX_SLOT_BYTES = 2**40
MAX_PARTS = 4096
_MAX_TEXT = 1024

_IDENTITY_FIELDS = ("model", "revision", "salt")


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Properties that determine the meaning of a KV block's bytes.

    Attributes:
        model: Name or path that the model was loaded from.
        revision: Revision of the weights; empty if there is none.
        dtype: Data type of the model, such as ``bfloat16``.
        kv_cache_dtype: Data type of the KV cache, such as ``auto`` or ``fp8``.
        num_layers: Number of layers that have a KV cache.
        num_kv_heads: Number of KV heads of the whole model, over all parts; 1 if all heads share
            a latent.
        head_size: Number of elements of one head, or of a latent.
        layout: Name of the memory layout of one layer's block.
        isa: Instruction set for which the layout is packed; empty if it does not matter.
        page_bytes: Size of one layer's block in one part.
        num_parts: Number of parts of a layer's block, each with its own memory order. 1 if heads
            are stored one after another: then tensor-parallel ranks that write side by side
            produce the same bytes as a single rank, so the block does not depend on their number.
            1 for latents, which each rank has as a whole. Otherwise the number of ranks.
        salt: Salt that separates the blocks of different tenants.
        probe: vLLM's hash of a known token list in hex, which shows whether block hashes agree.
        weights: Digest of all that determines the values that the model computes: a model's name
            alone does not identify a folder whose files were replaced.
        attention: Kind of attention that reads the blocks: ``full`` keeps a key and a value of
            each head and token, ``mla`` one latent of each token.

    Raises:
        ValueError: A field is out of range.
    """

    model: str
    revision: str = ""
    dtype: str
    kv_cache_dtype: str = "auto"
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    layout: str
    isa: str = ""
    page_bytes: int
    num_parts: int = 1
    salt: str = ""
    probe: str = ""
    weights: str = ""
    attention: str = "full"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str):
                if len(value) > _MAX_TEXT:
                    raise ValueError(f"{name} is longer than {_MAX_TEXT} characters")
            elif not 1 <= value <= _MAX_SLOT_BYTES:
                raise ValueError(f"{name} is {value}, not in 1..{_MAX_SLOT_BYTES}")
        if self.num_parts > MAX_PARTS:
            raise ValueError(f"num_parts is {self.num_parts}, not in 1..{MAX_PARTS}")
        if self.page_bytes * self.num_layers * self.num_parts > _MAX_SLOT_BYTES:
            raise ValueError(f"one block is larger than {_MAX_SLOT_BYTES} bytes")

    @property
    def slot_bytes(self) -> int:
        """Size of one block with all layers and parts, rounded up to whole memory pages."""
        block_bytes = self.page_bytes * self.num_layers * self.num_parts
        return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES

    def offset_bytes(self, layer: int, part: int = 0) -> int:
        """Return the offset in a slot of the run of ``page_bytes`` of ``layer`` and ``part``."""
        return (layer * self.num_parts + part) * self.page_bytes

    def namespace(self) -> bytes:
        """Return the 16 bytes that precede every key of clients with this fingerprint."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self))

    def differing_fields(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the names of the fields in which two fingerprints differ, in declared order."""
        names = self.__struct_fields__
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))

    def same_identity(self, other: Fingerprint) -> bool:
        """Return whether model, revision and salt agree, so that sharing would be expected."""
        return all(getattr(self, name) == getattr(other, name) for name in _IDENTITY_FIELDS)


def check_alike(found: Sequence[Fingerprint]) -> None:
    """Check that the engines of one server keep KV blocks in the same form.

    Raises:
        FingerprintError: They do not, so that no engine could reuse another engine's blocks.
    """
    first = found[0]
    for other in found:
        if names := first.differing_fields(other):
            said = ", ".join(
                f"{name}: {getattr(first, name)} and {getattr(other, name)}" for name in names
            )
            raise FingerprintError(
                f"the engines keep KV blocks in different forms ({said}), so none can read "
                "another's: give all of them the same devices and options"
            )
