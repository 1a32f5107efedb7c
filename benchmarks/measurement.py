"""Command line of a benchmark, and the result that it writes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress

from banaserve.base import models
from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from banaserve_bench.loadgen.servers import Server, banaserve_server, end_on_sigterm
from banaserve_bench.results import result
from banaserve_bench.results.result import ModelledTime, Result

Samples = dict[str, tuple[list[float], str]]
"""Samples and unit of each figure, by its name."""


def parser_of(name: str, about: str | None) -> Parser:
    """Return a parser of ``python -m benchmarks NAME`` that has ``--json``, the result's file."""
    parser = Parser(prog=f"python -m benchmarks {name}", description=about)
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser


class Measurement:
    """Run of a benchmark that begins now; SIGTERM ends it and the servers that it starts.

    Args:
        name: Name of the benchmark on the command line.
        given: Options of the run; ``seed`` is the result's seed if there is one, else 0.
    """

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        end_on_sigterm()
        self._name = name
        self._given = given
        self._started_at = datetime.now(UTC)

    def result(
        self,
        samples: Samples,
        notes: Sequence[str],
        *,
        raw: Mapping[str, Any] | None = None,
        modelled_time: Sequence[ModelledTime] = (),
    ) -> Result:
        """Return the result of the samples so far.

        Its options are all but ``--json``; of a path it has the name without the folder.
        """
        options = {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(self._given).items()
            if name not in ("json", "seed")
        }
        return result.result(
            self._name,
            seed=getattr(self._given, "seed", 0),
            options=options,
            started_at=self._started_at,
            figures={name: result.figure(*sample) for name, sample in samples.items()},
            notes=notes,
            raw=raw,
            modelled_time=modelled_time,
        )

    def keep(self, record: Result) -> None:
        """Write an intermediate result where ``--json`` says; a later one replaces it."""
        if self._given.json is not None:
            result.write(record, self._given.json)

    def deliver(self, record: Result) -> None:
        """Print the result, and write it where ``--json`` says."""
        result.deliver(record, self._given.json)


def earlier(
    path: Path | None, name: str, options: Mapping[str, Any], *, same_code: bool = False
) -> Result | None:
    """Return the result that an earlier run of a benchmark has left in ``path``, to continue it.

    Args:
        options: Options that both runs must have in common.
        same_code: True to begin anew if the code has changed since, or had changes then.

    Raises:
        UserError: The file is of another benchmark, or of other options.
    """
    if path is None or not path.exists():
        return None
    left = result.read(path)
    if same_code and (left.dirty or (left.commit, left.dirty) != result.commit()):
        return None
    told = {key: left.options.get(key) for key in options}
    if (left.name.replace("_", "-"), told) != (name, dict(options)):
        words = ", ".join(f"{key} {value}" for key, value in options.items()) or "any options"
        raise UserError(f"{path} is no result of bench {name} with {words}: give another file")
    return left


@contextmanager
def administered_server(model: str, *options: str) -> Iterator[tuple[Server, AdminClient, Path]]:
    """Run ``banaserve serve``; yield it, its admin client and its run folder."""
    with TemporaryDirectory(prefix="bench-") as folder:
        run_dir = Path(folder) / "run"
        with banaserve_server(model, *options, "--run-dir", str(run_dir)) as server:
            yield server, AdminClient(*find_admin(run_dir)), run_dir


def model_of(name: str) -> models.ResolvedModel:
    """Return the model of this name, and print what is done to get it."""
    return models.resolve(name, None, lambda line: print(line, flush=True))


def with_units(samples: Mapping[str, list[float]], units: Mapping[str, str]) -> Samples:
    """Return samples, each with the unit of the first part of its name that is in ``units``."""
    return {
        name: (found, next(unit for part, unit in units.items() if part in name))
        for name, found in samples.items()
    }


@contextmanager
def progress_of(num_parts: int, words: str) -> Iterator[Callable[[str], None]]:
    """Show a bar; yield a function that ends a part and shows the words for the next one."""
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(words, total=num_parts)
        yield lambda words: progress.update(task, advance=1, description=words)


def random_tokens(draws: random.Random, count: int) -> list[int]:
    """Return token ids of ordinary words of the packaged model; other models have them too."""
    return draws.choices(range(100, 40_000), k=count)
