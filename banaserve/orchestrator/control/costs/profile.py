"""Profile of a modelled GPU and model, read from a file and checked, with its step times."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import InstanceFacts
from banaserve.orchestrator.control.model.moving import Link

BUILT_IN = Path(__file__).parent / "profiles"

_MOST = {
    "num_layers": 1000,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "hidden_size": 1_000_000,
    "head_size": 10_000,
    "element_bytes": 8,
    "max_context_tokens": 100_000_000,
    "kv_tokens": 1_000_000_000,
    "block_tokens": 4096,
    **dict.fromkeys(("ttft", "tpot", "latency", "ttft_p99", "tpot_p99"), 1.0),
}

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Dimensions of a dense decoder-only model, and their bytes: BanaServe Eqs. 3 and 14 to 16.

    Attributes:
        hidden_size: Width of the residual stream, d_model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; equal to ``num_heads`` without GQA.
        layer_weights: Number of parameters of one decoder layer.
        fixed_weights: Number of parameters of embeddings and output head.
        element_bytes: Size of a weight and of a K or V element: 2 for bf16 and fp16.
        layer_kv_bytes: Size of what one layer keeps of one token, on one device, where the heads do
            not tell it (MLA, other precisions, heads of another width); 0 where they do.
        head_size: Number of elements of one head; 0 for ``hidden_size`` / ``num_heads``.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    layer_weights: int
    fixed_weights: int
    max_context_tokens: int
    element_bytes: int = 2
    layer_kv_bytes: int = 0
    head_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be 1 or more")
        if self.layer_weights < 1:
            raise ValueError(f"layer_weights is {self.layer_weights}: must be 1 or more")
        if self.hidden_size % self.num_heads and not (self.layer_kv_bytes or self.head_size):
            raise ValueError("hidden_size is no multiple of num_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads is no multiple of num_kv_heads")

    @property
    def head_dim(self) -> int:
        """Number of elements of one head: d_model / h_total (BanaServe Eq. 14) if none is given."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def layer_token_bytes(self) -> int:
        """Size of K and V of one token in one layer: h_kv d_head 2 bytes (BanaServe Eq. 15).

        The paper's 4 KB is the size for Llama-3.1-8B; a 13B model without GQA has 20,480 bytes.
        """
        of_heads = 2 * self.num_kv_heads * self.head_dim * self.element_bytes
        return self.layer_kv_bytes or of_heads

    @property
    def token_bytes(self) -> int:
        """Size of K and V of one token in all layers: N S_kv (BanaServe Eq. 16)."""
        return self.num_layers * self.layer_token_bytes

    @property
    def layer_weight_bytes(self) -> int:
        """Size of the weights of one layer: S_w of BanaServe Eq. 3."""
        return self.layer_weights * self.element_bytes


@dataclass(frozen=True, slots=True)
class PrefillSection:
    """Time of a prefill step: fixed + token n + pair n^2."""

    fixed_s: float
    token_s: float
    pair_s: float


@dataclass(frozen=True, slots=True)
class DecodeSection:
    """Time of a decode step from ``from_batch`` requests on: fixed + context + request."""

    fixed_s: float
    context_token_s: float
    request_s: float
    from_batch: int = 1


@dataclass(frozen=True, slots=True)
class MemorySection:
    """KV cache of one instance with nothing migrated."""

    kv_tokens: int
    block_tokens: int = 16


@dataclass(frozen=True, slots=True)
class ErrorSection:
    """Relative errors of means and 99th percentiles, against runs that were not fitted.

    Those of percentiles are nan if the runs tell means only.
    """

    ttft: float
    tpot: float
    latency: float
    ttft_p99: float = nan
    tpot_p99: float = nan


@dataclass(frozen=True, slots=True)
class Profile:
    """A modelled device with a modelled model; its times are computed, not measured.

    Attributes:
        error: Error of the step times; None if it is unknown.
        facts: Facts of an instance whose memory is just large enough for its KV.
    """

    name: str
    source: str
    model: ModelSection
    prefill: PrefillSection
    decode_small: DecodeSection
    decode_large: DecodeSection | None
    memory: MemorySection
    link: Link
    error: ErrorSection | None = None
    facts: InstanceFacts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", self._facts())

    def decode(self, batch: int) -> DecodeSection:
        """Return the coefficients for ``batch`` requests."""
        large = self.decode_large
        return large if large is not None and batch >= large.from_batch else self.decode_small

    def _facts(self) -> InstanceFacts:
        shape, tokens = self.model, self.memory.kv_tokens
        fixed_bytes = shape.fixed_weights * shape.element_bytes
        weights = shape.num_layers * shape.layer_weight_bytes
        blocks = tokens // self.memory.block_tokens
        return InstanceFacts(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            layer_weight_bytes=shape.layer_weight_bytes,
            layer_token_bytes=shape.layer_token_bytes,
            block_tokens=self.memory.block_tokens,
            memory_bytes=fixed_bytes
            + weights
            + blocks * self.memory.block_tokens * shape.token_bytes,
            fixed_bytes=fixed_bytes,
            hidden_bytes=shape.hidden_size * shape.element_bytes,
            queries_a_head=shape.num_heads // shape.num_kv_heads,
        )


