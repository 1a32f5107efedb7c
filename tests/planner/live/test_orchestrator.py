"""The orchestrator on real engines: modules move by themselves, no token changes.

Greedy, float32, SmolLM2, one server with two prefill instances and a decode instance whose KV cache
is too small for the load; what has moved away is poisoned with NaN at its source.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import migration_load as loads
from answers_before import Before
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import DecisionRecord, WantedStep
from banaserve.contracts.migration_api import Return
from banaserve.frontdoor.admin_client import AdminClient
from observing import until
from server_run import Run

pytestmark = pytest.mark.e2e

KV_BYTES = 96 << 20
"""About 2,200 tokens."""
POLICY = {
    "rho": 0,
    "delta_up": 0.1,
    "delta_down": 0.05,
    "delta_layers": 0.05,
    "delta_heads": 0.05,
    "dwell_s": 1,
    "min_per_role": 2,  # of two prefill instances neither may go over to decode
}
OPTIONS = (
    *("--pd", "2:1", "--dtype", "float32", "--max-model-len", "1024", "--migration-poison"),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
    *("--prefill-max-num-batched-tokens", "1024", "--prefill-max-num-seqs", "16"),
    *("--decode-max-num-batched-tokens", "512", "--decode-max-num-seqs", "64"),
    *("--orchestrator", "on", "--orchestrator-interval", "0.5"),
    *(w for key, value in POLICY.items() for w in ("--orchestrator-option", f"{key}={value}")),
)


@pytest.fixture(scope="module")
def decision_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orchestrator") / "decisions.jsonl"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], decision_log: Path) -> Iterator[Run]:
    run = serve(*OPTIONS, "--decision-log", str(decision_log))
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def admin(server: Run) -> AdminClient:
    client = AdminClient(*find_admin(server.run_dir))
    client.set_paused(True)
    return client


@pytest.fixture(scope="module")
def before(server: Run, admin: AdminClient) -> Before:
    return Before(server)


def begun(decisions: list[DecisionRecord]) -> list[tuple[DecisionRecord, WantedStep]]:
    return [(one, step) for one in decisions for step in one.steps if not step.held]


def test_a_hot_instance_gives_modules_away_by_itself(server, admin, before, decision_log):
    assert begun(admin.decisions()) == []  # it has been paused
    with loads.streaming(server, before, 16) as load:
        until(
            lambda: any(step.held for one in admin.decisions() for step in one.steps),
            "the policy wants something while it may not",
        )
        admin.set_paused(False)
        until(
            lambda: any(
                step.result is not None and step.result.ending == "done"
                for _, step in begun(admin.decisions())
            ),
            "a step is done",
        )
        load.wait_tokens(80)
        admin.set_paused(True)
        until(
            lambda: all(step.result is not None for _, step in begun(admin.decisions())),
            "what was under way has ended",
        )
        load.wait_tokens(80)
        status = {one.id: one for one in admin.status().instances}
        until(
            lambda: any(step.result.changed for _, step in begun(admin.decisions())),
            "what it has changed is seen",
        )
        decision, step = begun(admin.decisions())[0]
        loads.done(admin, Return("d0"))
    assert status["d0"].away
    assert status["d0"].kv_blocks_gained > 0
    assert (step.kind, " from d0 to p" in step.what) in [("layers", True), ("heads", True)]
    assert decision.instances["d0"].memory > decision.instances["p0"].memory + POLICY["delta_up"]
    assert decision.gap > POLICY["delta_up"]
    assert decision.rejected
    assert step.predicted["d0"].kv_blocks > 0
    check_seen_from_outside(server, decision_log, step)


def check_seen_from_outside(server: Run, decision_log: Path, step: WantedStep) -> None:
    """The file, the metrics and the commands tell of it."""
    lines = decision_log.read_text().splitlines()
    told = [one for line in lines for one in json.loads(line)["steps"] if one["result"]]
    assert step.what in [one["what"] for one in told]
    assert server.metric("banaserve_orchestrator_steps_total", ending="done", kind=step.kind) >= 1
    assert server.metric("banaserve_orchestrator_restarts_total") == 0
    assert server.metric("banaserve_steps_total", instance_id="d0") > 50
    assert server.metric("banaserve_prediction_error_fraction", model="step", instance_id="d0") > 0
    command = [sys.executable, "-m", "banaserve", "decisions", "--last", "500"]
    ran = subprocess.run(
        [*command, "--run-dir", str(server.run_dir)], capture_output=True, text=True, check=True
    )
    assert f"begins: {step.what}" in ran.stdout
