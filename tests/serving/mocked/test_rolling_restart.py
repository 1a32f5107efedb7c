"""Mock engines are replaced one after the other, with other weights or options: no stream notices.

Their tokens follow from the folder of their weights, as those of real engines, for which
``live/test_rolling_restart.py`` shows the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mock_core
import small_model
import written_prompts
from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from mock_facts import MockOptions, Trouble
from mock_run import MockRun
from reference import tokenizer
from restart_load import NUM_STREAMS, Load, admin_of, is_wrong, loaded, pids_of, restarted
from stream_kinds import made_kinds
from streams import Answer, Kind, asked, asked_all, connected, differences

pytestmark = pytest.mark.room

CHOSEN = ("greedy", "seeded", "penalties", "logprobs", "three", "unseeded", "stop", "chat")
COMMON = ("--dtype", "float32", "--max-model-len", "2048", "--migration", "off")
MOCKS = MockOptions(step_ms=4.0, prefill_token_ms=0.5)
"""Prompts take long enough that some are between two legs whenever the weights change."""
SLOW = msgspec.structs.replace(MOCKS, step_ms=100.0)
"""A long stream is under way until both engines are replaced, on a busy machine, too."""
MANY = 16


@pytest.fixture(scope="module")
def kinds() -> dict[str, Kind]:
    (long,) = written_prompts.prompts("synthetic", 1, 150, 200, 9, str.split)
    (short,) = written_prompts.prompts("synthetic", 1, 60, 80, 10, str.split)
    found = made_kinds(tokenizer(small_model.resolve().path_or_id)(long.text), short.text)
    return {name: found[name] for name in CHOSEN}


@pytest.fixture(scope="module")
def pairs(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "2:2", *COMMON, mocks=MOCKS)
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def pair(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "1:1", *COMMON, mocks=SLOW)
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def alone(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--colocated", "1", *COMMON, mocks=MOCKS)
    yield run
    assert run.end() == 0


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


# ---- other weights


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("weights") / "new"
    return Path(shutil.copytree(small_model.resolve().path_or_id, target))


@pytest.mark.parametrize("name", ["pairs", pytest.param("pair", marks=pytest.mark.long)])
def test_every_answer_is_of_old_weights_or_of_new_ones(
    name: str,
    request: pytest.FixtureRequest,
    kinds: dict[str, Kind],
    new_weights: Path,
) -> None:
    server = request.getfixturevalue(name)
    old = asyncio.run(asked_all(server, kinds))

    async def run() -> tuple[RollingRestart, Load]:
        async with loaded(server, kinds, MANY) as load:
            await load.reaches(NUM_STREAMS)
            ask = RestartRequest(str(new_weights))
            found = await asyncio.to_thread(restarted, server, ask)
            await load.reaches(2 * MANY)  # each stream may still have an old one to read
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


# ---- what goes wrong


def test_a_stream_that_no_other_engine_can_take_ends_in_one_error_when_its_time_is_up(
    pair: MockRun, kinds: dict[str, Kind], new_weights: Path
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
    ],
)
def test_options_that_cannot_serve_are_refused(
    pair: MockRun, options: list[str], reason: str
) -> None:
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
    pair: MockRun, change: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model.resolve().path_or_id, folder)
    change(folder)
    refuses(pair, RestartRequest(str(folder)), reason)


def refuses(server: MockRun, ask: RestartRequest, reason: str) -> None:
    before = pids_of(server, ("p0", "d0"))
    with pytest.raises(UserError, match=re.escape(reason)):
        admin_of(server).restarts.begin(ask)
    assert pids_of(server, ("p0", "d0")) == before


def test_without_rolling_it_is_refused_and_says_how(
    pair: MockRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restart", "--run-dir", str(pair.run_dir)]) == 2
    assert "give --rolling" in capsys.readouterr().err


def test_weights_that_do_not_serve_go_back(
    pairs: MockRun,
    kinds: dict[str, Kind],
    new_weights: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = asyncio.run(asked_all(pairs, kinds))
    kept = pids_of(pairs, ("p1", "d0", "d1"))
    command = ["restart", "--rolling", "--run-dir", str(pairs.run_dir), "--model", str(new_weights)]
    fails_once = pairs.run_dir / "fails-once"
    fails_once.touch()
    trouble = Trouble("fail at start", instances=("p0",), once=str(fails_once))
    pairs.set_mocks(msgspec.structs.replace(MOCKS, troubles=(trouble,)))

    async def run() -> tuple[int, Load]:
        async with loaded(pairs, kinds) as load:
            code = await asyncio.to_thread(main, command)
            await load.reaches(NUM_STREAMS)
        return code, load

    try:
        code, load = asyncio.run(run())
    finally:
        pairs.set_mocks(MOCKS)
    assert code == 1
    assert "ended while starting" in capsys.readouterr().err
    assert pids_of(pairs, ("p1", "d0", "d1")) == kept
    assert pairs.metric("banaserve_instance_ready", instance_id="p0") == 1
    assert [kind for kind, answer in load.answers if is_wrong(kinds, expected, kind, answer)] == []


@pytest.mark.parametrize(
    ("victim", "is_changed", "state"), [("d0", False, "done"), ("d0", True, "failed")]
)
def test_an_engine_that_is_killed_while_it_starts(
    pairs: MockRun,
    kinds: dict[str, Kind],
    new_weights: Path,
    victim: str,
    is_changed: bool,
    state: str,
) -> None:
    """The same one is started again; with other weights those that were replaced go back."""
    old = asyncio.run(asked_all(pairs, kinds))
    killed: list[int] = []
    hangs_once = pairs.run_dir / "hangs-once"
    hangs_once.touch()
    trouble = Trouble("never ready", instances=(victim,), once=str(hangs_once))
    pairs.set_mocks(msgspec.structs.replace(MOCKS, troubles=(trouble,)))

    def kill(_: RollingRestart) -> None:
        for hung in pairs.run_dir.glob(mock_core.taken(hangs_once.name, "*")):
            hung.unlink()
            killed.append(int(hung.name.rpartition(".")[2]))
            os.kill(killed[0], signal.SIGKILL)

    async def run() -> tuple[RollingRestart, Load]:
        async with loaded(pairs, kinds) as load:
            ask = RestartRequest(str(new_weights) if is_changed else "")
            found = await asyncio.to_thread(restarted, pairs, ask, kill)
            await load.reaches(NUM_STREAMS)
        return found, load

    found, load = asyncio.run(run())
    pairs.set_mocks(MOCKS)
    assert len(killed) == 1
    assert found.state == state, found
    assert ("p0", "taken back") in {(one.instance, one.state) for one in found.engines} or not (
        is_changed
    )
    assert [answer.error for _, answer in load.answers if answer.error] == []
    assert differences(kinds, old, asyncio.run(asked_all(pairs, kinds))) == {}
