"""One vLLM engine that pools, nothing of banaserve.

Usage: python reference_embeddings.py JOB.json OUT.json, with JOB = {model, runner, texts};
OUT = [[number, ...], ...].
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)


def main() -> None:
    from vllm import LLM

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=job["model"],
        runner=job["runner"],
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="uni",
    )
    outputs = engine.embed(job["texts"], use_tqdm=False)
    Path(sys.argv[2]).write_text(json.dumps([output.outputs.embedding for output in outputs]))


if __name__ == "__main__":
    main()
