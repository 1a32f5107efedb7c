"""Second stage of the GPU report: plain vLLM with random weights, beside transformers.

``python -m benchmarks.gpu.smoke``. Each token of vLLM is judged after the same tokens by the
reference's scores. A token that the reference scores within ``NEAR_TIE`` of its best one, relative
to the largest score, is a near tie, which rounding in bfloat16 may decide either way; any other is
a fault.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.contracts.environment import set_environment
from benchmarks.gpu.device import NULL_GPU
from benchmarks.random_model import SIZES, make_model
from benchmarks.script import run_script

NEAR_TIE = 0.03
_PROMPT_LENGTHS = 7, 33, 250, 1000
_OUTPUT_TOKENS = 32


def main(argv: Sequence[str]) -> int:
    """Run the prompts twice and compare them; raise on a fault."""
    parser = Parser(prog="python -m benchmarks.gpu.smoke", description=__doc__)
    add = parser.add_argument
    add("--size", choices=sorted(SIZES), default="1b", help="of the random weights")
    add("--graphs", action="store_true", help="with CUDA graphs, as vLLM starts by default")
    add("--attention", default="", help="vLLM's attention backend")
    given = parser.parse_args(list(argv))
    set_environment()
    # In this process, so that an error shows where it arises.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    from banaserve.engine.compat.runner.offline import LLM, SamplingParams

    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        path = make_model(given.size, Path(folder), "bfloat16")
        chosen: dict[str, Any] = (
            {"attention_config": {"backend": given.attention}} if given.attention else {}
        )
        engine = LLM(
            path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            gpu_memory_utilization=0.4,
            enforce_eager=not given.graphs,
            enable_prefix_caching=False,
            seed=0,
            **chosen,
        )
        print("the engine is up", flush=True)
        draws = torch.Generator().manual_seed(1)
        prompts = [
            torch.randint(100, 40_000, (length,), generator=draws).tolist()
            for length in _PROMPT_LENGTHS
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
        first, again = (_answers(engine, prompts, sampling) for _ in range(2))
        print(f"two runs are {'equal' if first == again else 'not equal'}", flush=True)
        if os.environ.get(NULL_GPU):
            print("this GPU computes nothing: tokens are not compared")
        else:
            _compare(path, prompts, first)
    return 0


def _answers(engine: Any, prompts: Sequence[list[int]], sampling: Any) -> list[list[int]]:
    began_s = time.monotonic()
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(given, sampling, use_tqdm=False)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    took_s = time.monotonic() - began_s
    print(f"{sum(map(len, answers))} tokens in {took_s:.2f} s", flush=True)
    return answers


def _compare(path: str, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    equal = ties = faults = 0
    worst = 0.0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            given = torch.tensor([prompt + answer], device="cuda")
            scores = reference(given).logits[0, len(prompt) - 1 : -1].float()
            chosen = scores.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
            short = (scores.amax(1) - chosen) / scores.abs().amax(1)
            equal += int((short == 0).sum())
            ties += int(((short > 0) & (short <= NEAR_TIE)).sum())
            faults += int((short > NEAR_TIE).sum())
            worst = max(worst, float(short.max()))
    total = equal + ties + faults
    print(f"{equal} of {total} tokens are the reference's, {ties} near ties, {faults} faults")
    if faults:
        raise UserError(f"{faults} of {total} tokens are no near ties: up to {worst:.3f} off")


if __name__ == "__main__":
    run_script(main)
