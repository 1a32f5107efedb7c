"""What a block of a very small model means."""

from banaserve.kvstore.fingerprint import Fingerprint

FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=16,
    num_layers=2,
    num_kv_heads=2,
    head_size=8,
    layout="LBHNC",
    page_bytes=2048,
    probe="00ff",
)
