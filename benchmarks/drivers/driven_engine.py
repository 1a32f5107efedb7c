"""Engine in a process of its own, which gets its orders line by line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.contracts.environment import ENVIRONMENT
from banaserve_bench.loadgen.servers import end_with_parent, log_folder
from benchmarks.location import environment

_END_S = 20.0


class DrivenEngine:
    """Driver of an engine that answers one order at a time.

    Attributes:
        greeting: First answer of the engine.
    """

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.greeting = self._read()

    def tell(self, **order: Any) -> dict[str, Any]:
        """Send ``order`` and return the engine's answer.

        Raises:
            UserError: The engine has ended; the message has the last line of its log.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log_path.read_text(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"the engine ended: {' '.join(last)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def driven_engine(module: str, *arguments: str) -> Iterator[DrivenEngine]:
    """Run ``python -m module``, which answers through ``benchmarks.drivers.answers``.

    Raises:
        UserError: The engine did not start.
    """
    with log_folder() as folder:
        log_path = folder / "engine.log"
        with (
            log_path.open("wb") as log,
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment()},
                preexec_fn=end_with_parent,
            ) as process,
        ):
            try:
                yield DrivenEngine(process, log_path)
            finally:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Let the process end what it has started; kill it if it does not end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
