"""One vLLM engine, nothing of banaserve: what every other arrangement must answer.

Usage: python reference_tokens.py JOB.json OUT.json, with JOB = {model, prompts, samplings,
dtype, alone, custom_ops, adapter, prefix_caching, options}. Each sampling is run over all prompts,
one after the other where they are to be alone; OUT = {name: [[token, ...], ...]}. Of several
sequences the tokens follow one another. It ends with 3 where vLLM has not made the engine.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)
REFUSED = 3


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    job = json.loads(Path(sys.argv[1]).read_text())
    arguments = {
        "model": job["model"],
        "dtype": job["dtype"],
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2 << 30,
        "max_num_batched_tokens": 8192,
        "distributed_executor_backend": "uni",
        "compilation_config": {"custom_ops": job["custom_ops"]},
        "enable_lora": bool(job["adapter"]),
        **({} if job["prefix_caching"] else {"enable_prefix_caching": False}),
        **job["options"],
    }
    try:
        engine = LLM(**arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(REFUSED)
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    answers = {}
    for name, sampling in job["samplings"].items():
        if "structured_outputs" in sampling:
            grammar = StructuredOutputsParams(**sampling["structured_outputs"])
            sampling = {**sampling, "structured_outputs": grammar}
        together = [[prompt] for prompt in prompts] if job["alone"] else [prompts]
        # The first sampling warms the prefix cache, so that later ones compute a few tokens a
        # prompt and none is cut into chunks: a plain engine on CPU ends where a seeded one is.
        outputs = [
            output
            for some in together
            for output in engine.generate(
                some, SamplingParams(**sampling), use_tqdm=False, lora_request=adapter
            )
        ]
        answers[name] = [
            [token for one in output.outputs for token in one.token_ids] for output in outputs
        ]
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
