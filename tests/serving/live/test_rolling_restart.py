"""Engines are replaced one after the other, with other weights or options, and no stream notices.

Random weights of SmolLM2's shape, float32; the new ones are of another seed. Kinds of streams and
what is compared of them are those of ``test_survival.py``.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import small_model
import written_prompts
from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from fork_server import ForkServer
from reference import reference_tokens, tokenizer
from restart_load import NUM_STREAMS, Load, admin_of, is_wrong, loaded, pids_of, restarted
from server_run import Run
from stream_kinds import BY_ONE_ENGINE, made_kinds
from streams import Kind, asked_all, differences

pytestmark = pytest.mark.e2e

COMMON = (
    *("--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)
CHOSEN = ("greedy", "seeded", "penalties", "logprobs", "three", "unseeded", "json", "chat")


@pytest.fixture(scope="module")
def kinds() -> dict[str, Kind]:
    (long,) = written_prompts.prompts("synthetic", 1, 150, 200, 9, str.split)
    (short,) = written_prompts.prompts("synthetic", 1, 60, 80, 10, str.split)
    found = made_kinds(tokenizer(small_model.resolve().path_or_id)(long.text), short.text)
    return {name: found[name] for name in CHOSEN}


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve("--pd", "1:1", *COMMON)
    yield run
    assert run.end() == 0


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
def test_every_answer_is_of_old_weights_or_of_new_ones(
    pair: Run, kinds: dict[str, Kind], new_weights: Path
) -> None:
    old = asyncio.run(asked_all(pair, kinds))

    async def run() -> tuple[RollingRestart, Load]:
        async with loaded(pair, kinds) as load:
            await load.reaches(NUM_STREAMS)
            ask = RestartRequest(str(new_weights))
            found = await asyncio.to_thread(restarted, pair, ask)
            await load.reaches(2 * NUM_STREAMS)  # each may still have an old one to read
        return found, load

    found, load = asyncio.run(run())
    assert (found.state, found.is_changed, found.reason) == ("done", True, "")
    new = asyncio.run(asked_all(pair, kinds))
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


def test_old_weights_come_back(pair: Run, kinds: dict[str, Kind], new_weights: Path) -> None:
    restarted(pair, RestartRequest(small_model.resolve().path_or_id))
    old = asyncio.run(asked_all(pair, kinds))
    restarted(pair, RestartRequest(str(new_weights)))
    restarted(pair, RestartRequest(small_model.resolve().path_or_id))
    assert differences(kinds, old, asyncio.run(asked_all(pair, kinds))) == {}


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


def test_a_cache_that_has_no_room_is_refused(pair: Run) -> None:
    before = pids_of(pair, ("p0", "d0"))
    with pytest.raises(UserError, match="more, and"):
        admin_of(pair).restarts.begin(
            RestartRequest(vllm_options=["--kv-cache-memory-bytes", str(1 << 50)])
        )
    assert pids_of(pair, ("p0", "d0")) == before


def not_numbers(source: Path, target: Path) -> Path:
    def spoilt(name: str, tensor: Any) -> Any:
        return tensor * np.float32("nan") if name == "model.norm.weight" else tensor

    return written(source, target, spoilt)


def test_weights_that_compute_no_numbers_go_back(
    pair: Run,
    kinds: dict[str, Kind],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = not_numbers(Path(small_model.resolve().path_or_id), tmp_path / "broken")
    expected = asyncio.run(asked_all(pair, kinds))
    kept = pids_of(pair, ("d0",))
    command = ["restart", "--rolling", "--run-dir", str(pair.run_dir), "--model", str(folder)]

    async def run() -> tuple[int, Load]:
        async with loaded(pair, kinds) as load:
            code = await asyncio.to_thread(main, command)
            await load.reaches(NUM_STREAMS)
        return code, load

    code, load = asyncio.run(run())
    assert code == 1
    assert "computes no numbers" in capsys.readouterr().err
    assert pids_of(pair, ("d0",)) == kept
    assert pair.metric("banaserve_instance_ready", instance_id="p0") == 1
    assert [kind for kind, answer in load.answers if is_wrong(kinds, expected, kind, answer)] == []
