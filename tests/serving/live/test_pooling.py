"""Models that answer with embeddings: served by instances that do all of a request, unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import random_models
from fork_server import ForkServer
from observing import until
from server_run import Run

pytestmark = pytest.mark.e2e

TEXTS = [" ".join(f"word{(7 * n + i) % 50}" for i in range(3 + 20 * n)) for n in range(8)]


def by_one_engine(
    forks: ForkServer, model: str, runner: str, folder: Path
) -> np.ndarray:  # [num_texts, hidden_size]
    job, out, log = (folder / name for name in ("job.json", "out.json", "log"))
    job.write_text(json.dumps({"model": model, "runner": runner, "texts": TEXTS}))
    script = Path(__file__).with_name("reference_embeddings.py")
    with log.open("wb") as output:
        number = output.fileno()
        code = forks.start([str(script), str(job), str(out)], os.environ, number, number).wait()
    assert code == 0, log.read_text(errors="replace")[-2000:]
    return np.asarray(json.loads(out.read_text()))


def embedding(server: Run, text: str) -> list[float]:
    body = {"model": "m", "input": text}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


@pytest.mark.parametrize(
    ("make", "runner"),
    [
        (random_models.make_encoder, "auto"),
        (lambda folder: random_models.make("llama", folder), "pooling"),
    ],
    ids=["encoder", "decoder"],
)
def test_embeddings_are_those_of_one_engine(
    make: Callable[[Path], str],
    runner: str,
    serve: Callable[..., Run],
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    model = make(tmp_path / "m")
    expected = by_one_engine(fork_server, model, runner, tmp_path)
    server = serve(
        *("--pd", "1:1", "--model", model, "--served-model-name", "m", "--runner", runner),
        *("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864"),
    )
    said = server.printed()
    assert "(2 colocated)" in said
    assert "it pools, so each instance does all of a request" in said
    assert "/v1/embeddings" in said
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        found = np.asarray(list(threads.map(lambda text: embedding(server, text), TEXTS)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert server.end() == 0


def test_what_needs_a_store_is_refused_with_the_reason(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    model = random_models.make_encoder(tmp_path / "m")
    run = launch("--pd", "1:1", "--model", model, "--max-model-len", "512", "--elastic")
    until(lambda: run.process.poll() is not None, "it has ended", 120)
    said = run.errors.read_text()
    assert run.process.returncode == 2, said
    assert said.startswith("banaserve: "), said
    assert "pools" in said
    assert said.count("\n") == 1
    run.check_nothing_left()
