"""Gain from moved layers when host and guest compute at once.

``python -m benchmarks overlap``. One engine on one core moves layers to a guest on another core,
which is otherwise idle. Prompts are prefilled and batches decode with all layers at home, with
ranges away while the host waits, and with the same ranges away and steps in parts; then by vLLM's
own pipeline of two stages, on the same two cores. A second engine serves streams of its own on the
guest's core, for several shares of the core that the guest may take. With --pace: two instances of
a server, in the time of a modelled GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import Progress

from banaserve.base import models
from banaserve.base.arguments import Parser, positive
from banaserve.base.config import LEAST_GUEST_SHARE, MAX_MICROBATCHES
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.servers import end_on_sigterm
from banaserve_bench.results import result
from benchmarks.drivers.driven_engine import DrivenEngine, driven_engine
from benchmarks.overlap import figures as figures
from benchmarks.overlap import neighbour as overlap_neighbour
from benchmarks.overlap import paced
from benchmarks.overlap.rounds import OverlapRounds, draw_prompts

_NUM_LAYERS = 30
_FED_TOKENS = 512
"""Tokens of the prompts that keep a guest busy: short, so that the last one soon ends."""
_OWN_STREAMS, _OWN_PROMPT_TOKENS = 4, 64


_NOTES = [
    "one engine of SmolLM2 with one thread on one core; the last LAYERS of its 30 layers "
    "run in a guest with one thread on another core",
    "gains: time with all layers at home against time so, for the same prompts in the same round",
    "prefill: prompts that come at once, 16 tokens out; ttft: one prompt, one token out; "
    "decode_BATCH: requests with few tokens in",
    "waiting: the host waits for its guest; overlap: steps in parts; stages: vLLM's "
    "pipeline parallelism, 15 and 15 layers, which overlaps steps and so has smaller ones",
    "gain_over_waiting: against waiting for the guest; gain_predicted: what the engine "
    "predicted of that, for a step's layers alone",
    "prediction_error: mean error of the predicted time of a step's layers, each step "
    "weighted by its time; without a prefix: with most layers away",
    "share_S: a second engine decodes four streams on the guest's core, whose share of it "
    "is bounded by S, while prompts of 512 tokens keep the guest busy; slow_down: against "
    "the same streams while the guest rests; slow_down_predicted: 1 / (1 - guest_busy)",
    "equal_answers: whether all tokens are those with all layers at home; random prompts "
    "in bfloat16 have logits that tie",
]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, writing the result as it grows; return the exit code."""
    given = parse(argv)
    end_on_sigterm()
    if given.pace is not None:
        result.deliver(paced.run(given), given.json)
        return 0
    model = models.resolve(models.PACKAGED, None, lambda line: print(line, flush=True))
    with Progress(transient=True) as progress:
        measuring = _Measuring(
            given, datetime.now(UTC), model.path_or_id, _advancing(progress, given)
        )
        for record in measuring.run():
            if given.json is not None:
                result.write(record, given.json)
    result.deliver(record, given.json)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with those that others imply filled in."""
    parser = Parser(prog="python -m benchmarks overlap", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=positive, default=3, help="of everything: some twelve minutes each")
    add("--pace", metavar="PROFILE", help="paced engines: all seconds are those of this model")
    add("--dilate", type=float, default=4.0, metavar="N", help="of a modelled second")
    add(
        "--layers", type=int, nargs="+", help="that are away: 5 10 15 of 30; with --pace of its own"
    )
    add("--parts", type=int, default=32, help="of a step, at most")
    add("--requests", type=positive, default=2, help="of the load of prompts")
    add("--prompt-tokens", type=int, default=2000)
    add("--long-prompt-tokens", type=int, default=4000, help="of the one whose first token counts")
    add("--batches", type=int, nargs="*", default=[1, 8, 32], help="that decode")
    add("--batch-prompt-tokens", type=positive, default=16, help="of each request of a batch")
    add("--output-tokens", type=int, default=32, help="of each request of a batch that decodes")
    add("--step-tokens", type=int, default=2048, help="that a step has at most")
    add("--stage-step-tokens", type=int, default=512, help="the same of vLLM's own pipeline")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--no-stages", action="store_true", help="without vLLM's own pipeline")
    add("--shares", type=float, nargs="*", default=[1.0, 0.5, 0.25], help="that the guest may take")
    add("--own-tokens", type=positive, default=48, help="of each stream on the guest's core")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if given.dilate <= 0:
        raise UserError(f"--dilate {given.dilate:g}: give more than 0")
    if given.pace is None and given.layers is None:
        given.layers = [5, 10, 15]
    if given.pace is None and not all(0 < layers < _NUM_LAYERS for layers in given.layers):
        raise UserError(f"--layers: between 1 and {_NUM_LAYERS - 1} of them can be away")
    if not 1 < given.parts <= MAX_MICROBATCHES:
        raise UserError(f"--parts {given.parts}: 2 to {MAX_MICROBATCHES} parts of a step")
    if not all(LEAST_GUEST_SHARE <= share <= 1 for share in given.shares):
        raise UserError(f"--shares: {LEAST_GUEST_SHARE:g} to 1 of a core")
    return given


def loads_of(given: argparse.Namespace) -> list[figures.OverlapLoad]:
    """Return the loads that each arrangement is measured under."""
    return [
        figures.OverlapLoad("prefill", "prefill_gain", given.requests, given.prompt_tokens, 16),
        figures.OverlapLoad("ttft", "ttft_gain", 1, given.long_prompt_tokens, 1),
        *(
            figures.OverlapLoad(
                f"decode_{batch}",
                f"decode_gain_{batch}",
                batch,
                given.batch_prompt_tokens,
                given.output_tokens,
            )
            for batch in given.batches
        ),
    ]


class _Measuring:
    """A run of the benchmark.

    Args:
        advance: Callback with the name of what has been served.
    """

    def __init__(
        self, given: argparse.Namespace, started_at: datetime, model: str, advance: Any
    ) -> None:
        self._given = given
        self._started_at = started_at
        self._model = model
        self._advance = advance
        self._samples: figures.Samples = {}
        self._raw: dict[str, Any] = {}

    def run(self) -> Iterator[result.Result]:
        """Yield intermediate results; the last one is complete."""
        given, draws = self._given, random.Random(self._given.seed)
        loads = loads_of(given)
        prompts = [
            {load.name: draw_prompts(draws, load) for load in loads} for _ in range(given.runs)
        ]
        with contextlib.ExitStack() as stack:
            live = stack.enter_context(_engine(self._model, "live", given))
            stages = (
                None
                if given.no_stages
                else stack.enter_context(_engine(self._model, "stages", given))
            )
            rounds = OverlapRounds(
                live,
                stages,
                _NUM_LAYERS,
                given.layers,
                given.parts,
                given.step_tokens,
                loads,
                prompts,
                self._advance,
            )
            for number in rounds.run():
                self._samples, self._raw = rounds.samples(), rounds.raw()
                yield self._result(f"stopped after {number} of {given.runs} rounds")
            if given.shares:
                rounds.send_away(max(given.layers))
                self._shared(live, _streams(draws, given))
        yield self._result()

    def _shared(self, engine: DrivenEngine, streams: overlap_neighbour.Streams) -> None:
        """Measure an engine on the guest's core, for each share of the guest."""
        with _engine(self._model, "neighbour", self._given) as neighbour:
            for share in self._given.shares:
                engine.tell(do="share", fraction=share)
                runs = []
                for _ in range(self._given.runs):
                    runs.append(overlap_neighbour.beside(engine, neighbour, streams))
                    self._advance(f"share {share:g}")
                self._samples |= figures.sharing(f"share_{share:g}", runs)

    def _result(self, stopped: str = "") -> result.Result:
        given = self._given
        return result.result(
            "overlap",
            seed=given.seed,
            options={name: str(value) for name, value in vars(given).items() if name != "json"},
            started_at=self._started_at,
            figures={name: result.figure(*sample) for name, sample in self._samples.items()},
            notes=([stopped] if stopped else []) + _NOTES,
            raw=self._raw,
        )


def _streams(draws: random.Random, given: argparse.Namespace) -> overlap_neighbour.Streams:
    fed = draw_prompts(draws, figures.OverlapLoad("fed", "", 8, _FED_TOKENS, 1))
    own = draw_prompts(
        draws, figures.OverlapLoad("own", "", _OWN_STREAMS, _OWN_PROMPT_TOKENS, given.own_tokens)
    )
    return overlap_neighbour.Streams(fed, own, given.own_tokens)


def _advancing(progress: Progress, given: argparse.Namespace) -> Any:
    places = 1 + 2 * len(given.layers) + (not given.no_stages)
    total = given.runs * (places * len(loads_of(given)) + len(given.shares))
    task = progress.add_task("starting", total=total)
    return lambda what: progress.update(task, description=what, advance=1)


@contextlib.contextmanager
def _engine(model_path: str, kind: str, given: argparse.Namespace) -> Iterator[DrivenEngine]:
    step_tokens = given.stage_step_tokens if kind == "stages" else given.step_tokens
    arguments = {"dtype": given.dtype, "max_num_batched_tokens": step_tokens}
    module = "benchmarks.drivers.overlapped"
    with driven_engine(module, model_path, kind, json.dumps(arguments)) as engine:
        yield engine
