"""Fingerprint of KV blocks: all that two instances must agree on to read each other's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from banaserve.errors import FingerprintError

PAGE_BYTES = 4096
_MAX_SLOT_BYTES = 2**40
MAX_PARTS = 4096
_MAX_TEXT = 1024

_IDENTITY_FIELDS = ("model", "revision", "salt")


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything that decides what the bytes of a KV block mean.

    Attributes:
        model: Name or path that the model was loaded from.
        revision: Of the weights; empty where there is none.
        dtype: Of the model, such as ``bfloat16``.
        kv_cache_dtype: Of the KV cache, such as ``auto`` or ``fp8``.
        block_size_tokens: Tokens in one block.
        num_layers: Layers that have a KV cache.
        num_kv_heads: KV heads of the whole model, over all parts; 1 where all share a latent.
        head_size: Elements of one head, or of a latent.
        layout: Name of the memory layout of one layer's block.
        isa: Instruction set that the layout is packed for; empty where it does not matter.
        page_bytes: Bytes of one layer's block in one part.
        num_parts: Parts of a layer's block, each with an order of its own inside. 1 where heads lie
            one behind the other: what tensor-parallel ranks write side by side is what one writes
            then, so that their number is no matter of the block. 1 of latents, of which each rank
            has the whole. Otherwise as many as ranks.
        salt: Keeps tenants apart: other salt, other blocks.
        probe: Hex of vLLM's hash of a known token list, which shows that block hashes agree.
        weights: Digest of what decides the values that the model computes: a model's name alone
            says little of a folder whose files were replaced.
        attention: Kind of attention that reads them: ``full`` keeps a key and a value of each head
            and token, ``mla`` one latent of each token.

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
        """Bytes of one block of all layers and parts, in whole memory pages."""
        block_bytes = self.page_bytes * self.num_layers * self.num_parts
        return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES

    def offset_bytes(self, layer: int, part: int = 0) -> int:
        """Where in a slot the run of ``page_bytes`` of ``layer`` and ``part`` begins."""
        return (layer * self.num_parts + part) * self.page_bytes

    def namespace(self) -> bytes:
        """16 bytes that stand before every key of clients with this fingerprint."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self))

    def differing_fields(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields in which the two differ, in declared order."""
        names = self.__struct_fields__
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))

    def same_identity(self, other: Fingerprint) -> bool:
        """Whether model, revision and salt agree, so that sharing would be expected."""
        return all(getattr(self, name) == getattr(other, name) for name in _IDENTITY_FIELDS)


def check_alike(found: Sequence[Fingerprint]) -> None:
    """Return if engines of one server keep KV blocks in one form.

    Raises:
        FingerprintError: They do not, so that one could never take over what another has computed.
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
