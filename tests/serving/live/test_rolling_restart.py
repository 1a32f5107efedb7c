"""Engines are replaced one after the other, with other weights or options, and no stream notices.

Random weights of SmolLM2's shape, float32; the new ones are of another seed. Kinds of streams and
what is compared of them are those of ``test_survival.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import small_model
from banaserve.api.admin_client import AdminClient
from banaserve.bench.datasets import prompts
from banaserve.cli.main import main
from banaserve.engine.vllm.restart.api import RestartRequest, RollingRestart
from banaserve.errors import UserError
from banaserve.run_dir import find_admin
from fork_server import ForkServer
from observing import writer, writers
from reference import reference_tokens, tokenizer
from server_run import Run
from streams import Answer, Gaps, Kind, asked, asked_all, connected, differences
from test_survival import BY_ONE_ENGINE, made_kinds

pytestmark = pytest.mark.e2e

COMMON = (
    *("--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)
CHOSEN = ("greedy", "seeded", "penalties", "logprobs", "three", "unseeded", "json", "chat")
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def kinds() -> dict[str, Kind]:
    (long,) = prompts.prompts("synthetic", 1, 150, 200, 9, str.split)
    (short,) = prompts.prompts("synthetic", 1, 60, 80, 10, str.split)
    found = made_kinds(tokenizer(small_model.resolve().path_or_id)(long.text), short.text)
    return {name: found[name] for name in CHOSEN}


@pytest.fixture(scope="module")
def pairs(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve("--pd", "2:2", *COMMON)
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve("--pd", "1:1", *COMMON)
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def alone(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve("--colocated", "1", *COMMON)
    yield run
    assert run.end() == 0


class Load:
    """Streams that are asked again and again until it ends.

    Attributes:
        answers: With the name of their kind, in the order of their ends.
        changed: Notified of each.
    """

    def __init__(self, client: httpx.AsyncClient, kinds: dict[str, Kind]) -> None:
        self.answers: list[tuple[str, Answer]] = []
        self._kinds = kinds
        self.changed = asyncio.Condition()
        self._gaps = Gaps()
        self._stop = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._stream(client, number)) for number in range(NUM_STREAMS)
        ]

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        names = list(self._kinds)
        while not self._stop.is_set():
            name = names[number % len(names)]
            number += NUM_STREAMS + 1
            answer = await self._gaps.asked(client, self._kinds[name])
            async with self.changed:
                self.answers.append((name, answer))
                self.changed.notify_all()

    async def reaches(self, num_more: int) -> None:
        """Return when so many more have been answered."""
        wanted = len(self.answers) + num_more
        reached = asyncio.create_task(self._reached(wanted))
        await asyncio.wait({reached, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            await asyncio.gather(*(task for task in self._tasks if task.done()))

    async def _reached(self, wanted: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.answers) >= wanted)

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        print(f"\n{len(self.answers)} answers, {self._gaps}")


@asynccontextmanager
async def loaded(server: Run, kinds: dict[str, Kind]) -> AsyncIterator[Load]:
    async with connected(server) as client:
        load = Load(client, kinds)
        try:
            yield load
        finally:
            await load.end()


def admin_of(server: Run) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


def restarted(
    server: Run, ask: RestartRequest, seen: Callable[[RollingRestart], None] = lambda _: None
) -> RollingRestart:
    """Begin a restart and return when it has ended; ``seen`` is given it now and then."""
    admin = admin_of(server)
    found = admin.begin_restart(ask)
    while found.is_open:
        seen(found)
        found = admin.show_restart(found.id, wait_s=0.2)
    return found


def pids_of(server: Run, names: Iterable[str]) -> set[int]:
    return {writer(server.run_dir, name) for name in names}


def is_wrong(
    kinds: dict[str, Kind], expected: dict[str, Answer], kind: str, answer: Answer
) -> bool:
    return bool(differences({kind: kinds[kind]}, expected, {kind: answer}))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("pairs", ["p0", "d0", "p1", "d1"]),
        pytest.param("pair", ["p0", "d0"], marks=pytest.mark.long),
        pytest.param("alone", ["c0"], marks=pytest.mark.long),
    ],
)
def test_streams_of_every_kind_notice_no_restart(
    name: str, order: list[str], request: pytest.FixtureRequest, kinds: dict[str, Kind]
) -> None:
    server = request.getfixturevalue(name)
    expected = asyncio.run(asked_all(server, kinds))
    assert [kind for kind, answer in expected.items() if answer.error] == []
    before = pids_of(server, order)

    async def run() -> tuple[RollingRestart, Load]:
        async with loaded(server, kinds) as load:
            await load.reaches(NUM_STREAMS)
            found = await asyncio.to_thread(restarted, server, RestartRequest())
            await load.reaches(NUM_STREAMS)
        return found, load

    found, load = asyncio.run(run())
    assert (found.state, found.is_changed, found.reason) == ("done", False, "")
    assert [one.instance for one in found.engines] == order
    assert {one.state for one in found.engines} == {"done"}
    assert pids_of(server, order).isdisjoint(before)
    assert [kind for kind, answer in load.answers if is_wrong(kinds, expected, kind, answer)] == []
    assert server.metric("banaserve_instance_restarts_total") == 0
    assert server.metric("banaserve_requests_given_up_total") == 0


# ---- other options


def test_streams_notice_no_other_options(
    pair: Run, kinds: dict[str, Kind], capsys: pytest.CaptureFixture[str]
) -> None:
    """KV and streams are those of the same weights: they go over to the new engines."""
    expected = asyncio.run(asked_all(pair, kinds))
    halved = ["--", "--kv-cache-memory-bytes", str(128 << 20), "--max-num-seqs", "16"]
    command = ["restart", "--rolling", "--run-dir", str(pair.run_dir), *halved]

    async def run() -> tuple[int, Load]:
        async with loaded(pair, kinds) as load:
            await load.reaches(NUM_STREAMS)
            code = await asyncio.to_thread(main, command)
            await load.reaches(NUM_STREAMS)
        return code, load

    code, load = asyncio.run(run())
    assert (code, capsys.readouterr().out.split(" in ")[0]) == (0, "2 engines replaced")
    assert [kind for kind, answer in load.answers if is_wrong(kinds, expected, kind, answer)] == []
    for name in ("p0", "d0"):
        log = (pair.run_dir / f"{name}.log").read_text()
        sizes = [int(size.replace(",", "")) for size in re.findall(r"cache size: ([\d,]+)", log)]
        assert sizes[-1] <= sizes[0] // 2, sizes  # in whole blocks


# ---- other weights


def written(source: Path, target: Path, change: Callable[[str, Any], Any]) -> Path:
    """A copy of a model with each of its tensors changed."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    path.unlink()  # the cache's may be linked
    save_file(tensors, path, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draws = np.random.default_rng(1)

    def drawn(_: str, tensor: Any) -> Any:
        if tensor.ndim < 2:
            return tensor
        return draws.normal(0.0, 0.08, tensor.shape).astype(np.float32)

    source = Path(small_model.resolve().path_or_id)
    return written(source, tmp_path_factory.mktemp("weights") / "new", drawn)


@pytest.mark.spine
@pytest.mark.parametrize("name", [pytest.param("pairs", marks=pytest.mark.long), "pair"])
def test_every_answer_is_of_old_weights_or_of_new_ones(
    name: str,
    request: pytest.FixtureRequest,
    kinds: dict[str, Kind],
    new_weights: Path,
) -> None:
    server = request.getfixturevalue(name)
    old = asyncio.run(asked_all(server, kinds))

    async def run() -> tuple[RollingRestart, Load]:
        async with loaded(server, kinds) as load:
            await load.reaches(NUM_STREAMS)
            ask = RestartRequest(str(new_weights))
            found = await asyncio.to_thread(restarted, server, ask)
            await load.reaches(NUM_STREAMS)
        return found, load

    found, load = asyncio.run(run())
    assert (found.state, found.is_changed, found.reason) == ("done", True, "")
    new = asyncio.run(asked_all(server, kinds))
    assert not set(differences(kinds, old, new)) ^ (set(kinds) - {"unseeded"})
    came = Counter[str]()
    for kind, answer in load.answers:
        is_old = not is_wrong(kinds, old, kind, answer)
        is_new = not is_wrong(kinds, new, kind, answer)
        assert is_old or is_new, (kind, answer, old[kind], new[kind])
        came["old"] += is_old and not is_new
        came["new"] += is_new and not is_old
    assert came["old"]
    assert came["new"]
    restarted(server, RestartRequest(small_model.resolve().path_or_id))
    assert differences(kinds, old, asyncio.run(asked_all(server, kinds))) == {}


def test_new_weights_answer_as_one_engine_of_them_does(
    pair: Run, fork_server: ForkServer, kinds: dict[str, Kind], new_weights: Path
) -> None:
    restarted(pair, RestartRequest(str(new_weights)))
    chosen = {name: kinds[name] for name in ("greedy", "seeded", "penalties")}
    found = asyncio.run(asked_all(pair, chosen))
    samplings = {name: BY_ONE_ENGINE[name] for name in chosen}
    prompt = kinds["greedy"].body["prompt"]
    wanted = reference_tokens(fork_server, str(new_weights), [prompt], samplings)
    assert {name: [answer.tokens[0]] for name, answer in found.items()} == wanted
    restarted(pair, RestartRequest(small_model.resolve().path_or_id))


# ---- what goes wrong


def test_a_stream_that_no_other_engine_can_take_ends_in_one_error_when_its_time_is_up(
    pair: Run, kinds: dict[str, Kind], new_weights: Path
) -> None:
    long = Kind("/v1/completions", {**kinds["greedy"].body, "max_tokens": 1500})

    async def run() -> tuple[Answer, RollingRestart]:
        async with connected(pair) as client:
            began = asyncio.Event()
            stream = asyncio.create_task(asked(client, long, lambda _: began.set()))
            await began.wait()
            ask = RestartRequest(str(new_weights), timeout_s=0.1)
            found = await asyncio.to_thread(restarted, pair, ask)
            return await stream, found

    answer, found = asyncio.run(run())
    assert found.state == "done"
    assert answer.num_tokens
    assert "replaced the weights that this answer had begun with: ask again" in answer.error
    restarted(pair, RestartRequest(small_model.resolve().path_or_id))


def other_config(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["model"]["merges"] = told["model"]["merges"][:-1]
    path.unlink()
    path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-num-seqs", "none"], "max-num-seqs"),
        (["--no-such-option"], "cannot change while the server runs"),
        (["--served-model-name", "other"], "cannot change while the server runs"),
        (["--block-size", "64"], "cannot change while the server runs"),
        (["--tensor-parallel-size=2"], "cannot change while the server runs"),
        (["--model", "x"], "give the model before --"),
        (["--max-model-len", "1024"], "is shorter than the 2048"),
        (["--dtype", "bfloat16"], "--dtype would be"),
        (["--kv-cache-memory-bytes", str(1 << 50)], "more, and"),
    ],
)
def test_options_that_cannot_serve_are_refused(pair: Run, options: list[str], reason: str) -> None:
    refuses(pair, RestartRequest(vllm_options=options), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_config("num_hidden_layers", 15), "its num_hidden_layers is 15"),
        (other_config("max_position_embeddings", 1024), "1024"),
        (other_tokenizer, "its tokenizer.json is not that of"),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_a_model_that_cannot_serve_is_refused(
    pair: Run, change: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model.resolve().path_or_id, folder)
    change(folder)
    refuses(pair, RestartRequest(str(folder)), reason)


