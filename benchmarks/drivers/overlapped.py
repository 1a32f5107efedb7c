"""Engine with a guest beside it, which gets its orders over stdin; for ``bench overlap``.

Usage: ``python -m benchmarks.drivers.overlapped MODEL KIND OPTIONS``. KIND ``live``: an engine
whose layers can move to a guest, each on a core of its own. ``stages``: vLLM's own pipeline of two
stages. ``neighbour``: an engine on the core of guests. OPTIONS: JSON with more of the engine's
arguments. Each line of stdin is a JSON object with ``do``, each answer a line of JSON:

    {"do": "away", "layers": [15, 30]}   range of layers that is away from then on; null: none
    {"do": "overlap", "parts": 8}        as ``banaserve_migration_overlap``
    {"do": "share", "fraction": 0.5}     share of its core that the guest may take
    {"do": "usage"}                      "busy_s" of the guest since the last such order
    {"do": "run", "prompts": [[1, 2]], "tokens": 16}   "seconds", and "tokens" of each prompt
    {"do": "sums"}                       "predicted", "waiting", "measured", "wrong": seconds
    {"do": "status"}                     "overlap" of ``banaserve_migration_status``
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from banaserve.contracts.environment import set_environment
from banaserve.contracts.move_phase import MovePhase
from banaserve.contracts.rpc.typed_rpc import RemoteCall, call
from banaserve.mains.worker import WorkerExtension
from banaserve.migration.units.layers import LayerRange
from banaserve.migration.worker_api import HostStatus, LinkState, MigrationApi
from benchmarks.drivers.answers import say, take_stdout

T = TypeVar("T")

_CORES = sorted(os.sched_getaffinity(0))
_HOST_CORE, _GUEST_CORE = _CORES[0], _CORES[-1]
_LOOK_S = 0.02
_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 4608,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 1 << 30,
    "disable_log_stats": True,
}


def main() -> int:
    """Answer orders line by line until stdin ends; return the exit code."""
    model, kind, given = sys.argv[1:]
    replies = take_stdout()
    set_environment()
    arguments = {"model": model, **_ARGUMENTS, **json.loads(given)}
    with tempfile.TemporaryDirectory(prefix="ov-") as folder:
        engine: Any = _KINDS[kind](arguments, Path(folder))
        say(replies, ready=True)
        for line in sys.stdin:
            told = json.loads(line)
            what = told.pop("do")
            say(replies, **getattr(engine, what)(**told))
    return 0


class _Engine:
    """Orders that all kinds carry out alike."""

    llm: Any

    def sums(self) -> dict[str, Any]:
        """Return times of the layers of all steps in parts, in seconds; empty if there are none."""
        return {}

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Serve these prompts at once; return the seconds and the tokens."""
        from banaserve.engine.compat.runner.offline import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began_s = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}


