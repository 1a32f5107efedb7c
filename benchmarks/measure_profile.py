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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from banaserve.base import models
from banaserve.contracts.environment import set_environment
from banaserve.orchestrator.control.costs.profile import DecodeSection, PrefillSection
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


@dataclass(frozen=True)
class MeasuredStep:
    """A kind of step and its measured times, one for each run."""

    tokens: int
    batch: int
    context: int
    seconds: tuple[float, ...]

    @property
    def took_s(self) -> float:
        return median(list(self.seconds))


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


def fitted(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return positive coefficients of the least relative error; negative ones are left out."""
    wanted = np.asarray(seconds)
    rows = np.asarray(features, dtype=float) / wanted[:, None]
    kept = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept], np.ones(len(wanted)), rcond=None)
        if (found > 0).all():
            break
        kept.pop(int(np.argmin(found)))
    whole = [1e-12] * rows.shape[1]
    for place, value in zip(kept, found, strict=True):
        whole[place] = float(value)
    return whole


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
    prefill, decode = fits(steps)
    errors = {kind: error_of(steps[kind], prefill, decode) for kind in steps}
    (given.out / f"{NAME}.toml").write_text(written(prefill, decode, errors))
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


def fits(steps: dict[str, list[MeasuredStep]]) -> tuple[PrefillSection, DecodeSection]:
    """Return the coefficients of prefill and decode."""
    prompts, batches = steps["prefill"], steps["decode"]
    prefill = fitted([(1, s.tokens, s.tokens**2) for s in prompts], [s.took_s for s in prompts])
    decode = fitted(
        [(1, s.batch * s.context, s.batch) for s in batches], [s.took_s for s in batches]
    )
    return PrefillSection(*prefill), DecodeSection(*decode)  # type: ignore[arg-type]


def error_of(
    steps: Sequence[MeasuredStep], prefill: PrefillSection, decode: DecodeSection
) -> list[float]:
    """Return the relative error of each step; a mixed step has the larger fixed part once."""
    errors = []
    for step in steps:
        work_s = step.tokens * prefill.token_s + step.tokens**2 * prefill.pair_s
        work_s += step.batch * (step.context * decode.context_token_s + decode.request_s)
        fixed_s = max(
            prefill.fixed_s if step.tokens else 0.0, decode.fixed_s if step.batch else 0.0
        )
        errors.append(abs(fixed_s + work_s - step.took_s) / step.took_s)
    return errors


def written(prefill: PrefillSection, decode: DecodeSection, errors: dict[str, list[float]]) -> str:
    """Return the profile as the text of a file."""
    worst = ", ".join(f"{kind} {max(found):.0%}" for kind, found in errors.items())
    here = machine()
    return f"""\
# SmolLM2-135M in float32 on one thread of a {here.cpu_model} ({here.num_cores} cores), with
# vLLM. Written by benchmarks/measure_profile.py from steps measured there. Largest error of a kind
# of step: {worst} (mixed ones were not fitted).

name = "{NAME}"
source = "measured: SmolLM2-135M, float32, one thread, benchmarks/measure_profile.py"

[model]
num_layers = 30
hidden_size = 576
num_heads = 9
num_kv_heads = 3
# 2 h^2 + 2 h k + 3 h m + 2 h with h = 576, k = 192, m = 1536
layer_weights = 3_540_096
# Embeddings, 49152 x 576, tied to the output head
fixed_weights = 28_311_552
max_context_tokens = {MAX_CONTEXT}
element_bytes = 4

[prefill]
fixed_s = {prefill.fixed_s:.4g}
token_s = {prefill.token_s:.4g}
pair_s = {prefill.pair_s:.4g}

[decode.small]
fixed_s = {decode.fixed_s:.4g}
context_token_s = {decode.context_token_s:.4g}
request_s = {decode.request_s:.4g}

# 768 MiB of KV, {KV_BYTES // 46_080 // 16 * 16} tokens of 46,080 bytes.
[memory]
kv_tokens = {KV_BYTES // 46_080 // 16 * 16}
block_tokens = 16

# Measured with the store and with live migration on such a machine, in round numbers
# (benchmarks/results/kvstore.json, store_get_gb_per_s; benchmarks/LOG.md).
[link]
bytes_per_s = 3.2e9
sync_s = 3e-3
hop_s = 0.4e-3
"""
