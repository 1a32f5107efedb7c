"""Paced engines of two profiles: one server, each instance in its own time, equal tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.pacing import miniatures
from banaserve.pacing.step_log import readers
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from depth import chosen_seed
from fork_server import ForkServer
from observing import until
from reference import reference_tokens
from server_run import Run

pytestmark = pytest.mark.e2e

PROFILE = profiles.load("opt-13b-a100")
OUTPUT_TOKENS = 24
SAMPLING = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
SLOWER = 3.0


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same GPU with memory that is read at a third of the speed: prompts hardly suffer."""
    text = (profiles.BUILT_IN / f"{PROFILE.name}.toml").read_text()
    text = text.replace(f'name = "{PROFILE.name}"', 'name = "slow-memory"')
    before, decode = text.split("[decode.small]")
    decode, after = decode.split("[memory]")
    lines = []
    for line in decode.splitlines():
        key, is_value, value = line.partition(" = ")
        if is_value and key != "from_batch":
            line = f"{key} = {SLOWER * float(value)}"
        lines.append(line)
    path = tmp_path_factory.mktemp("profile") / "slow-memory.toml"
    path.write_text(f"{before}[decode.small]" + "\n".join(lines) + f"\n[memory]{after}")
    return path


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], slow: Path) -> Run:
    """``c1`` has the slow memory; what both do is left to the elastic policy."""
    return serve(
        *("--model", MINIATURE, "--pace", f"{PROFILE.name},{slow}", "--instances", "2"),
        *("--slo-ttft", "2", "--slo-tpot", "0.05", "--kv-store-size", "128MiB"),
    )


def calls_of(prompts: list[list[int]]) -> list[CompletionCall]:
    return [
        CompletionCall(str(i), prompt=tokens, max_tokens=OUTPUT_TOKENS, extra={"ignore_eos": True})
        for i, tokens in enumerate(prompts)
    ]


def ask(server: Run, prompts: list[list[int]], concurrency: int) -> list[list[int]]:
    async def run() -> list[list[int]]:
        name = f"paced-{PROFILE.name}"
        async with OpenAiClient(server.url, name, return_token_ids=True) as client:
            records = await closed_loop(client, calls_of(prompts), concurrency=concurrency)
        assert [record.error for record in records] == [None] * len(records)
        return [record.token_ids for record in records]

    return asyncio.run(run())


def test_each_instance_takes_the_time_of_its_own_device_and_the_plan_knows_which(
    server: Run, fork_server: ForkServer, slow: Path
) -> None:
    draws = random.Random(chosen_seed(7))
    prompts = [draws.choices(range(500, 40_000), k=n) for n in (40, 700, 257, 1200, 90, 400)]
    model = miniatures.resolve(PROFILE, print)
    wanted = reference_tokens(fork_server, model.path_or_id, prompts, {"it": SAMPLING})["it"]
    assert ", c1 slow-memory" in server.log_path.read_text()

    rounds = [ask(server, prompts, 4) for _ in range(3)]
    assert rounds == [wanted] * 3

    admin = AdminClient(*find_admin(server.run_dir))

    def orders() -> set[str]:
        """What has been looked at: which devices are to prefill."""
        words = [one.candidate for found in admin.decisions() for one in found.rejected]
        return {word.partition(", to prefill ")[2] for word in words if ", to prefill " in word}

    def has_planned() -> bool:
        ask(server, prompts, 4)
        return bool(orders())

    until(has_planned, "a plan has been made")
    assert orders() <= {f"the others, then {slow}", f"{slow}, then the others"}
    until(lambda: ask(server, prompts, 4) == wanted, "tokens stay what they are")

    steps = {log.instance_id: log.steps() for log in readers(server.run_dir)}
    assert sorted(steps) == ["c0", "c1"]
    for name, factor in (("c0", 1.0), ("c1", SLOWER)):
        alone = [one for one in steps[name] if one.decode_requests and not one.prefill_tokens]
        fixed_s = factor * PROFILE.decode_small.fixed_s
        assert all(one.modelled_s >= fixed_s for one in alone), name
        assert all(one.took_s >= one.modelled_s - 1e-6 for one in alone), name
        if name == "c0" and alone:
            assert min(one.modelled_s for one in alone) < 1.5 * fixed_s
    assert server.end() == 0
