"""Rounds of ``bench overlap``: each serves all that is compared, in sequence.

The speed of a machine may change by half within minutes, so every gain compares times of the same
round, and the order differs between rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.drivers.driven_engine import DrivenEngine
from benchmarks.overlap import figures as figures

_FIRST_TOKEN, _LAST_TOKEN = 100, 40_000
_HOME, _STAGES = "home", "stages"
_WAITING = 1
_WARM_TOKENS = 4


class OverlapRounds:
    """Rounds that serve every load: with all layers at home, and with each range away.

    Args:
        live: Engine whose layers move.
        stages: Engine with vLLM's own pipeline; None to leave it out.
        num_layers: Number of layers of the model.
        each_layers: Numbers of layers that are away in turn.
        max_microbatches: Maximum number of micro-batches of a step.
        step_tokens: Maximum tokens of a step; a prompt of this length teaches an engine its times.
        prompts: Prompts of each load by its name, one mapping for each round.
        advance: Callback with the name of what has been served.
    """

    def __init__(
        self,
        live: DrivenEngine,
        stages: DrivenEngine | None,
        num_layers: int,
        each_layers: Sequence[int],
        max_microbatches: int,
        step_tokens: int,
        loads: Sequence[figures.OverlapLoad],
        prompts: Sequence[Mapping[str, list[list[int]]]],
        advance: Callable[[str], None],
    ) -> None:
        self._live = live
        self._stages = stages
        self._num_layers = num_layers
        self._each_layers = sorted(each_layers, reverse=True)
        self._most_parts = max_microbatches
        self._step_tokens = step_tokens
        self._loads = loads
        self._prompts = prompts
        self._advance = advance
        self._times: dict[str, figures.Times] = {}
        self._status: dict[str, Any] = {}

    def run(self) -> Iterator[int]:
        """Run the rounds; yield the number of complete rounds after each."""
        for number in range(len(self._prompts)):
            self._live.tell(do="away", layers=None)
            self._serve(self._live, number, {_HOME: None})
            if self._stages is not None:
                self._serve(self._stages, number, {_STAGES: None})
            turn = number % len(self._each_layers)
            for layers in self._each_layers[turn:] + self._each_layers[:turn]:
                self._serve_away(number, layers)
            yield number + 1

    def send_away(self, layers: int) -> None:
        """Move the last ``layers`` layers to a guest, in parts; the engine learns their times."""
        self._live.tell(do="away", layers=[self._num_layers - layers, self._num_layers])
        self._live.tell(do="overlap", parts=self._most_parts)
        self._warm(self._live)

    def samples(self) -> figures.Samples:
        """Return the samples of the complete rounds."""
        home = self._times[_HOME]
        found: figures.Samples = {}
        for layers in self._each_layers:
            name = f"layers_{layers}"
            waiting, times = self._times[f"{name}.waiting"], self._times[f"{name}.overlap"]
            found |= figures.gains(f"{name}.waiting", self._loads, home, waiting)
            found |= figures.gains(f"{name}.overlap", self._loads, home, times)
            found |= figures.beside_waiting(f"{name}.overlap", self._loads, waiting, times)
        found |= figures.headlines(found, self._each_layers[0])
        if _STAGES in self._times:
            found |= figures.gains("stages", self._loads, home, self._times[_STAGES])
        return found

    def raw(self) -> dict[str, Any]:
        """Return the seconds of everything, and the engine's status of its steps."""
        seconds = {name: times.seconds for name, times in self._times.items()}
        return {"seconds": seconds, "status": self._status}

    def _serve_away(self, number: int, layers: int) -> None:
        self.send_away(layers)
        name = f"layers_{layers}"
        places = {f"{name}.waiting": _WAITING, f"{name}.overlap": self._most_parts}
        self._serve(self._live, number, places)
        self._status[name] = self._live.tell(do="status")["overlap"]

    def _serve(self, engine: DrivenEngine, number: int, places: Mapping[str, int | None]) -> None:
        """Serve every load once in each place, one right after the other.

        Args:
            places: Maximum number of parts, by the name of the times; None leaves it unchanged.
        """
        if number == 0 and None in places.values():
            self._warm(engine)
        for load in self._loads:
            for name, parts in places.items():
                if parts is not None:
                    engine.tell(do="overlap", parts=parts)
                times = self._times.setdefault(name, figures.Times.of(self._loads))
                self._time(engine, self._prompts[number][load.name], load, times)
                same = self._times[_HOME].tokens[load.name][number] == times.tokens[load.name][-1]
                times.equal[load.name].append(float(same))

    def _time(
        self,
        engine: DrivenEngine,
        prompts: list[list[int]],
        load: figures.OverlapLoad,
        times: figures.Times,
    ) -> None:
        before = engine.tell(do="sums")
        answer = engine.tell(do="run", prompts=prompts, tokens=load.output_tokens)
        after = engine.tell(do="sums")
        self._advance(load.name)
        times.seconds[load.name].append(answer["seconds"])
        times.tokens[load.name].append(answer["tokens"])
        times.sums_s[load.name].append({what: after[what] - before[what] for what in after})

    def _warm(self, engine: DrivenEngine) -> None:
        """Serve one full step of a prompt, and a few steps of each batch."""
        for load in [load for load in self._loads if load.name != "prefill"]:
            most = self._step_tokens // load.num_requests
            prompts = [prompt[:most] for prompt in self._prompts[0][load.name]]
            engine.tell(do="run", prompts=prompts, tokens=min(_WARM_TOKENS, load.output_tokens))


def draw_prompts(draws: random.Random, load: figures.OverlapLoad) -> list[list[int]]:
    """Return random tokens for each request of a load."""
    return [
        [draws.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(load.prompt_tokens)]
        for _ in range(load.num_requests)
    ]
