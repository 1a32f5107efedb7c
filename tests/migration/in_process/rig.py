"""One engine in this process, stepped by hand, and the parents of its guests."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banaserve.base.errors import MigrationError
from banaserve.contracts.rpc.engine_api import CoreApi, PoolResize, PoolStatus
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.migration.host.time_hook import TimeHook
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.registry import AnyUnit
from banaserve.migration.worker_api import MigrationApi
from ports import free_port
from waiting import eventually

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
DEADLINE_S = 90.0
STEPS_A_PHASE = 6
MAX_IDLE = 3
Answers = dict[str, tuple[list[int], list[float]]]
During = Generator[None, None, None]


class Pieces(TimeHook):
    """Takes down what hosts of this process have done.

    Attributes:
        num_bytes: Copied so far.
        built_modules: In the order in which guests have built them.
        num_commits: So far.
    """

    def __init__(self) -> None:
        self.num_bytes = self.num_commits = 0
        self.built_modules: list[MigrationUnit] = []

    def copied(self, num_bytes: int, took_s: float) -> None:
        self.num_bytes += num_bytes

    def built(self, modules: MigrationUnit, took_s: float) -> None:
        self.built_modules.append(modules)

    def committed(self) -> None:
        self.num_commits += 1


_PIECES = Pieces()
"""One for all rigs: the runner's class is prepared once."""


def unit_of(plain: dict[str, Any]) -> Any:
    """The unit that plain values name, the inverse of ``write_modules``."""
    numbers = {kind: dict(plain[kind]) for kind in ("heads", "experts") if kind in plain}
    return msgspec.convert(plain | numbers, AnyUnit)


