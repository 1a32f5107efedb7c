"""Options of a mock core, and what it knows of the engine that it stands for.

It reads the command line that a real engine would get, and the model's ``config.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from banaserve.kvstore.fingerprint import Fingerprint

VARIABLE = "BANASERVE_MOCK_CORES"
"""Environment variable: JSON of ``MockOptions``, or the path of a file with it, which every core
reads when it starts."""
HOST_VARIABLE = "BANASERVE_MOCK_HOST"
"""Environment variable: the network namespace that a server or agent is to run in."""
VLLM = "0.32.0"
_BLOCK_TOKENS = 128
_FIRST_TOKEN = 300
"""Of the model's vocabulary: those before it are special or single bytes, which may be no text."""
_MAX_RUNNING, _MAX_STEP_TOKENS = 256, 4096
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}


class Trouble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong with a core.

    Attributes:
        how: ``fail at start``: it ends with an error before the handshake; ``never ready``: it
            starts and says nothing; ``die``: its process is killed; ``fatal``: it says that it is
            dead and ends with an error; ``hang``: it answers nothing and uses no processor;
            ``spin``: it answers nothing and uses one; ``end in error``: it ends the request that
            has ``token`` with an error, and serves all others.
        after_tokens: Tokens that the core puts out before; of no matter at the start.
        instances: Ids of the instances that it concerns; all where there is none.
        token: Token of a prompt that sets the trouble off, in place of ``after_tokens``.
        once: A file that is renamed, to a name with its process id, by the core that it happens
            to; without the file it does not happen. Empty for each time.
    """

    how: str
    after_tokens: int = 0
    instances: tuple[str, ...] = ()
    token: int | None = None
    once: str = ""

    @property
    def is_of_start(self) -> bool:
        """Flag: it happens to a core that starts, and to none that serves."""
        return self.how in ("fail at start", "never ready")


class MockOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times and limits of mock cores.

    Attributes:
        step_ms: Time of a step without its prompts.
        prefill_token_ms: Time that each token of a prompt adds to a step.
        request_ms: Time that each request adds to a step.
        start_ms: Time before the handshake.
        answer_ms: Time that each answer to a utility call takes.
        answer_tokens: Number of tokens after which the model's end token comes; 0 for never.
        max_running: Number of requests that run at once; 0 for the engine's.
        num_blocks: KV blocks; 0 for as many as the engine's memory has room for.
        instance_bytes: Memory that the server takes an instance to need, a mock core by default.
        patience: Share of the time for which the server usually bears with a silent engine, engine
            parent or store.
        troubles: Faults of the cores.
    """

    step_ms: float = 1.0
    prefill_token_ms: float = 0.0
    request_ms: float = 0.0
    start_ms: float = 0.0
    answer_ms: float = 0.0
    answer_tokens: int = 0
    max_running: int = 0
    num_blocks: int = 0
    instance_bytes: int = 16 << 20
    patience: float = 1.0
    troubles: tuple[Trouble, ...] = ()

    @classmethod
    def read(cls) -> MockOptions:
        """Those that the environment names; the usual ones where it names none."""
        said = os.environ.get(VARIABLE, "")
        if said and not said.startswith("{"):
            said = Path(said).read_text(encoding="utf-8")
        return msgspec.json.decode(said, type=cls) if said else cls()

    def trouble_of(self, instance_id: str) -> Trouble | None:
        """The first trouble that concerns an instance."""
        for trouble in self.troubles:
            if not trouble.instances or instance_id in trouble.instances:
                return trouble
        return None


class EngineFacts(msgspec.Struct, frozen=True):
    """What follows from an engine's command line and its model.

    Attributes:
        weights: Digest of the files of weights.
        num_blocks: KV blocks.
        max_running: Number of requests that run at once.
        max_step_tokens: Tokens that a step computes at most.
        num_ranks: Tensor-parallel workers.
        tokens: First token that answers are made of, and the one behind the last.
        fingerprint: Fingerprint of the KV blocks; None without a store.
    """

    model: str
    weights: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    max_running: int
    max_step_tokens: int
    num_ranks: int
    tokens: tuple[int, int]
    fingerprint: Fingerprint | None

    @classmethod
    def of(cls, argv: Sequence[str], options: MockOptions) -> EngineFacts:
        """Facts of the engine that vLLM would start with ``argv``."""
        given = _parsed(argv)
        folder = Path(given.model)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dtype = given.dtype if given.dtype != "auto" else config.get("torch_dtype", "bfloat16")
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        num_layers = config["num_hidden_layers"]
        num_kv_heads = config.get("num_key_value_heads", heads)
        page_bytes = 2 * given.block_size * num_kv_heads * head_size * _ELEMENT_BYTES[dtype]
        room = max(2, given.kv_cache_memory_bytes // (page_bytes * num_layers))
        weights = weights_of(folder)
        return cls(
            model=given.model,
            weights=weights,
            dtype=dtype,
            max_model_len=given.max_model_len or config["max_position_embeddings"],
            block_size=given.block_size,
            num_blocks=options.num_blocks or room,
            max_running=options.max_running or given.max_num_seqs,
            max_step_tokens=given.max_num_batched_tokens,
            num_ranks=given.tensor_parallel_size,
            tokens=(_FIRST_TOKEN, config["vocab_size"]),
            fingerprint=Fingerprint(
                model=given.model,
                dtype=dtype,
                block_size_tokens=given.block_size,
                num_layers=num_layers,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                layout="mock",
                page_bytes=page_bytes,
                weights=weights,
            )
            if given.kv_transfer_config
            else None,
        )


def weights_of(folder: Path) -> str:
    """Digest of the names, sizes and times of a model's files of weights."""
    files = sorted((folder, *folder.glob("*.safetensors")))
    stats = [(path.name, path.stat()) for path in files if path.is_file()]
    told = [(name, one.st_size, one.st_mtime_ns) for name, one in stats]
    return f"{zlib.crc32(f'{folder} {told}'.encode()):08x}"


def _parsed(argv: Sequence[str]) -> Any:
    """vLLM's options that matter; others may stand beside them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=_BLOCK_TOKENS)
    parser.add_argument("--max-num-seqs", type=int, default=_MAX_RUNNING)
    parser.add_argument("--max-num-batched-tokens", type=int, default=_MAX_STEP_TOKENS)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--kv-transfer-config", default="")
    known, _ = parser.parse_known_args(list(argv))
    return known
