"""``banaserve bench overlap``: what moved layers bring when host and guest compute at once.

One engine on one core moves layers to a guest on another, which is idle else. Prompts are prefilled
and batches decode with all layers at home, with ranges away and waited for, and with the same
ranges away and steps in parts; then by vLLM's own pipeline of two stages, on the same two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from banaserve import models
from banaserve.arguments import Parser, positive
from banaserve.bench import result
from banaserve.bench.servers import end_on_sigterm
from banaserve.bench.told_engine import ToldEngine, told_engine
from banaserve.errors import UserError

_NUM_LAYERS = 30
_FIRST_TOKEN, _LAST_TOKEN = 100, 40_000
_WAITING = 1


class _Load(NamedTuple):
    """What is served at once.

    Attributes:
        name: ``prefill``, ``ttft``, or ``decode_`` and the batch.
        gain: Of its figures.
    """

    name: str
    gain: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int


_Samples = dict[str, tuple[list[float], str]]


def main(argv: Sequence[str]) -> int:
    """Run it and write the result; the exit code."""
    given = _parse(argv)
    end_on_sigterm()
    record = _measure(given, datetime.now(UTC))
    result.deliver(record, given.json)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="banaserve bench overlap", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=positive, default=5)
    add("--layers", type=int, nargs="+", default=[5, 10, 15], help="that are away, of 30")
    add("--parts", type=int, default=32, help="of a step, at most")
    add("--requests", type=positive, default=4, help="of the load of prompts")
    add("--prompt-tokens", type=int, default=2000)
    add("--long-prompt-tokens", type=int, default=4000, help="of the one whose first token counts")
    add("--batches", type=int, nargs="*", default=[1, 8, 32], help="that decode")
    add("--output-tokens", type=int, default=48, help="of each request of a batch that decodes")
    add("--step-tokens", type=int, default=2048, help="that a step has at most")
    add("--stage-step-tokens", type=int, default=512, help="the same of vLLM's own pipeline")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--no-stages", action="store_true", help="without vLLM's own pipeline")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if not all(0 < layers < _NUM_LAYERS for layers in given.layers):
        raise UserError(f"--layers: between 1 and {_NUM_LAYERS - 1} of them can be away")
    return given


def _loads(given: argparse.Namespace) -> list[_Load]:
    return [
        _Load("prefill", "prefill_gain", given.requests, given.prompt_tokens, 16),
        _Load("ttft", "ttft_gain", 1, given.long_prompt_tokens, 1),
        *(
            _Load(f"decode_{batch}", f"decode_gain_{batch}", batch, 64, given.output_tokens)
            for batch in given.batches
        ),
    ]


def _measure(given: argparse.Namespace, started_at: datetime) -> result.Result:
    model = models.resolve(models.PACKAGED, None, lambda line: print(line, flush=True))
    draws = random.Random(given.seed)
    loads = _loads(given)
    rounds = [{load.name: _prompts(draws, load) for load in loads} for _ in range(given.runs)]
    samples: _Samples = {}
    raw: dict[str, Any] = {}
    with Progress(transient=True) as progress:
        advance = _advancing(progress, given, len(loads))
        with _engine(model.path_or_id, "live", given) as engine:
            home = _pass(engine, loads, rounds, advance)
            for layers in given.layers:
                engine.tell(do="away", layers=[_NUM_LAYERS - layers, _NUM_LAYERS])
                for parts in (_WAITING, given.parts):
                    engine.tell(do="overlap", parts=parts)
                    times = _pass(engine, loads, rounds, advance, home)
                    name = "waiting" if parts == _WAITING else "overlap"
                    samples |= _samples(f"layers_{layers}.{name}", loads, home, times)
                raw[f"layers_{layers}"] = facts = engine.tell(do="status")["overlap"]
                error = [float(facts["prediction_error"])]
                samples[f"layers_{layers}.prediction_error"] = error, "fraction"
        if not given.no_stages:
            with _engine(model.path_or_id, "stages", given) as engine:
                times = _pass(engine, loads, rounds, advance, home)
                samples |= _samples("stages", loads, home, times)
    return _result(given, started_at, samples, raw)


class _Times(NamedTuple):
    """Seconds and answers of each load, once a round."""

    seconds: dict[str, list[float]]
    tokens: dict[str, list[Any]]
    equal: dict[str, list[float]]


def _pass(
    engine: ToldEngine,
    loads: Sequence[_Load],
    rounds: Any,
    advance: Any,
    home: _Times | None = None,
) -> _Times:
    """Serve every load once a round, behind one that warms up and teaches."""
    names = [load.name for load in loads]
    found = _Times({n: [] for n in names}, {n: [] for n in names}, {n: [] for n in names})
    for number, prompts in enumerate([rounds[0], *rounds]):
        for load in loads:
            answer = engine.tell(do="run", prompts=prompts[load.name], tokens=load.output_tokens)
            advance(load.name)
            if number == 0:
                continue
            found.seconds[load.name].append(answer["seconds"])
            found.tokens[load.name].append(answer["tokens"])
            same = home is None or home.tokens[load.name][number - 1] == answer["tokens"]
            found.equal[load.name].append(float(same))
    return found


def _samples(name: str, loads: Sequence[_Load], home: _Times, times: _Times) -> _Samples:
    samples: _Samples = {}
    for load in loads:
        pairs = zip(home.seconds[load.name], times.seconds[load.name], strict=True)
        samples[f"{name}.{load.gain}"] = [ours / theirs for ours, theirs in pairs], "ratio"
    equal = [min(row) for row in zip(*times.equal.values(), strict=True)]
    samples[f"{name}.equal_answers"] = equal, "fraction"
    return samples


def _prompts(draws: random.Random, load: _Load) -> list[list[int]]:
    return [
        [draws.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(load.prompt_tokens)]
        for _ in range(load.num_requests)
    ]


def _advancing(progress: Progress, given: argparse.Namespace, num_loads: int) -> Any:
    passes = 1 + 2 * len(given.layers) + (not given.no_stages)
    task = progress.add_task("starting", total=passes * (given.runs + 1) * num_loads)
    return lambda what: progress.update(task, description=what, advance=1)


@contextlib.contextmanager
def _engine(model_path: str, kind: str, given: argparse.Namespace) -> Iterator[ToldEngine]:
    step_tokens = given.stage_step_tokens if kind == "stages" else given.step_tokens
    arguments = {"dtype": given.dtype, "max_num_batched_tokens": step_tokens}
    module = "banaserve.engine.vllm.overlapped"
    with told_engine(module, model_path, kind, json.dumps(arguments)) as engine:
        yield engine


def _result(
    given: argparse.Namespace, started_at: datetime, samples: _Samples, raw: dict[str, Any]
) -> result.Result:
    return result.result(
        "overlap",
        seed=given.seed,
        options={name: str(value) for name, value in vars(given).items() if name != "json"},
        started_at=started_at,
        figures={name: result.figure(*sample) for name, sample in samples.items()},
        notes=[
            "one engine of SmolLM2 with one thread on one core; the last LAYERS of its 30 layers "
            "run in a guest with one thread on another core",
            "gains: time with all layers at home against time so, for the same prompts",
            "prefill: prompts that come at once, 16 tokens out; ttft: one prompt, one token out; "
            "decode_BATCH: requests with 64 tokens in",
            "waiting: the host waits for its guest; overlap: steps in parts; stages: vLLM's "
            "pipeline parallelism, 15 and 15 layers, which overlaps steps and so has smaller ones",
            "prediction_error: of the time of a step's layers, smoothed over the last steps",
            "equal_answers: whether all tokens are those with all layers at home; random prompts "
            "in bfloat16 have logits that tie",
        ],
        raw=raw,
    )