class Rig:
    """One in-process engine, the parent of its guests, and what a coordinator would do.

    Attributes:
        store: Socket of the store that the engine uses; None: it has none.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        control: socket.socket,
        folder: Path,
        store: Path | None = None,
    ) -> None:
        from vllm import LLM

        from banaserve.engine.compat.runner import hooks as runner_hooks
        from banaserve.engine.continuation import output_of
        from banaserve.migration.host import install

        runner_class = runner_hooks.cpu_model_runner()
        install.install_runner(runner_class, _PIECES)
        install.install_utilities()
        if not getattr(runner_class, "_seeds_installed", False):
            runner_hooks.restore_output(runner_class, output_of)
            runner_hooks.rewind_discarded_draws(runner_class)
            runner_class._seeds_installed = True
        self._control = control
        self._folder = folder
        self._secret = secrets.token_hex(16)
        self._num_guests = self._num_moves = self._num_runs = 0
        self.pids: dict[str, int] = {}
        self._lent: list[str] = []
        self._idle: list[str] = []
        self._answers: dict[str, int] = {}
        self.store = store
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.requests_at_once = 0
        self.pieces = _PIECES
        self._max_parts = self.do("status")["overlap"]["max_microbatches"]

    @property
    def host(self) -> Any:
        """The worker's ``MigrationHost``."""
        return self.core.model_executor.driver_worker.worker.model_runner.banaserve_migration

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs before the first request, as vLLM does on a GPU."""
        from banaserve.engine.compat.runner.graphs import graphs_of

        graphs = graphs_of(self.core.model_executor.driver_worker.worker.model_runner)
        assert graphs is not None
        for size in reversed(sizes):
            graphs.capture(size)

    # ---- the coordinator's calls

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        """A worker's reply as plain values, with ``error``: why it refuses, or empty."""
        typed = [unit_of(one) if isinstance(one, dict) else one for one in args]
        asked = call(getattr(MigrationApi, f"banaserve_migration_{method}"), *typed)
        try:
            value = asked.read(self.llm.collective_rpc(asked.name, args=asked.args)[0])
        except MigrationError as refused:
            return {"error": str(refused)}
        return {"error": "", **(msgspec.to_builtins(value) or {})}

    def do(self, method: str, *args: Any) -> dict[str, Any]:
        reply = self.ask(method, *args)
        assert reply["error"] == "", (method, args, reply)
        return reply

    def pool(self) -> PoolStatus:
        """Counts of the scheduler's pool."""
        asked = call(CoreApi.banaserve_pool_info)
        return asked.read(getattr(self.core, asked.name)(*asked.args))

    def resize_pool(self, num_blocks: int) -> PoolResize:
        asked = call(CoreApi.banaserve_resize_pool, num_blocks)
        return asked.read(getattr(self.core, asked.name)(*asked.args))

    # ---- guests

    def guest(self) -> str:
        """A guest that holds nothing: one that earlier tests have done with, or a new one."""
        guest_id = self._idle_guest() or self.new_guest()
        if guest_id not in self._lent:
            self._lent.append(guest_id)
        self.num_runs(guest_id)  # counts from here on
        return guest_id

    def _idle_guest(self) -> str | None:
        """One of those given back; not one that a test has killed and the host still thought of
        as ready, until it was asked."""
        while self._idle:
            guest_id = self._idle.pop()
            if self.lives(guest_id) and not self.ask("share", guest_id, 1.0)["error"]:
                return guest_id
            self.ask("detach", guest_id)
        return None

    def num_runs(self, guest_id: str) -> int:
        """Answers of a guest to parts of steps since the last call."""
        before = self._answers.get(guest_id, 0)
        self._answers[guest_id] = self.do("status")["guests"][guest_id]["round_trips"]
        return self._answers[guest_id] - before

    def give_back(self, guest_id: str) -> None:
        """What ``guest`` has lent holds nothing any more: others may have it."""
        self._lent.remove(guest_id)
        found = self.do("status")["guests"].get(guest_id)
        if found is None:
            return
        if (found["state"], found.get("share", 1.0)) == ("ready", 1.0):
            self._idle.append(guest_id)
            return
        self.do("detach", guest_id)
        self.kill(guest_id)

    def new_guest(self, stall_s: float | None = None, transport: str = "shm") -> str:
        """Start a guest and attach it; returns its id.

        Args:
            stall_s: Seconds for which the guest may stand still; None for more than a busy machine
                takes, until ``wait_no_longer``.
            transport: By which KV travels; with any but that of one machine messages go over TCP.
        """
        from banaserve.migration.rpc.messages import GuestAddress
        from banaserve.serving.launch import messages

        self._num_guests += 1
        guest_id = f"g{self._num_guests}"
        address = GuestAddress(
            guest_id=guest_id,
            channel=f"tcp:127.0.0.1:{free_port()}"
            if transport != "shm"
            else str(self._folder / f"{guest_id}.sock"),
            token=secrets.token_hex(16),
            transport=transport,
            folder=str(self._folder),
            secret=self._secret,
        )
        messages.send(
            self._control, messages.StartGuest(address, str(self._folder / f"{guest_id}.log"))
        )
        while True:
            answer = messages.receive(self._control)
            assert answer is not None, "the parent of guests has ended"
            if isinstance(answer, messages.Started):
                break
        self.pids[guest_id] = answer.pid
        self._lent.append(guest_id)
        settings = self.host.settings
        if stall_s is not None:
            self.host.settings = msgspec.structs.replace(settings, stall_s=stall_s)
        self.do("attach", [address])
        self.until(lambda: self.do("status")["guests"][guest_id]["state"] != "connecting")
        self.host.settings = settings
        assert self.do("status")["guests"][guest_id]["state"] == "ready", self.do("status")
        return guest_id

    def wait_no_longer(self, guest_id: str, stall_s: float = 0.3) -> None:
        """Let a guest that is about to stand still be given up soon; before it might be slow."""
        link = self.host.links[guest_id]
        link._stall_s = link._still_s = stall_s

    def kill(self, guest_id: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a guest that may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[guest_id], number)

    def lives(self, guest_id: str) -> bool:
        """Whether a guest's process has not ended; one that waits to be reaped has."""
        try:
            with open(f"/proc/{self.pids[guest_id]}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def new_move(self) -> str:
        self._num_moves += 1
        return f"m{self._num_moves}"

    def phase(self, move_id: str) -> str:
        return str(self.do("status")["moves"][move_id]["phase"])

    def wait(self, move_id: str, phase: str) -> During:
        """Let steps go by until a move is in ``phase``.

        After a few the engine stands still: a tiny model would have answered everything before a
        slow machine has moved anything.
        """
        for _ in range(STEPS_A_PHASE):
            if self.phase(move_id) == phase:
                return
            yield
        assert self.settled(move_id) == phase, self.do("status")["moves"][move_id]

    def settled(self, move_id: str) -> str:
        """The phase of a move whose thread has done what it was told to; waits for it."""
        assert self.host.moves.get(move_id).join(DEADLINE_S), self.do("status")["moves"][move_id]
        return self.phase(move_id)

    def carry_out(self, move_id: str, free: bool = True, gap: int = 0) -> During:
        """The rest of a move that is being prepared, with ``gap`` steps between its phases."""
        yield from self.wait(move_id, "prepared")
        yield from steps(gap)
        self.do("precopy", move_id)
        yield from self.wait(move_id, "copied")
        yield from steps(gap)
        self.do("commit", move_id)
        yield from steps(gap)
        if free:
            self.do("free", move_id)
            yield from self.wait(move_id, "freed")

    def away(
        self, modules: dict[str, Any], guest_id: str, free: bool = True, gap: int = 0
    ) -> During:
        """Move modules from home to a guest."""
        move_id = self.new_move()
        self.do("prepare", move_id, modules, guest_id)
        yield from self.carry_out(move_id, free, gap)

    def on(self, unit_id: str, guest_id: str | None = None, gap: int = 0) -> During:
        """Move a unit on to another guest, or home."""
        move_id = self.new_move()
        self.do("move_on", move_id, unit_id, guest_id)
        yield from self.carry_out(move_id, True, gap)

    def all_home(self) -> None:
        for unit in self.do("status")["units"]:
            self.finish(self.on(unit["unit_id"]))
        assert self.do("status")["units"] == []

    def reset(self) -> None:
        """Everything home; what a test has left behind is a failure."""
        self.all_home()
        for guest_id in list(self._lent):
            self.give_back(guest_id)
        while len(self._idle) > MAX_IDLE:
            self.do("detach", self._idle.pop(0))
        self.do("overlap", self._max_parts)
        pool = self.pool()
        assert all(move.is_over for move in self.host.moves), self.do("status")["moves"]
        assert (pool.running, pool.waiting) == (0, 0)
        assert pool.free_blocks == pool.num_blocks - 1, "a block is held"

    def forget(self) -> None:
        """As good as new: no prompt finds a block of those before."""
        self.reset()
        assert self.engine.reset_prefix_cache()

    def finish(self, during: During) -> None:
        """Carry something out while the engine is idle."""
        for _ in during:
            pass

    def until(self, holds: Callable[[], bool]) -> None:
        eventually(holds, deadline_s=DEADLINE_S)

    # ---- requests

    def run(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        during: During | None = None,
        salt: str | None = None,
        **sampling: Any,
    ) -> Answers:
        """Tokens and logprobs of all prompts; one step of ``during`` after each engine step.

        Prompts of different ``salt`` share no blocks.
        """
        from vllm import SamplingParams

        self._num_runs += 1
        chosen = {"temperature": 0.0, **sampling}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0, **chosen)
        salted = {} if salt is None else {"cache_salt": salt}
        for number, prompt in enumerate(prompts):
            self.engine.add_request(
                f"r{self._num_runs}-{number}", {"prompt_token_ids": prompt, **salted}, params
            )
        answers: Answers = {}
        self.requests_at_once = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    answers[output.request_id.split("-")[1]] = _answer(output.outputs[0])
            self.requests_at_once = max(self.requests_at_once, self.pool().running)
            if during is not None and next(during, "ended") == "ended":
                during = None
        if during is not None:
            self.finish(during)
        assert len(answers) == len(prompts)
        return answers

    @staticmethod
    def agrees(answers: Answers, expected: Answers, within: float = 2e-4) -> bool:
        """Same tokens, and logprobs but for rounding: other batches sum in another order.

        Args:
            within: How far logprobs may be apart.
        """
        assert {k: tokens for k, (tokens, _) in answers.items()} == {
            k: tokens for k, (tokens, _) in expected.items()
        }
        for key, (_, logprobs) in answers.items():
            assert logprobs == pytest.approx(expected[key][1], abs=within)
        return True

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.llm, self.engine, self.core
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def _answer(output: Any) -> tuple[list[int], list[float]]:
    logprobs = [next(iter(of_token.values())).logprob for of_token in output.logprobs]
    assert not any(math.isnan(logprob) for logprob in logprobs)
    return list(output.token_ids), logprobs


