"""One engine that keeps states, and whose fetches fail where a job says so; in one process.

Usage: python lost_states.py JOB.json OUT.json, with JOB = {model, store, rounds, max_tokens}: each
round is {prompts, fails}: whether its first fetches find their slots gone with a store that died.
OUT = [{tokens: [[token, ...], ...], loaded, lost}, ...]: blocks that were fetched and were not.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)


def main() -> None:
    from vllm import LLM, SamplingParams

    from banaserve.engine.compat.kv_connector import get_kv_transfer_group
    from banaserve.engine.compat.scheduler import install_states
    from banaserve.engine.connector.metadata import MappedCopies

    install_states()
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=96 << 20,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "banaserve.engine.connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": job["store"], "cost_gate": False},
        },
    )
    worker = get_kv_transfer_group().worker
    readable, fails, counts = worker._readable, False, {"loaded": 0, "lost": 0}

    def some_lost(copies: Any) -> MappedCopies:
        find = MappedCopies.of
        if fails:
            MappedCopies.of = classmethod(lambda *_: MappedCopies())
        try:
            found = readable(copies)
        finally:
            MappedCopies.of = find
        counts["loaded"] += len(found.copies)
        counts["lost"] += len(copies) - len(found.copies)
        return found

    worker._readable = some_lost
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    found = []
    for one in job["rounds"]:
        fails = one["fails"]
        counts.update(loaded=0, lost=0)
        prompts = [{"prompt_token_ids": tokens} for tokens in one["prompts"]]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        found.append({"tokens": tokens, **counts})
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