def refuses(server: Run, ask: RestartRequest, reason: str) -> None:
    before = pids_of(server, ("p0", "d0"))
    with pytest.raises(UserError, match=re.escape(reason)):
        admin_of(server).begin_restart(ask)
    assert pids_of(server, ("p0", "d0")) == before


def test_without_rolling_it_is_refused_and_says_how(
    pair: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restart", "--run-dir", str(pair.run_dir)]) == 2
    assert "give --rolling" in capsys.readouterr().err


def truncated(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    found = path.read_bytes()
    path.unlink()
    path.write_bytes(found[: len(found) // 2])
    return target


def not_numbers(source: Path, target: Path) -> Path:
    def spoilt(name: str, tensor: Any) -> Any:
        return tensor * np.float32("nan") if name == "model.norm.weight" else tensor

    return written(source, target, spoilt)


@pytest.mark.parametrize(
    ("spoil", "said"), [(truncated, "ended while starting"), (not_numbers, "computes no numbers")]
)
def test_weights_that_do_not_serve_go_back(
    pairs: Run,
    kinds: dict[str, Kind],
    spoil: Callable[[Path, Path], Path],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = spoil(Path(small_model.resolve().path_or_id), tmp_path / "broken")
    expected = asyncio.run(asked_all(pairs, kinds))
    kept = pids_of(pairs, ("p1", "d0", "d1"))
    command = ["restart", "--rolling", "--run-dir", str(pairs.run_dir), "--model", str(folder)]

    async def run() -> tuple[int, Load]:
        async with loaded(pairs, kinds) as load:
            code = await asyncio.to_thread(main, command)
            await load.reaches(NUM_STREAMS)
        return code, load

    code, load = asyncio.run(run())
    assert code == 1
    assert said in capsys.readouterr().err
    assert pids_of(pairs, ("p1", "d0", "d1")) == kept
    assert pairs.metric("banaserve_instance_ready", instance_id="p0") == 1
    assert [kind for kind, answer in load.answers if is_wrong(kinds, expected, kind, answer)] == []


@pytest.mark.parametrize(
    ("victim", "is_changed", "state"), [("d0", False, "done"), ("d0", True, "failed")]
)
def test_an_engine_that_is_killed_while_it_starts(
    pairs: Run,
    kinds: dict[str, Kind],
    new_weights: Path,
    victim: str,
    is_changed: bool,
    state: str,
) -> None:
    """The same one is started again; with other weights those that were replaced go back."""
    old = asyncio.run(asked_all(pairs, kinds))
    before = set(writers(pairs.run_dir))
    killed: list[int] = []

    def kill(found: RollingRestart) -> None:
        starting = [one.instance for one in found.engines if one.state == "starting"]
        if starting == [victim] and not killed:
            # The one before may be there still, or nobody.
            new = [one for one in writers(pairs.run_dir) if one not in before]
            for pid in [pid for log, pid in new if log == f"{victim}.log"][:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    async def run() -> tuple[RollingRestart, Load]:
        async with loaded(pairs, kinds) as load:
            ask = RestartRequest(str(new_weights) if is_changed else "")
            found = await asyncio.to_thread(restarted, pairs, ask, kill)
            await load.reaches(NUM_STREAMS)
        return found, load

    found, load = asyncio.run(run())
    assert killed
    assert found.state == state
    assert ("p0", "taken back") in {(one.instance, one.state) for one in found.engines} or not (
        is_changed
    )
    assert [answer.error for _, answer in load.answers if answer.error] == []
    assert differences(kinds, old, asyncio.run(asked_all(pairs, kinds))) == {}