class Live(_Engine):
    """An engine on one core, and the parent of its guests, which run on another core."""

    def __init__(self, arguments: dict[str, Any], folder: Path) -> None:
        from banaserve.engine.compat.runner import hooks as runner_hooks
        from banaserve.engine.compat.runner.offline import LLM, EngineArgs
        from banaserve.mains import engine_parent
        from banaserve.migration.host import install

        whole = arguments | {
            "worker_extension_cls": "banaserve.mains.worker.WorkerExtension",
            "scheduler_cls": "banaserve.migration.host.recovery.AsyncPoolScheduler",
            "async_scheduling": True,
            "additional_config": {"banaserve_migration": {"stall_s": 5.0, "overlap": 1}},
        }
        engine_parent.pre_import()
        config = EngineArgs(**whole).create_engine_config()
        _, self._control = engine_parent.fork_engine_parent(config)
        self._folder = folder
        self._secret = secrets.token_hex(16)
        self._num = 0
        install.install_runner(runner_hooks.cpu_model_runner())
        install.install_utilities()
        self.llm = LLM(**whole)
        _pin(os.getpid(), _HOST_CORE)

    def sums(self) -> dict[str, Any]:
        times = self._status().overlap.times
        return {
            "predicted": times.predicted_s,
            "waiting": times.waiting_s,
            "measured": times.measured_s,
            "wrong": times.wrong_s,
        }

    def away(self, layers: Sequence[int] | None) -> dict[str, Any]:
        """Take home the layers that are away, then move ``layers``."""
        for unit in self._status().units:
            move_id = self._new_move()
            self._ask(call(MigrationApi.banaserve_migration_move_on, move_id, unit.unit_id))
            self._carry_out(move_id)
            self._ask(call(MigrationApi.banaserve_migration_detach, unit.guest_id))
        if layers:
            move_id, modules = self._new_move(), LayerRange(layers[0], layers[1])
            guest_id = self._guest()
            self._ask(call(MigrationApi.banaserve_migration_prepare, move_id, modules, guest_id))
            self._carry_out(move_id)
        return {}

    def overlap(self, parts: int) -> dict[str, Any]:
        overlap = self._ask(call(MigrationApi.banaserve_migration_overlap, parts))
        return cast(dict[str, Any], msgspec.to_builtins(overlap))

    def share(self, fraction: float) -> dict[str, Any]:
        self._ask(call(MigrationApi.banaserve_migration_share, self._only_guest(), fraction))
        return {"share": fraction}

    def usage(self) -> dict[str, Any]:
        usage = self._ask(call(MigrationApi.banaserve_migration_usage, self._only_guest()))
        return cast(dict[str, Any], msgspec.to_builtins(usage))

    def status(self) -> dict[str, Any]:
        return {"overlap": msgspec.to_builtins(self._status().overlap)}

    def _only_guest(self) -> str:
        guest_id: str
        (guest_id,) = self._status().guests
        return guest_id

    def _new_move(self) -> str:
        self._num += 1
        return f"m{self._num}"

    def _carry_out(self, move_id: str) -> None:
        self._wait(move_id, MovePhase.PREPARED)
        self._ask(call(MigrationApi.banaserve_migration_precopy, move_id))
        self._wait(move_id, MovePhase.COPIED)
        self._ask(call(MigrationApi.banaserve_migration_commit, move_id))
        self._ask(call(MigrationApi.banaserve_migration_free, move_id))
        self._wait(move_id, MovePhase.FREED)

    def _wait(self, move_id: str, phase: MovePhase) -> None:
        while (move := self._status().moves[move_id]).phase is not phase:
            if move.phase is MovePhase.FAILED:
                raise RuntimeError(move.reason)
            time.sleep(_LOOK_S)

    def _guest(self) -> str:
        from banaserve.migration.rpc.messages import GuestAddress
        from banaserve.serving.launch import messages

        self._num += 1
        guest_id, folder = f"g{self._num}", str(self._folder)
        token = secrets.token_hex(16)
        channel = str(self._folder / f"{guest_id}.sock")
        address = GuestAddress(guest_id, channel, token, "shm", folder, self._secret)
        messages.send(
            self._control, messages.StartGuest(address, str(self._folder / f"{guest_id}.log"))
        )
        started = messages.receive(self._control)
        if not isinstance(started, messages.Started):
            raise RuntimeError(f"the guest did not start: {started}")
        _pin(started.pid, _GUEST_CORE)
        self._ask(call(MigrationApi.banaserve_migration_attach, [address]))
        while (guest := self._status().guests[guest_id]).state is LinkState.CONNECTING:
            time.sleep(_LOOK_S)
        if guest.state is not LinkState.READY:
            raise RuntimeError(guest.reason)
        return guest_id

    def _status(self) -> HostStatus:
        return self._ask(call(MigrationApi.banaserve_migration_status))

    def _ask(self, asked: RemoteCall[T]) -> T:
        (reply,) = self.llm.collective_rpc(asked.name, args=asked.args)
        return asked.read(reply)


class Stages(_Engine):
    """vLLM's own pipeline parallelism, a core for each stage."""

    def __init__(self, arguments: dict[str, Any], folder: Path) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{_HOST_CORE}|{_GUEST_CORE}"
        from banaserve.engine.compat.runner.offline import LLM

        self.llm = LLM(
            **arguments,
            pipeline_parallel_size=2,
            distributed_executor_backend="mp",
            worker_extension_cls="benchmarks.drivers.overlapped.StageWorker",
        )
        self.llm.collective_rpc("banaserve_make_buffers")


class Neighbour(_Engine):
    """An engine that knows nothing of guests on its core."""

    def __init__(self, arguments: dict[str, Any], folder: Path) -> None:
        from banaserve.engine.compat.runner.offline import LLM

        self.llm = LLM(**arguments)
        _pin(os.getpid(), _GUEST_CORE)


class StageWorker(WorkerExtension):
    """Extension of the workers of a pipeline on CPU."""

    def banaserve_make_buffers(self) -> None:
        """Allocate memory for what the stage before sends, which vLLM 0.32 forgets on CPU."""
        from banaserve.engine.compat.runner import hooks as runner_hooks

        runner_hooks.make_stage_buffers(self.model_runner)  # type: ignore[attr-defined]


_KINDS = {"live": Live, "stages": Stages, "neighbour": Neighbour}


def _pin(pid: int, core: int) -> None:
    """Keep all threads of a process on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


if __name__ == "__main__":
    sys.exit(main())
