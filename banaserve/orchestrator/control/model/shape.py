"""Dimensions of a model, and their bytes: BanaServe Eqs. 3 and 14 to 16."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a dense decoder-only model.

    Attributes:
        hidden_size: Width of the residual stream, d_model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; equal to ``num_heads`` without GQA.
        layer_weights: Number of parameters of one decoder layer.
        element_bytes: Size of a weight and of a K or V element: 2 for bf16 and fp16.
        head_size: Elements of one head, d_head; 0 means ``hidden_size / num_heads`` (Eq. 14).
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    layer_weights: int
    element_bytes: int = 2
    head_size: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be 1 or more")
        if self.layer_weights < 1:
            raise ValueError(f"layer_weights is {self.layer_weights}: must be 1 or more")
        if not self.head_size and self.hidden_size % self.num_heads:
            raise ValueError("hidden_size is no multiple of num_heads: give head_size")
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads is no multiple of num_kv_heads")

    @property
    def head_dim(self) -> int:
        """Number of elements of one head: d_model / h_total (BanaServe Eq. 14)."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def layer_token_bytes(self) -> int:
        """Size of K and V of one token in one layer: h_kv d_head 2 bytes (BanaServe Eq. 15).

        The paper's 4 KB is the size for Llama-3.1-8B; a 13B model without GQA has 20,480 bytes.
        """
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Size of K and V of one token in all layers: N S_kv (BanaServe Eq. 16)."""
        return self.num_layers * self.layer_token_bytes

    @property
    def layer_weight_bytes(self) -> int:
        """Size of the weights of one layer: S_w of BanaServe Eq. 3."""
        return self.layer_weights * self.element_bytes