def error_words(error: ErrorSection | None) -> str:
    """Return the band of times that stand on step times with this error, in words."""
    if error is None:
        return "unknown"
    named = {"TTFT": error.ttft, "TPOT": error.tpot, "latency": error.latency}
    named |= {"TTFT p99": error.ttft_p99, "TPOT p99": error.tpot_p99}
    return ", ".join(f"{name} {value:.1%}" for name, value in named.items() if not isnan(value))


def names() -> list[str]:
    """Return the names of the profiles in this package."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def load(name_or_path: str) -> Profile:
    """Read a built-in profile by its name, or a file that ends in ``.toml``.

    Raises:
        UserError: The name is unknown, the file cannot be read, or a key is missing, unknown or out
            of range; the message names file and key.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
    else:
        check_known("profile", name_or_path, names())
        path = BUILT_IN / f"{name_or_path}.toml"
    table = read_toml(path)
    known = ("name", "source", "model", "prefill", "decode", "memory", "link")
    check_keys(path, "", table, (*known, "error"), required=known)
    error = table.get("error")
    decode = table["decode"]
    if not isinstance(decode, Mapping):
        raise UserError(f"{path}: decode is no section")
    check_keys(path, "decode.", decode, ("small", "large"), required=("small",))
    large = decode.get("large")
    try:
        model = read_section(path, "model", table["model"], ModelSection)
    except ValueError as error:
        raise UserError(f"{path}: [model]: {error}") from error
    return Profile(
        str(table["name"]),
        str(table["source"]),
        model,
        read_section(path, "prefill", table["prefill"], PrefillSection),
        read_section(path, "decode.small", decode["small"], DecodeSection),
        None if large is None else read_section(path, "decode.large", large, DecodeSection),
        read_section(path, "memory", table["memory"], MemorySection),
        read_section(path, "link", table["link"], Link, ("sync_s", "hop_s")),
        None if error is None else read_section(path, "error", error, ErrorSection),
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: The file cannot be read, or is not TOML; the message names the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def check_keys(
    path: Path,
    prefix: str,
    table: Mapping[str, Any],
    known: tuple[str, ...],
    required: tuple[str, ...] = (),
) -> None:
    """Check that ``table`` has all required keys and only known ones.

    Raises:
        UserError: A key is missing or unknown; the message names file and key, and for an unknown
            key the nearest known one.
    """
    for key in table:
        check_known(f"key in {path.name}: {prefix}", key, known)
    for key in required:
        if key not in table:
            raise UserError(f"{path}: {prefix}{key} is missing")


def read_section(
    path: Path, name: str, table: Any, kind: type[Section], required: tuple[str, ...] = ()
) -> Section:
    """Build ``kind`` from a section whose values are finite numbers of the right type, above 0.

    Args:
        required: Keys that the section must have, besides those without a default.

    Raises:
        UserError: A key is missing, unknown or out of range; the message names file and key.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{path}: {name} is no section")
    hints = get_type_hints(kind)
    known = tuple(f.name for f in fields(kind))  # type: ignore[arg-type]
    defaults = {f.name: f.default for f in fields(kind)}  # type: ignore[arg-type]
    needed = tuple(key for key in known if not isinstance(defaults[key], int | float))
    check_keys(path, f"{name}.", table, known, (*needed, *required))
    for key, value in table.items():
        wanted = (int,) if hints[key] is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted) or not isfinite(value):
            what = "a whole number" if hints[key] is int else "a number"
            raise UserError(f"{path}: {name}.{key} is {value!r}: give {what}")
        if value <= 0:
            raise UserError(f"{path}: {name}.{key} is {value!r}: give more than 0")
        if value > (most := _most(key)):
            raise UserError(f"{path}: {name}.{key} is {value!r}: give at most {most:g}")
    return kind(**table)


def _most(key: str) -> float:
    """Return the maximum of a value; a larger one is a mistake: milliseconds instead of seconds,
    bytes instead of tokens."""
    if key.endswith("_per_s"):
        return 1e15
    return 10.0 if key.endswith("_s") else _MOST.get(key, float("inf"))
