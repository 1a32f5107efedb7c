"""What an engine may do in one step, changed while vLLM's own scheduler serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.base.config.serve_config import Budget, ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.types import Role
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat import engine as compat
from banaserve.serving.launch.engine_settings import Budgets
from engine_steps import Load, _scheduler

STEP_TOKENS, REQUESTS = 64, 4
SET_BUDGET = "banaserve_set_budget"


def config(**changes: Any) -> Any:
    scheduler = {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 128,
        "max_num_scheduled_tokens": None,
        "max_num_active_seqs": None,
        **changes,
    }
    return SimpleNamespace(scheduler_config=SimpleNamespace(**scheduler))


def test_what_is_not_given_is_the_engines_own() -> None:
    prefill = Budget(num_requests=8)
    budgets = Budgets({Role.PREFILL: prefill, Role.DECODE: Budget()}, config())
    assert budgets.of_role(Role.PREFILL) == Budget(2048, 8)
    assert budgets.of_role(Role.DECODE) == Budget(2048, 128)
    assert budgets.of_role(Role.COLOCATED) == Budget(2048, 128)
    served = ServeConfig(decode_budget=Budget(256))
    assert Budgets.of(served, config()).of_role(Role.DECODE) == Budget(256, 128)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Budget(4096), "--decode-max-num-batched-tokens 4096 .* --max-num-batched-tokens 4096"),
        (Budget(0, 256), "--decode-max-num-seqs 256 .* --max-num-seqs 256"),
        (Budget(64), "64 is below --decode-max-num-seqs 128"),
    ],
)
def test_budgets_that_no_engine_can_keep(given: Budget, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Budgets({Role.DECODE: given}, config())


async def test_an_engine_is_asked_only_where_a_budget_was_given() -> None:
    asked: list[tuple[object, ...]] = []

    async def utility(name: str, tokens: int, requests: int) -> object:
        asked.append((name, tokens, requests))
        return {"type": "Answered", "value": {"num_tokens": tokens, "num_requests": requests}}

    llm = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=utility))
    await Budgets({}, config()).give(llm, Role.PREFILL)
    assert asked == []
    budgets = Budgets({Role.PREFILL: Budget(1024, 16)}, config())
    for role in (Role.PREFILL, Role.DECODE):
        await budgets.give(llm, role)
    assert asked == [(SET_BUDGET, 1024, 16), (SET_BUDGET, 2048, 128)]


class Serving:
    """vLLM's scheduler with requests under way; only the model is left out."""

    def __init__(self, requests: list[tuple[int, int]]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.scheduler = _scheduler(Load("budgets", STEP_TOKENS, REQUESTS, 1000, ()))
        compat.install_utilities()
        self.requests = {}
        for number, (prompt, output) in enumerate(requests):
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            request = Request(str(number), [number + 1] * prompt, sampling, None)
            self.requests[str(number)] = request
            self.scheduler.add_request(request)

    def set_budget(self, tokens: int, requests: int) -> Budget:
        from vllm.v1.engine.core import EngineCore

        core = SimpleNamespace(scheduler=self.scheduler)
        asked = call(CoreApi.banaserve_set_budget, tokens, requests)
        return asked.read(getattr(EngineCore, asked.name)(core, *asked.args))

    def step(self) -> dict[str, int]:
        """Tokens by request."""
        from vllm.v1.outputs import ModelRunnerOutput

        plan = self.scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        requests = [self.requests[name] for name in names]
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(plan, ModelRunnerOutput(names, places, sampled))
        return dict(plan.num_scheduled_tokens)


@pytest.mark.e2e
def test_a_budget_holds_from_the_next_step_on_and_stops_nothing_that_runs() -> None:
    serving = Serving([(20, 8), (20, 8), (90, 6), (5, 3)])
    assert sum(serving.step().values()) == STEP_TOKENS
    running = {request.request_id for request in serving.scheduler.running}
    assert len(running) == 3
    assert serving.set_budget(16, 1) == Budget(16, 1)
    seen: set[str] = set()
    while not all(serving.requests[name].is_finished() for name in running):
        planned = serving.step()
        assert 0 < sum(planned.values()) <= 16
        seen |= set(planned)
    # Nobody is let in while more than one runs.
    assert seen == running
    while not serving.requests["3"].is_finished():
        assert set(serving.step()) == {"3"}


@pytest.mark.e2e
def test_the_stores_connector_hears_how_long_steps_are() -> None:
    """It predicts what one step computes while it fetches."""
    serving, told = Serving([]), []
    serving.scheduler.vllm_config.kv_transfer_config = SimpleNamespace(
        kv_connector="StoreConnector"
    )
    serving.scheduler.connector = SimpleNamespace(limit_steps=told.append)
    serving.set_budget(16, 1)
    serving.set_budget(10_000, 1)
    assert told == [16, STEP_TOKENS]


@pytest.mark.e2e
def test_more_than_the_runner_has_buffers_for_is_cut() -> None:
    serving = Serving([(90, 2)] * 6)
    serving.set_budget(16, 1)
    assert serving.set_budget(10_000, 10_000) == Budget(STEP_TOKENS, REQUESTS)
    while serving.scheduler.has_requests():
        serving.step()
        assert len(serving.scheduler.running) <= REQUESTS
