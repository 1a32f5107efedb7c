"""Files of operators of a GPU that is made up, with times that a test can compute."""

from __future__ import annotations

from pathlib import Path

LAYERS = ("layernorm", "qkv_proj", "o_proj", "gate_up_proj", "act_fn", "down_proj")


def write_operators(folder: Path) -> Path:
    """Write files whose layers take 1 us a token each; return their prefix."""
    prefix = folder / "gpu_model_tp1"
    points = (1, 8, 64, 2048)
    rows = [f"{layer},{n},{n}" for layer in (*LAYERS, "embedding") for n in points]
    _write(prefix, "dense", "layer,tokens,time_us", rows)
    heads = [f"lm_head,{n},{10 * n}" for n in (1, 256)]
    _write(prefix, "per_sequence", "layer,sequences,time_us", heads)
    attention = [f"0,0,{n},{c},{n * c}" for n in (1, 64) for c in (16, 4096)]
    attention += [f"{c},{h},0,0,{c + h}" for c in (16, 2048) for h in (0, 4096)]
    attention += [
        f"{c},{h},{n},{k},{c + h + 2 * n * k}"
        for c in (16, 2048)
        for h in (0, 4096)
        for n in (1, 64)
        for k in (16, 4096)
    ]
    columns = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    _write(prefix, "attention", columns, attention)
    _write(prefix, "moe", "tokens,activated_experts,time_us", ["1,2,5", "1,8,20", "64,8,80"])
    return prefix


def write_alphas(prefix: Path, *rows: str) -> None:
    """Write how unequal contexts cost, beside the files of ``write_operators``."""
    _write(prefix, "skew_fit", "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha", [*rows])


def _write(prefix: Path, part: str, columns: str, rows: list[str]) -> None:
    path = prefix.with_name(f"{prefix.name}_{part}.csv")
    path.write_text("\n".join([columns, *rows, ""]))
