"""Conversion of a llama-architecture GGUF file to a Hugging Face model folder, without torch.

transformers can do the same, but needs accelerate, takes four times as long, and drops the
digit-splitting rule of the tokenizer (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from banaserve.base.errors import UserError

CONTROL_TOKEN = 3
_PLAIN_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write ``source`` into the existing folder ``target`` as a bf16 model that vLLM can load.

    Raises:
        UserError: The file is not a GGUF file of a llama model with a byte-level BPE tokenizer.
        OSError: The folder cannot be written.
    """
    from gguf import GGUFReader

    progress(f"reading {source.name}")
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise UserError(f"{source} is not a usable GGUF file ({error}): install it again") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.model"))
    if kind != ("llama", "gpt2"):
        raise UserError(f"{source} holds a model of kind {kind}: only ('llama', 'gpt2') is known")
    progress("writing the tokenizer")
    _write_tokenizer(fields, target)
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(target / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", special)
    _write_weights(reader.tensors, config, target / "model.safetensors", progress)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    eos = fields["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if fields.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))

    eos = fields["tokenizer.ggml.eos_token_id"]
    settings = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer would rebuild its rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[eos],
        "pad_token": tokens[fields.get("tokenizer.ggml.padding_token_id", eos)],
        "unk_token": tokens[fields.get("tokenizer.ggml.unknown_token_id", eos)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    _write_json(target / "tokenizer_config.json", settings)
    if template := fields.get("tokenizer.chat_template"):
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_weights(
    tensors: list[Any], config: dict[str, Any], path: Path, progress: Callable[[str], None]
) -> None:
    """Write one safetensors file, a tensor at a time: the whole model is never in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset_bytes = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end_bytes = offset_bytes + 2 * int(np.prod(shape))
        header[hugging_face_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, weights in enumerate(_dequantized(tensors, config), start=1):
            file.write(to_bf16(weights).tobytes())
            if index % max(1, len(tensors) // 4) == 0:
                progress(f"converting weights to bf16: {index} of {len(tensors)} tensors")


def _dequantized(tensors: list[Any], config: dict[str, Any]) -> Iterator[npt.NDArray[np.float32]]:
    from gguf.quants import dequantize

    for tensor in tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weights = unpermute(weights, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            weights = unpermute(weights, config["num_key_value_heads"])
        yield weights


def hugging_face_name(name: str) -> str:
    """Return the name that transformers' Llama model gives to the GGUF tensor ``name``.

    Raises:
        UserError: A llama model of transformers has no such tensor.
    """
    if name in _PLAIN_NAMES:
        return _PLAIN_NAMES[name]
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part = part.removesuffix(".weight")
    if head != "blk" or part not in _LAYER_NAMES or not name.endswith(".weight"):
        raise UserError(f"the GGUF file holds a tensor {name} that a llama model does not have")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def unpermute(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of rotary pairs. ``[num_heads * head_dim, hidden]`` fp32."""
    rows, columns = weights.shape
    paired = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bf16 bit patterns of finite ``values``, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
