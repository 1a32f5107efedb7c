"""Step times of a real engine on this machine, fitted to a profile for simulator and pacing.

``python -m benchmarks measure-profile [--out FOLDER] [--json FILE]``. One engine of SmolLM2-135M on
one thread is stepped by hand: prompts of several lengths alone, and batches that decode with
several contexts. Two least-squares fits of the relative error give the coefficients; mixed steps,
which are in no fit, show how accurate they are.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from banaserve.base import models
from banaserve.contracts.environment import set_environment
from banaserve.orchestrator.control.costs.profile import MemorySection, ModelSection, Profile
from banaserve.orchestrator.control.model.moving import Link
from banaserve_bench.plan.probe.fit import MeasuredStep, StepFit
from banaserve_bench.plan.probe.profile_file import profile_text
from banaserve_bench.results.result import machine
from banaserve_bench.results.statistics import median
from benchmarks.measurement import Measurement, model_of, parser_of

NAME = "smollm2-135m-cpu"
KV_BYTES = 768 << 20
STEP_TOKENS = 2048
MAX_CONTEXT = 8192
PROMPTS = (16, 64, 128, 256, 512, 1024, 1536, 2048)
DECODES = (
    (1, 16),
    (1, 512),
    (1, 2000),
    (4, 128),
    (8, 64),
    (8, 512),
    (16, 64),
    (16, 512),
    (32, 256),
)
"""Number of decoding requests, and the context of each."""
MIXED = ((4, 64, 256), (8, 128, 512), (16, 256, 1024))
"""Number of decoding requests, the context of each, and prompt tokens of the same step."""
PREFILL_STEPS, DECODE_STEPS = 3, 12


class Stepped:
    """An engine whose steps are taken one by one."""

    def __init__(self, model: str, seed: int) -> None:
        from banaserve.engine.compat.runner.offline import LLM

        self._engine: Any = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=MAX_CONTEXT,
            kv_cache_memory_bytes=KV_BYTES,
            disable_log_stats=True,
        ).llm_engine
        self._draws = random.Random(seed)
        self._count = 0

    def prefill_s(self, tokens: int) -> float:
        """Return the median time of steps that compute a prompt and end its request."""
        taken_s = []
        for _ in range(PREFILL_STEPS):
            self._ask(tokens, 1)
            taken_s.append(self._step())
        self._finish()
        return median(taken_s)

    def decode_s(self, batch: int, context: int, more_prompt: int = 0) -> float:
        """Return the median time of steps that decode ``batch`` requests of ``context`` tokens.

        Args:
            more_prompt: Prompt tokens that the step computes too; if not 0, only one step is timed.
        """
        for _ in range(batch):
            # Half of the steps are before the wanted context, half after it.
            self._ask(max(1, context - DECODE_STEPS // 2), 4 * DECODE_STEPS + batch)
        while self._is_prefilling(batch):
            self._step()
        self._step()
        if more_prompt:
            self._ask(more_prompt, 1)
            took_s = self._step()
        else:
            took_s = median([self._step() for _ in range(DECODE_STEPS)])
        self._finish()
        return took_s

    def _ask(self, tokens: int, output: int) -> None:
        from banaserve.engine.compat.runner.offline import SamplingParams

        prompt = self._draws.choices(range(100, 40_000), k=tokens)
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self._count += 1
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)

    def _is_prefilling(self, batch: int) -> bool:
        from banaserve.engine.compat.runner.offline import running_requests

        running = running_requests(self._engine)
        decoding = [r for r in running if r.num_computed_tokens >= r.num_prompt_tokens]
        return len(decoding) < batch

    def _step(self) -> float:
        began_s = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began_s

    def _finish(self) -> None:
        self._engine.abort_request([str(n) for n in range(1, self._count + 1)])
        while self._engine.has_unfinished_requests():
            self._engine.step()


def main(argv: Sequence[str]) -> int:
    """Measure the steps and write profile and result; return the exit code."""
    parser = parser_of("measure-profile", __doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("banaserve/orchestrator/control/costs/profiles")
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    given.out.mkdir(parents=True, exist_ok=True)
    measurement = Measurement("measure-profile", given)
    os.environ["OMP_NUM_THREADS"] = "1"
    set_environment()
    model = model_of(models.PACKAGED)
    steps = measured(Stepped(model.path_or_id, given.seed), given.runs)
    fit = StepFit.of(steps["prefill"], steps["decode"])
    errors = {kind: fit.errors_of(found) for kind, found in steps.items()}
    (given.out / f"{NAME}.toml").write_text(written(fit, errors))
    figures = {f"error_{kind}": (found, "fraction") for kind, found in errors.items()}
    notes = ["error: |profile - measured| / measured, a sample for each kind of step"]
    raw = {kind: [asdict(step) for step in found] for kind, found in steps.items()}
    measurement.deliver(measurement.result(figures, notes, raw=raw))
    return 0


def measured(engine: Stepped, runs: int) -> dict[str, list[MeasuredStep]]:
    """Return steps by kind; each round measures all, so that a slow moment affects one of each."""
    engine.prefill_s(512)
    engine.decode_s(4, 64)
    prefill: list[list[float]] = [[] for _ in PROMPTS]
    decode: list[list[float]] = [[] for _ in DECODES]
    mixed: list[list[float]] = [[] for _ in MIXED]
    for _ in range(runs):
        for place, tokens in enumerate(PROMPTS):
            prefill[place].append(engine.prefill_s(tokens))
        for place, (batch, context) in enumerate(DECODES):
            decode[place].append(engine.decode_s(batch, context))
        for place, (batch, context, tokens) in enumerate(MIXED):
            mixed[place].append(engine.decode_s(batch, context, tokens))
    return {
        "prefill": [MeasuredStep(n, 0, 0, tuple(s)) for n, s in zip(PROMPTS, prefill, strict=True)],
        "decode": [
            MeasuredStep(0, b, c, tuple(s)) for (b, c), s in zip(DECODES, decode, strict=True)
        ],
        "mixed": [
            MeasuredStep(n, b, c, tuple(s)) for (b, c, n), s in zip(MIXED, mixed, strict=True)
        ],
    }


def written(fit: StepFit, errors: dict[str, list[float]]) -> str:
    """Return the profile as the text of a file."""
    worst = ", ".join(f"{kind} {max(found):.0%}" for kind, found in errors.items())
    here = machine()
    profile = Profile(
        NAME,
        "measured: SmolLM2-135M, float32, one thread, benchmarks/measure_profile.py",
        ModelSection(
            num_layers=30,
            hidden_size=576,
            num_heads=9,
            num_kv_heads=3,
            # 2 h^2 + 2 h k + 3 h m + 2 h with h = 576, k = 192, m = 1536
            layer_weights=3_540_096,
            # Embeddings, 49152 x 576, tied to the output head
            fixed_weights=28_311_552,
            max_context_tokens=MAX_CONTEXT,
            element_bytes=4,
        ),
        fit.prefill,
        fit.decode,
        None,
        MemorySection(KV_BYTES // 46_080 // 16 * 16),
        # Measured with the store and with live migration on such a machine, in round numbers
        # (benchmarks/results/kvstore.json, store_get_gb_per_s; benchmarks/LOG.md).
        Link(bytes_per_s=3.2e9, sync_s=3e-3, hop_s=0.4e-3),
    )
    about = (
        f"SmolLM2-135M in float32 on one thread of a {here.cpu_model} ({here.num_cores} cores),",
        "with vLLM. Written by benchmarks/measure_profile.py from steps measured there. Largest",
        f"error of a kind of step: {worst} (mixed ones were not fitted).",
        f"Memory: {KV_BYTES >> 20} MiB of KV, 46,080 bytes a token. Link: the store and live",
        "migration on such a machine, in round numbers.",
    )
    return profile_text(profile, about)
