"""Bytes of a model: BanaServe Eqs. 3, 14 to 16, 23 and 25."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a dense decoder-only model.

    Attributes:
        hidden_size: Width of the residual stream, d_model.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; equal to ``num_heads`` without GQA.
        layer_weights: Parameters of one decoder layer.
        element_bytes: Of a weight and of a K or V element: 2 for bf16 and fp16.
        head_size: d_head; 0 means ``hidden_size / num_heads`` (Eq. 14).
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
        """Elements of one head: d_model / h_total (BanaServe Eq. 14)."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer: h_kv d_head 2 bytes (BanaServe Eq. 15).

        The paper's 4 KB is Llama-3.1-8B; a 13B model without GQA has 20,480 bytes.
        """
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers: N S_kv (BanaServe Eq. 16)."""
        return self.num_layers * self.layer_token_bytes

    @property
    def layer_weight_bytes(self) -> int:
        """S_w of BanaServe Eq. 3."""
        return self.layer_weights * self.element_bytes


def llama_layer_weights(hidden_size: int, mlp_size: int, num_heads: int, num_kv_heads: int) -> int:
    """Parameters of a Llama decoder layer: Q, K, V, O, gate, up, down and two RMS norms."""
    kv_size = hidden_size // num_heads * num_kv_heads
    attention = 2 * hidden_size * hidden_size + 2 * hidden_size * kv_size
    return attention + 3 * hidden_size * mlp_size + 2 * hidden_size


def opt_layer_weights(hidden_size: int, mlp_size: int) -> int:
    """Parameters of an OPT decoder layer: Q, K, V, O, two MLP matrices, biases, two norms."""
    attention = 4 * (hidden_size * hidden_size + hidden_size)
    mlp = 2 * hidden_size * mlp_size + mlp_size + hidden_size
    return attention + mlp + 4 * hidden_size


def crossover_tokens(layer_weight_bytes: int, layer_token_bytes: int) -> float:
    """Cached tokens above which a layer's KV outweighs its weights.

    The paper says with Eq. 4 that weights dominate in most cases. On a loaded decode instance of
    a 13B model they do not: the two are equal at about 30,700 tokens.
    """
    return layer_weight_bytes / layer_token_bytes


def memory_bytes(
    fixed_bytes: int, num_layers: int, layer_weight_bytes: int, kv_tokens: int, token_bytes: int
) -> int:
    """Memory footprint M_0 + n M_l + K (BanaServe Eqs. 23 and 25), K spelled out.

    The paper leaves K a constant; it is ``kv_tokens`` (batch times length) of the layers held.

    Args:
        token_bytes: KV of one token over those ``num_layers``.
    """
    return fixed_bytes + num_layers * layer_weight_bytes + kv_tokens * token_bytes
