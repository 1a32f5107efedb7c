"""``banaserve bench overlap``: what moved layers bring when host and guest compute at once.

One engine on one core moves layers to a guest on another, which is idle else. Prompts are prefilled
and batches decode with all layers at home, with ranges away and waited for, and with the same
ranges away and steps in parts; then by vLLM's own pipeline of two stages, on the same two cores.
A second engine serves streams of its own on the guest's core, for several shares of it that
the guest may take. With --pace: of two instances of a server, in the time of a modelled GPU.
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

from banaserve import models
from banaserve.arguments import Parser, positive
from banaserve.bench import overlap_figures as figures
from banaserve.bench import overlap_neighbour, overlap_paced, result
from banaserve.bench.servers import end_on_sigterm
from banaserve.bench.told_engine import ToldEngine, told_engine
from banaserve.config import LEAST_GUEST_SHARE, MOST_STEP_PARTS
from banaserve.errors import UserError

_NUM_LAYERS = 30
_FIRST_TOKEN, _LAST_TOKEN = 100, 40_000
_WAITING = 1
_WARM_PROMPT_TOKENS, _WARM_TOKENS = 512, 4
_FED_TOKENS = 512
"""Of the prompts that keep a guest busy: short, so that the last one soon ends."""
_OWN_STREAMS, _OWN_PROMPT_TOKENS = 4, 64


_NOTES = [
    "one engine of SmolLM2 with one thread on one core; the last LAYERS of its 30 layers "
    "run in a guest with one thread on another core",
    "gains: time with all layers at home against time so, for the same prompts",
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
    """Run it and write the result, each time there is more of it; the exit code."""
    given = _parse(argv)
    end_on_sigterm()
    if given.pace is not None:
        result.deliver(overlap_paced.run(given), given.json)
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="banaserve bench overlap", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=positive, default=5)
    add("--pace", metavar="PROFILE", help="paced engines: all seconds are those of this model")
    add("--dilate", type=float, default=4.0, metavar="N", help="of a modelled second")
    add(
        "--layers", type=int, nargs="+", help="that are away: 5 10 15 of 30; with --pace of its own"
    )
    add("--parts", type=int, default=32, help="of a step, at most")
    add("--requests", type=positive, default=4, help="of the load of prompts")
    add("--prompt-tokens", type=int, default=2000)
    add("--long-prompt-tokens", type=int, default=4000, help="of the one whose first token counts")
    add("--batches", type=int, nargs="*", default=[1, 8, 32], help="that decode")
    add("--batch-prompt-tokens", type=positive, default=64, help="of each request of a batch")
    add("--output-tokens", type=int, default=48, help="of each request of a batch that decodes")
    add("--step-tokens", type=int, default=2048, help="that a step has at most")
    add("--stage-step-tokens", type=int, default=512, help="the same of vLLM's own pipeline")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--no-stages", action="store_true", help="without vLLM's own pipeline")
    add("--shares", type=float, nargs="*", default=[1.0, 0.5, 0.25], help="that the guest may take")
    add("--own-tokens", type=positive, default=96, help="of each stream on the guest's core")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if given.dilate <= 0:
        raise UserError(f"--dilate {given.dilate:g}: give more than 0")
    if given.pace is None and given.layers is None:
        given.layers = [5, 10, 15]
    if given.pace is None and not all(0 < layers < _NUM_LAYERS for layers in given.layers):
        raise UserError(f"--layers: between 1 and {_NUM_LAYERS - 1} of them can be away")
    if not 1 < given.parts <= MOST_STEP_PARTS:
        raise UserError(f"--parts {given.parts}: 2 to {MOST_STEP_PARTS} parts of a step")
    if not all(LEAST_GUEST_SHARE <= share <= 1 for share in given.shares):
        raise UserError(f"--shares: {LEAST_GUEST_SHARE:g} to 1 of a core")
    return given


def _loads(given: argparse.Namespace) -> list[figures.Load]:
    return [
        figures.Load("prefill", "prefill_gain", given.requests, given.prompt_tokens, 16),
        figures.Load("ttft", "ttft_gain", 1, given.long_prompt_tokens, 1),
        *(
            figures.Load(
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
    """One run of the benchmark, in an order that has what counts most first.

    Args:
        advance: Told what has been served.
    """

    def __init__(
        self, given: argparse.Namespace, started_at: datetime, model: str, advance: Any
    ) -> None:
        draws = random.Random(given.seed)
        self._given = given
        self._started_at = started_at
        self._model = model
        self._advance = advance
        self._loads = _loads(given)
        self._rounds = [
            {load.name: _prompts(draws, load) for load in self._loads} for _ in range(given.runs)
        ]
        self._streams = _streams(draws, given)
        self._samples: figures.Samples = {}
        self._raw: dict[str, Any] = {}

    def run(self) -> Iterator[result.Result]:
        """What has been found so far, again and again; the last one is all of it."""
        given = self._given
        with _engine(self._model, "live", given) as engine:
            (home,) = self._passes(engine, (None,))
            self._raw["home"] = {"seconds": home.seconds}
            most, *fewer = sorted(given.layers, reverse=True)
            self._away(engine, most, home)
            self._samples |= figures.headlines(self._samples, most)
            yield self._result("stopped before vLLM's own pipeline")
            if not given.no_stages:
                self._stages(home)
                yield self._result("stopped before the guest's share was bounded")
            if given.shares:
                self._shared(engine)
            for layers in fewer:
                yield self._result(f"stopped before {layers} layers were away")
                self._away(engine, layers, home)
        yield self._result()

    def _away(self, engine: ToldEngine, layers: int, home: figures.Times) -> None:
        """With so many layers in a guest: waited for and in parts, one right after the other."""
        loads, name = self._loads, f"layers_{layers}"
        engine.tell(do="away", layers=[_NUM_LAYERS - layers, _NUM_LAYERS])
        waiting, times = self._passes(engine, (_WAITING, self._given.parts), home)
        self._samples |= figures.gains(f"{name}.waiting", loads, home, waiting)
        self._samples |= figures.gains(f"{name}.overlap", loads, home, times)
        self._samples |= figures.beside_waiting(f"{name}.overlap", loads, waiting, times)
        self._raw[name] = engine.tell(do="status")["overlap"] | {
            "seconds_waiting": waiting.seconds,
            "seconds": times.seconds,
        }

    def _stages(self, home: figures.Times) -> None:
        with _engine(self._model, "stages", self._given) as engine:
            (times,) = self._passes(engine, (None,), home)
        self._samples |= figures.gains("stages", self._loads, home, times)
        self._raw["stages"] = {"seconds": times.seconds}

    def _passes(
        self,
        engine: ToldEngine,
        each_parts: Sequence[int | None],
        home: figures.Times | None = None,
    ) -> list[figures.Times]:
        """Serve every load once a round, behind one that warms up and teaches.

        Args:
            each_parts: Of a step at most, one after the other for each load; None leaves it.
        """
        for parts in each_parts:
            _allow(engine, parts)
            for load in self._loads:
                prompts = [prompt[:_WARM_PROMPT_TOKENS] for prompt in self._rounds[0][load.name]]
                engine.tell(do="run", prompts=prompts, tokens=_WARM_TOKENS)
        found = [figures.Times.of(self._loads) for _ in each_parts]
        for number in range(len(self._rounds)):
            for load in self._loads:
                for parts, times in zip(each_parts, found, strict=True):
                    _allow(engine, parts)
                    self._serve(engine, number, load, times, home)
        return found

    def _serve(
        self,
        engine: ToldEngine,
        number: int,
        load: figures.Load,
        times: figures.Times,
        home: figures.Times | None,
    ) -> None:
        name, before = load.name, engine.tell(do="sums")
        prompts = self._rounds[number][name]
        answer = engine.tell(do="run", prompts=prompts, tokens=load.output_tokens)
        after = engine.tell(do="sums")
        self._advance(name)
        times.seconds[name].append(answer["seconds"])
        times.tokens[name].append(answer["tokens"])
        times.sums_s[name].append({what: after[what] - before[what] for what in after})
        same = home is None or home.tokens[name][number] == answer["tokens"]
        times.equal[name].append(float(same))

    def _shared(self, engine: ToldEngine) -> None:
        """Beside an engine on the guest's core, for each share; then without a bound again."""
        with _engine(self._model, "neighbour", self._given) as neighbour:
            for share in self._given.shares:
                engine.tell(do="share", fraction=share)
                runs = []
                for _ in range(self._given.runs):
                    runs.append(overlap_neighbour.beside(engine, neighbour, self._streams))
                    self._advance(f"share {share:g}")
                self._samples |= figures.sharing(f"share_{share:g}", runs)
        engine.tell(do="share", fraction=1.0)

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


