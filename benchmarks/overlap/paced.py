"""Gain from moved layers in the time of a modelled GPU: ``bench overlap --pace``.

A prefill instance moves layers to a guest beside its decode instance and serves prompts; then the
decode instance moves as many to a guest beside the prefill instance, and batches decode. Engines,
migration and messages are real, and the time of their steps is the profile's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.progress import Progress

from banaserve.base.config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.base.run_dir import find_admin
from banaserve.contracts.migration_api import MigrationRequest, MoveLayers, OverlapRequest, Return
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.pacing import miniatures
from banaserve.pacing.pacer import in_parts
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.modelled_time import StretchedClock, modelled_time
from banaserve_bench.loadgen.servers import banaserve_server
from banaserve_bench.results import result
from banaserve_bench.results.result import ModelledTime
from benchmarks.overlap.figures import OverlapLoad, Samples

_TOKEN_IDS = (500, 40_000)
_WAITING = 1
_NOTES = [
    "time is modelled: engines, migration and messages are real, steps take the profile's time",
    "one prefill and one decode instance; LAYERS of the model's run in a guest beside the other "
    "instance: the prefill instance's for prefill and ttft, the decode instance's for decode",
    "gains: time with all layers at home against time so, for the same prompts",
    "waiting: the host waits for its guest; overlap: steps in parts, where the model says that "
    "it pays; step_gain_predicted: of one step of that load's, messages left out",
    "equal_answers: whether all tokens are those with all layers at home",
]


class Place(NamedTuple):
    """Placement of layers.

    Attributes:
        name: Name of the placement in figures; empty for all layers at home.
        own_layers: Number of layers away, of the miniature that really runs.
    """

    name: str
    own_layers: int
    parts: int


def run(given: argparse.Namespace) -> result.Result:
    """Run the benchmark on paced engines.

    Raises:
        UserError: Layers that the miniature cannot move, or a server that does not start.
    """
    profile = profiles.load(given.pace)
    places = places_of(given, profile)
    loads = [
        OverlapLoad("prefill", "prefill_gain", given.requests, given.prompt_tokens, 16),
        OverlapLoad("ttft", "ttft_gain", 1, given.prompt_tokens, 1),
    ]
    for n in given.batches:
        decode = OverlapLoad(
            f"decode_{n}", f"decode_gain_{n}", n, given.batch_prompt_tokens, given.output_tokens
        )
        loads.append(decode)
    with Progress(transient=True) as progress:
        task = progress.add_task("starting", total=len(places) * 2)
        measuring = _Measuring(
            given, profile, loads, lambda what: progress.update(task, description=what, advance=1)
        )
        return asyncio.run(measuring.run(places))


def places_of(given: argparse.Namespace, profile: Profile) -> list[Place]:
    """Return the arrangements of layers that are compared.

    Raises:
        UserError: The miniature cannot represent the requested layers.
    """
    shape = profile.model
    each = shape.num_layers // miniatures.of(profile).num_layers
    chosen = given.layers or [shape.num_layers // 4, shape.num_layers // 2]
    if wrong := [n for n in chosen if n % each or not 0 < n < shape.num_layers]:
        raise UserError(f"--layers {wrong[0]}: with --pace {given.pace} multiples of {each}")
    found = []
    for layers in sorted(chosen):
        found.append(Place(f"layers_{layers}.waiting", layers // each, _WAITING))
        found.append(Place(f"layers_{layers}.overlap", layers // each, given.parts))
    return found


class _Measuring:
    def __init__(
        self,
        given: argparse.Namespace,
        profile: Profile,
        loads: Sequence[OverlapLoad],
        advance: Any,
    ) -> None:
        self._given = given
        self._profile = profile
        self._loads = loads
        self._advance = advance
        self._started_at = datetime.now(UTC)
        self._prompts = _prompts(loads, given.runs, given.seed)
        self._samples: Samples = {}
        self._raw: dict[str, Any] = {}

    async def run(self, places: Sequence[Place]) -> result.Result:
        given = self._given
        options = [
            *("--pace", given.pace, "--dilate", str(given.dilate), "--pd", "1:1"),
            *("--migration", "on", "--orchestrator", "off"),
            *("--max-num-batched-tokens", str(given.step_tokens)),
        ]
        with TemporaryDirectory(prefix="bench-") as folder:
            run_dir = Path(folder) / "run"
            with banaserve_server(MINIATURE, *options, "--run-dir", str(run_dir)) as server:
                self._admin = AdminClient(*find_admin(run_dir))
                clock = StretchedClock(given.dilate)
                name = f"paced-{self._profile.name}"
                async with OpenAiClient(
                    server.url, name, return_token_ids=True, clock=clock
                ) as client:
                    self._client = client
                    await self._serve("warm-up", self._loads, 0)
                    for host, loads in (("p0", self._loads[:2]), ("d0", self._loads[2:])):
                        await self._of(host, loads, places)
                told = modelled_time(server.url)
        assert told is not None
        return self._result(told)

    async def _of(self, host: str, loads: Sequence[OverlapLoad], places: Sequence[Place]) -> None:
        """Measure everything that ``host`` serves, with its layers in each place."""
        home = [await self._serve("home", loads, number) for number in range(self._given.runs)]
        self._raw[f"{host}.home"] = [seconds for seconds, _ in home]
        for place in places:
            await self._move(host, place)
            equal = []
            for number, (home_s, answers) in enumerate(home):
                seconds, found = await self._serve(place.name, loads, number)
                equal.append(float(found == answers))
                for load in loads:
                    self._add(f"{place.name}.{load.gain}", home_s[load.name] / seconds[load.name])
                self._raw.setdefault(f"{host}.{place.name}", []).append(seconds)
            self._add(f"{place.name}.{host}.equal_answers", *equal, unit="fraction")
            for load in loads:
                self._predict(place, load)
            self._advance(place.name)
        await self._done(Return(host))

    async def _move(self, host: str, place: Place) -> None:
        """Move the last layers of ``host`` to the other instance, as ``place`` says."""
        if place.parts == _WAITING:
            await self._done(Return(host), may_be_home=True)
            other = "d0" if host == "p0" else "p0"
            last = miniatures.of(self._profile).num_layers
            await self._done(MoveLayers(host, other, (last - place.own_layers, last)))
        await asyncio.to_thread(self._admin.overlap, OverlapRequest(host, place.parts))

    async def _done(self, ask: MigrationRequest, *, may_be_home: bool = False) -> None:
        try:
            migration = await asyncio.to_thread(self._admin.run, ask)
        except UserError:
            if may_be_home:
                return
            raise
        if migration.state != "done":
            raise UserError(f"{migration.kind} {migration.state}: {migration.error}")

    async def _serve(
        self, place: str, loads: Sequence[OverlapLoad], number: int
    ) -> tuple[dict[str, float], list[Any]]:
        """Return modelled seconds of each load, and all answers; no place has another's cache."""
        seconds: dict[str, float] = {}
        answers: list[Any] = []
        for load in loads:
            calls = [
                CompletionCall(
                    str(one),
                    prompt=prompt,
                    max_tokens=load.output_tokens,
                    extra={"ignore_eos": True, "cache_salt": f"{place}-{number}"},
                )
                for one, prompt in enumerate(self._prompts[number][load.name])
            ]
            began_s = self._client.clock.now()
            records = [one.checked() for one in await closed_loop(self._client, calls, len(calls))]
            seconds[load.name] = self._client.clock.now() - began_s
            answers += [record.token_ids for record in records]
        return seconds, answers

    def _predict(self, place: Place, load: OverlapLoad) -> None:
        """Add the predicted gain of a step that prefills one prompt, or decodes the whole batch."""
        if load.name.startswith("decode"):
            tokens = load.num_requests * (load.prompt_tokens + load.output_tokens // 2)
            work = StepWork(decode_requests=load.num_requests, context_tokens=tokens)
        else:
            work = StepWork(prefill_tokens=load.prompt_tokens, prefill_pairs=load.prompt_tokens**2)
        share = place.own_layers / miniatures.of(self._profile).num_layers
        found = in_parts(StepCosts(self._profile), work, (share,), place.parts)
        self._add(f"{place.name}.{load.name}.step_gain_predicted", 1 / (1 - found.relief))

    def _add(self, name: str, *samples: float, unit: str = "ratio") -> None:
        self._samples.setdefault(name, ([], unit))[0].extend(samples)

    def _result(self, told: ModelledTime) -> result.Result:
        given = self._given
        return result.result(
            "overlap",
            seed=given.seed,
            options={name: str(value) for name, value in vars(given).items() if name != "json"},
            started_at=self._started_at,
            figures={name: result.figure(*sample) for name, sample in self._samples.items()},
            notes=_NOTES,
            raw=self._raw,
            modelled_time=[told],
        )


def _prompts(
    loads: Sequence[OverlapLoad], num_runs: int, seed: int
) -> list[dict[str, list[list[int]]]]:
    draws = random.Random(seed)
    return [
        {
            load.name: [
                draws.choices(range(*_TOKEN_IDS), k=load.prompt_tokens)
                for _ in range(load.num_requests)
            ]
            for load in loads
        }
        for _ in range(num_runs)
    ]
