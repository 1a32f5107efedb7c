"""The orchestrator on real engines: roles switch and modules move by themselves, no token changes.

Greedy, float32, SmolLM2, one server with two prefill instances and a decode instance whose KV cache
is too small for the load; what has moved away is poisoned with NaN at its source.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import migration_load as loads
import small_model
from banaserve import models
from banaserve.api.admin_client import AdminClient
from banaserve.bench.datasets import prompts
from banaserve.bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve.controller.schemas import DecisionRecord, RoleRequest, WantedStep
from banaserve.engine.interface import RoleChange
from banaserve.engine.vllm.migration.api import Return
from banaserve.errors import UserError
from banaserve.run_dir import find_admin
from observing import until
from reference import tokenizer
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


def _groups(count: int) -> list[range]:
    return [range(first, min(first + 5, count)) for first in range(0, count, 5)]


class Before:
    """Prompts, and what the server answers while nothing has moved."""

    def __init__(self, server: Run) -> None:
        tokenize = tokenizer(small_model.resolve().path_or_id)
        found = prompts.prompts("synthetic", 10, 40, 160, 5, tokenize)
        found += prompts.prompts("synthetic", 4, 200, 350, 6, tokenize)
        self.prompts = [tokenize(prompt.text) for prompt in found]
        self.tokens = asyncio.run(self._ask(server))

    async def _ask(self, server: Run) -> list[list[int]]:
        answers = []
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:
            for some in _groups(len(self.prompts)):
                answers += await asyncio.gather(*(self._answer(client, n) for n in some))
        assert [answer.error for answer in answers if answer.error] == []
        return [list(answer.token_ids) for answer in answers]

    async def _answer(self, client: OpenAiClient, number: int) -> RequestRecord:
        prompt, extra = self.prompts[number], {"ignore_eos": True}
        call = CompletionCall(
            str(number), prompt=prompt, max_tokens=loads.OUTPUT_TOKENS, extra=extra
        )
        return await client.send(call)


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


def switched(admin: AdminClient, instance: str, role: str) -> RoleChange:
    change = admin.begin_role(RoleRequest(instance, role, 100.0))
    while change.is_open:
        change = admin.show_role(change.id, wait_s=10.0)
    assert (change.state, change.num_left) == ("done", 0), change
    return change


def tokens_of(server: Run, instance: str) -> float:
    return server.metric("vllm:generation_tokens_total", instance_id=instance)


def roles(admin: AdminClient) -> dict[str, str]:
    return {one.id: one.role for one in admin.status().instances}


def test_a_role_switches_under_streams_and_back(server, admin, before):
    with loads.streaming(server, before, 5) as load:
        switched(admin, "p1", "decode")
        assert roles(admin) == {"p0": "prefill", "p1": "decode", "d0": "decode"}
        with pytest.raises(UserError, match="only one that serves prefill"):
            admin.begin_role(RoleRequest("p0", "decode"))
        enough = tokens_of(server, "p1") + 40
        until(lambda: tokens_of(server, "p1") >= enough, "p1 decodes")
        load.wait_tokens(60)
        switched(admin, "p1", "prefill")
        assert roles(admin) == {"p0": "prefill", "p1": "prefill", "d0": "decode"}
        load.wait_tokens(60)
    assert server.metric("banaserve_instance_ready", instance_id="p1", role="prefill") == 1
    assert server.metric("banaserve_leg_retries_total") == 0
    assert server.metric("banaserve_instance_restarts_total") == 0


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
