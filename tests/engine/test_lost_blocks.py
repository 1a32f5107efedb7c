"""Blocks that could not be fetched: vLLM's schedulers over a connector whose store has died.

The worker is a double whose KV is the token of each place: it says which tokens it has read.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.scheduler import install_losses
from banaserve.migration.host.recovery import AsyncPoolScheduler, PoolScheduler
from test_preble_scheduler import BLOCK, config_of, scheduler_of

PROMPT = list(range(100, 100 + 20 * BLOCK))
"""Longer than a step."""
STORED_TOKENS = 19 * BLOCK
RIGHT, WRONG = 7, 8


class Connector:
    """A connector of a store that has the first blocks of every prompt, until it dies.

    Attributes:
        is_lost: True once what it has promised cannot be fetched.
        lost_life: Life of the KV that is lost with a guest; None while none is.
    """

    requires_kv_delivery = supports_divergent_local_hybrid_hits = False
    is_lost = False
    lost_life: int | None = None

    def __init__(self) -> None:
        self.loads: list[tuple[list[int], list[int]]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        is_stored = request.num_tokens > STORED_TOKENS
        reads = is_stored and not request.skip_reading_prefix_cache
        return max(0, STORED_TOKENS - num_computed) if reads else 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_tokens: int) -> None:
        if num_tokens:
            (ids,) = blocks.get_block_ids()
            first = (STORED_TOKENS - num_tokens) // BLOCK
            self.loads.append((ids[first : STORED_TOKENS // BLOCK], request.all_token_ids[:]))

    def build_connector_meta(self, output: Any) -> Any:
        loads, self.loads = self.loads, []
        return loads

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Worker:
    """A worker that computes the steps in their order."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._kv: dict[int, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def run(self, plan: Any) -> ModelRunnerOutput:
        computed, failed = self._take(plan), set[int]()
        for blocks, tokens in plan.kv_connector_metadata:
            first = STORED_TOKENS // BLOCK - len(blocks)
            for place, block in enumerate(blocks, first):
                if self._connector.is_lost:
                    failed.add(block)
                else:
                    self._kv[block] = tokens[place * BLOCK : (place + 1) * BLOCK]
        names, sampled = list(plan.num_scheduled_tokens), []
        for name in names:
            tokens, end = self._tokens[name], computed[name] + plan.num_scheduled_tokens[name]
            assert end <= len(tokens), "a step computes tokens that are not known"
            for place in range(computed[name], end):
                kv = self._kv.setdefault(self._blocks[name][place // BLOCK], [0] * BLOCK)
                kv[place % BLOCK] = tokens[place]
            read = [token for block in self._blocks[name] for token in self._kv.get(block, [])]
            sampled.append([RIGHT if read[:end] == tokens[:end] else WRONG])
            if end < len(tokens):
                sampled[-1] = []
            tokens += sampled[-1]
        output = ModelRunnerOutput(
            names,
            {name: place for place, name in enumerate(names)},
            sampled,
            kv_connector_output=KVConnectorOutput(invalid_block_ids=failed),
        )
        life = runner_hooks.kv_life_of(plan)
        if life is not None and life == self._connector.lost_life:
            output.sampled_token_ids = [[WRONG] * len(one) for one in sampled]
            runner_hooks.set_lost_life(output, life)
        return output

    def _take(self, plan: Any) -> dict[str, int]:
        computed, cached = {}, plan.scheduled_cached_reqs
        for new in plan.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self._blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        for place, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[place]
            (more,) = cached.new_block_ids[place] or ([],)
            if name in cached.resumed_req_ids:
                self._tokens[name], self._blocks[name] = list(cached.all_token_ids[name]), []
            self._blocks[name] = [*self._blocks[name], *more]
        return computed


class Engine:
    """A scheduler and a worker; an asynchronous one plans a step while another one runs."""

    def __init__(self, is_async: bool, num_blocks: int = 100) -> None:
        config = config_of(is_async=is_async, max_requests=4)
        kind = AsyncPoolScheduler if is_async else PoolScheduler
        self.scheduler = scheduler_of(config, kind, num_blocks)
        self.connector = self.scheduler.connector = Connector()
        self._worker = Worker(self.connector)
        self._hasher = compat.block_hasher(config, BLOCK)
        self._num_ahead = int(is_async)
        self._planned: deque[Any] = deque()
        self.requests: dict[str, Request] = {}

    def ask(self, name: str, prompt: list[int] = PROMPT, num_output: int = 40) -> None:
        if name not in self.requests:
            sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
            request = Request(name, prompt, sampling, None, block_hasher=self._hasher)
            self.requests[name] = request
            self.scheduler.add_request(request)

    def step(self, meanwhile: Any = lambda: None) -> None:
        """Plan steps and end the first one; ``meanwhile`` is what happens while it runs."""
        while len(self._planned) <= self._num_ahead:
            self._planned.append(self.scheduler.schedule())
            meanwhile()
        plan = self._planned.popleft()
        if plan.total_num_scheduled_tokens:
            self.scheduler.update_from_output(plan, self._worker.run(plan))

    def run(self) -> dict[str, set[int]]:
        """Run until all requests have ended; return the kinds of tokens of each."""
        for _ in range(500):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is never given away
        return {name: set(one.output_token_ids) for name, one in self.requests.items()}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_handle_invalid_blocks", Scheduler._handle_invalid_blocks)
    install_losses()


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


def test_what_is_fetched_is_read(engine: Engine) -> None:
    engine.ask("a")
    engine.ask("b", [*PROMPT, 5])
    assert engine.run() == {"a": {RIGHT}, "b": {RIGHT}}


def test_requests_that_share_lost_blocks_are_computed_again(engine: Engine) -> None:
    """One that is planned beside the step that loses them, too."""
    engine.connector.is_lost = True
    engine.ask("a")
    engine.ask("b", [*PROMPT, 5])
    engine.step(lambda: engine.ask("c", [*PROMPT, 6]))
    assert engine.run() == {"a": {RIGHT}, "b": {RIGHT}, "c": {RIGHT}}


def test_nobody_reads_the_blocks_of_a_request_that_has_ended_meanwhile(engine: Engine) -> None:
    engine.connector.is_lost = True
    engine.ask("a", num_output=2)
    engine.step(lambda: engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED))
    del engine.requests["a"]
    engine.ask("b")
    assert engine.run() == {"b": {RIGHT}}


@pytest.mark.parametrize("has_guest", [False, True], ids=["store", "guest"])
def test_a_request_that_is_preempted_meanwhile_is_computed_again(has_guest: bool) -> None:
    """The step after the one that loses its KV has no block left for another request."""
    engine = Engine(is_async=True, num_blocks=2 + len(PROMPT) // BLOCK)
    engine.connector.is_lost = not has_guest
    engine.ask("first", PROMPT[: BLOCK - 1])
    engine.step(lambda: engine.ask("a", num_output=8))
    engine.connector.lost_life = 0 if has_guest else None
    engine.step()
    assert engine.requests["a"].num_preemptions == 1
    assert engine.run() == {"first": {RIGHT}, "a": {RIGHT}}