def _allow(engine: ToldEngine, parts: int | None) -> None:
    if parts is not None:
        engine.tell(do="overlap", parts=parts)


def _streams(draws: random.Random, given: argparse.Namespace) -> overlap_neighbour.Streams:
    fed = _prompts(draws, figures.Load("fed", "", 8, _FED_TOKENS, 1))
    own = _prompts(
        draws, figures.Load("own", "", _OWN_STREAMS, _OWN_PROMPT_TOKENS, given.own_tokens)
    )
    return overlap_neighbour.Streams(fed, own, given.own_tokens)


def _prompts(draws: random.Random, load: figures.Load) -> list[list[int]]:
    return [
        [draws.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(load.prompt_tokens)]
        for _ in range(load.num_requests)
    ]


def _advancing(progress: Progress, given: argparse.Namespace) -> Any:
    passes = 1 + 2 * len(given.layers) + (not given.no_stages)
    total = given.runs * (passes * len(_loads(given)) + len(given.shares))
    task = progress.add_task("starting", total=total)
    return lambda what: progress.update(task, description=what, advance=1)


@contextlib.contextmanager
def _engine(model_path: str, kind: str, given: argparse.Namespace) -> Iterator[ToldEngine]:
    step_tokens = given.stage_step_tokens if kind == "stages" else given.step_tokens
    arguments = {"dtype": given.dtype, "max_num_batched_tokens": step_tokens}
    module = "banaserve.engine.vllm.overlapped"
    with told_engine(module, model_path, kind, json.dumps(arguments)) as engine:
        yield engine