def steps(count: int) -> During:
    """Let ``count`` engine steps go by."""
    for _ in range(count):
        yield


def all_kinds() -> list[str]:
    """Names of the registered kinds of units."""
    from banaserve.migration.units.registry import KINDS

    return [kind.name for kind in KINDS]


def kinds_with_kv() -> list[str]:
    """Those of which something is copied, which every model has."""
    return [name for name in all_kinds() if name != "experts"]


def modules_of(kind_name: str, **values: Any) -> dict[str, Any]:
    """A unit of a kind as the worker is told of it: that which its request of the admin API names.

    Args:
        values: For whatever field a request may have, such as ``layers`` and ``heads``.
    """
    from banaserve.migration.units.registry import KINDS, unit_asked, write_modules

    (kind,) = [one for one in KINDS if one.name == kind_name]
    fields = set(kind.request.__struct_fields__) & set(values)
    assert fields, f"give a value for what {kind.request.__name__} names"
    unit = unit_asked(kind.request("here", "there", **{name: values[name] for name in fields}))
    assert unit is not None
    return msgspec.to_builtins(write_modules(unit))


class GuestParents:
    """Forks a parent of guests for each engine, from one process that has imported vLLM."""

    def __init__(self, folder: Path) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("guest_parents.py")
        with theirs, (folder / "parents.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @contextlib.contextmanager
    def parent(self, arguments: dict[str, Any]) -> Iterator[tuple[socket.socket, Path]]:
        """A parent of an engine's guests; its orders, and a short folder for sockets."""
        folder = Path(tempfile.mkdtemp(prefix="bm-"))
        control = self._fork(arguments)
        try:
            yield control, folder
        finally:
            control.shutdown(socket.SHUT_WR)
            while control.recv(4096):
                pass  # until the parent has ended, and with it its guests
            control.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _fork(self, arguments: dict[str, Any]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            message = json.dumps(arguments).encode()
            socket.send_fds(self._orders, [message], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self._orders.close()
        self._process.wait()
