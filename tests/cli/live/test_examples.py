"""The examples that serve: run as their README says, with options that fit a small machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from installed_packages import install_example

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("--kv-cache-memory-bytes", str(512 << 20))
DEADLINE_S = 400


def ran(name: str, *options: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def server(serve: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A server with the policy and the tier of the examples."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("routing_policy", "store_tier"):
        install_example(EXAMPLES / name, folder)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    options = ("--routing-policy", "sticky", "--routing-option", "max_lead_requests=1")
    tier = ("--kv-store-distributed", "dictionary://?size=64MiB")
    run = serve(*options, *tier, env={"PYTHONPATH": path})
    yield run
    assert run.end() == 0


def test_the_policy_and_the_tier_of_the_examples_serve(server) -> None:
    prompt = list(range(200, 600))
    answer = server.client().completions.create(
        model="smollm2-135m", prompt=prompt, max_tokens=2, temperature=0.0
    )
    assert answer.usage.completion_tokens == 2
    asked = [sys.executable, "-m", "banaserve", "trace", answer.id]
    asked += ["--run-dir", str(server.run_dir)]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "routed to p0 then d0 by sticky (example-sticky-routing 1.0) (two_legs)" in shown
    assert server.metric("banaserve_kvstore_tier_available", tier="dictionary") == 1


def test_layers_are_moved_and_returned_under_a_stream(server) -> None:
    shown = ran("migrate_by_api.py", "--run-dir", str(server.run_dir), "--tokens", "400")
    before, away, home = re.split(r"away, .*\n|home again:\n", shown)
    assert "d0: all 30 layers at home" in before
    assert re.search(r"d0: .* at p0", away)
    assert "d0: all 30 layers at home" in home
    assert "the stream has ended after 400 tokens" in home


def test_one_to_one_is_served_from_python(free_port: Callable[[], int]) -> None:
    light = ("--kv-store-size", "256MiB", "--dtype", "float32")
    shown = ran("serve_one_to_one.py", *SMALL, *light, "--port", str(free_port()))
    assert "answer: " in shown
    assert "Paris" in shown
    assert re.search(r"its path: banaserve trace chatcmpl-\w+", shown)


def test_a_second_vllm_reads_what_the_first_has_computed(free_port: Callable[[], int]) -> None:
    light = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
    # One process less that imports vLLM again: the worker is in the engine's, if both say so.
    light += ("--distributed-executor-backend", "uni", "--port", str(free_port()))
    shown = ran("connector_only.py", *SMALL, *light, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    cached = re.findall(r"(\w+) server: (\d+) of (\d+) prompt tokens cached", shown)
    assert [name for name, *_ in cached] == ["first", "second"]
    (_, first, _), (_, second, num_tokens) = cached
    assert int(first) == 0
    assert int(second) > int(num_tokens) - 129
    answers = re.findall(r"answer: (.*)", shown)
    assert answers[0] == answers[1]
