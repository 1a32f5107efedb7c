"""Engine that traces its transfers and gets its orders over stdin.

For ``bench pipeline``. Usage: ``python -m benchmarks.drivers.traced MODEL
SOCKET``. Each line of stdin is a JSON object:

- ``prompt``: token ids;
- ``way``: what happens to the prefix that the store has: ``fetch`` all (the default),
  ``compute`` all, or ``cut`` it as the cost gate decides;
- ``new_link``: true to forget first what the gate knows of fetches;
- any of ``CopyOptions`` of ``traced_connector``.

Each answer is a line of JSON: first facts about the engine, then for each prompt the trace of the
step that computed it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from banaserve.contracts.environment import set_environment
from banaserve.kvstore.client.cost_gate import FetchPredictor

_MAX_TOKENS = 4096
_KV_BYTES = 1 << 30
"""KV cache, in bytes, with room for one prompt of the largest model of ``random_model.SIZES``."""


def main() -> int:
    """Answer orders line by line until stdin ends; return the exit code."""
    model, socket = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    set_environment()
    from banaserve.engine.compat.kv_connector import get_kv_transfer_group
    from banaserve.engine.compat.runner.offline import LLM, SamplingParams, scheduler_connector
    from benchmarks.drivers.traced_connector import CopyOptions

    engine = LLM(model, **_engine_options(socket))
    connector: Any = get_kv_transfer_group()
    gate = scheduler_connector(engine.llm_engine).gate
    kind = connector.fingerprint
    greeting = {
        "block_size": kind.block_size_tokens,
        "num_layers": kind.num_layers,
        "page_bytes": kind.page_bytes,
    }
    print(json.dumps(greeting), file=replies, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        prompt: Any = {"prompt_token_ids": told.pop("prompt")}
        way = told.pop("way", "fetch")
        gate.enabled = way == "cut"
        if told.pop("new_link", False):
            gate.fetch = FetchPredictor()
        one_token = SamplingParams(
            max_tokens=1, temperature=0.0, skip_reading_prefix_cache=way == "compute"
        )
        connector.worker.options = CopyOptions(**told)
        connector.worker.traces.clear()
        engine.generate([prompt], one_token, use_tqdm=False)
        steps = [dataclasses.asdict(step) for step in connector.worker.traces]
        print(json.dumps({"steps": steps}), file=replies, flush=True)
    return 0


def _engine_options(socket: str) -> dict[str, Any]:
    # Nothing is cached in the engine itself, and a prompt is one step.
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": _KV_BYTES,
        "max_model_len": _MAX_TOKENS,
        "max_num_batched_tokens": _MAX_TOKENS,
        "max_num_seqs": 1,
        "distributed_executor_backend": "uni",
        "kv_transfer_config": {
            "kv_connector": "TracedConnector",
            "kv_connector_module_path": "benchmarks.drivers.traced_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"socket": socket, "cost_gate": False},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
