"""vLLM's engine: its front-end client, the engine core and the hooks in both."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import (
    IterationStats,
    MultiModalCacheStats,
    PrefillStats,
    RequestStateStats,
    SchedulerStats,
)
from vllm.v1.outputs import LogprobsLists
from vllm.v1.structured_output import StructuredOutputManager

from banaserve.base.config.serve_config import Budget
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.contracts.trace_events import EngineAnswer
from banaserve.engine.compat.config import VllmConfig, own_budget
from banaserve.engine.compat.requests import RequestOutput
from banaserve.engine.continuation import output_of

__all__ = [
    "AsyncLLM",
    "EngineCore",
    "EngineCoreOutput",
    "EngineCoreProc",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineHandshakeMetadata",
    "EngineZmqAddresses",
    "FinishReason",
    "IterationStats",
    "MultiModalCacheStats",
    "PrefillStats",
    "PrometheusStatLogger",
    "RequestOutputCollector",
    "RequestStateStats",
    "SchedulerStats",
]

PRE_IMPORTED = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
)
"""Modules that an engine core on a CPU needs, in import order."""


def override_kernels() -> None:
    """Replace Triton's kernels by vLLM's C++ kernels where Triton cannot run, for all forks too.

    Called once in the engine parent, since vLLM searches all names of all modules for it: more than
    half a second that each engine would take.
    """
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None  # type: ignore[method-assign]


def mark_dead(llm: AsyncLLM) -> None:
    """Make every request and call on this engine, and later ones, fail with ``EngineDeadError``."""
    llm.engine_core.resources.engine_dead = True
    for answer in llm.engine_core.utility_results.values():
        if not answer.done():
            answer.set_exception(EngineDeadError())
    llm.output_processor.propagate_error(EngineDeadError())
    llm.output_processor.request_states.clear()  # a late output must change no state


def start_output_handler(llm: AsyncLLM) -> None:
    """Start reading the engine's outputs on the running event loop."""
    llm.engine_core._ensure_output_queue_task()
    llm._run_output_handler()


def request_ids(llm: AsyncLLM) -> list[str]:
    """Return the ids, as clients know them, of the requests on this engine."""
    return list(llm.output_processor.external_req_ids)


def request_state(llm: AsyncLLM, request_id: str) -> Any | None:
    """Return a request's front-end state (detokenizer, logprobs, queue); None once it has ended."""
    return llm.output_processor.request_states.get(request_id)


async def submit(
    llm: AsyncLLM,
    request: EngineCoreRequest,
    prompt_text: str | None,
    queue: RequestOutputCollector,
    stats: RequestStateStats,
) -> None:
    """Register a prepared request with the front-end state and send it to the engine core."""
    register(llm, request, prompt_text, queue, stats)
    await send(llm, request)


def register(
    llm: AsyncLLM,
    request: EngineCoreRequest,
    prompt_text: str | None,
    queue: RequestOutputCollector,
    stats: RequestStateStats,
    on_first_token: Callable[[], None] | None = None,
    prefilled: RequestOutput | None = None,
) -> Any:
    """Make the front-end state of a request without sending it; returns the state.

    Args:
        stats: Statistics that replace the state's own.
        on_first_token: Function called once, before the first token is passed to ``queue``; to an
            answer that is not streamed the first token is passed only with the last.
        prefilled: Output of the prefill leg, with the numbers of cached and of created tokens to
            report: for the decode leg, all tokens are cached. None for none.
    """
    llm.output_processor.add_request(request, prompt_text, None, 0, queue)
    state = llm.output_processor.request_states[request.request_id]
    state.stats = stats
    if prefilled is not None:
        state.remote_prefill_cached_tokens = prefilled.num_cached_tokens or 0
    if on_first_token is not None or prefilled is not None:
        _prepare_first_token(state, on_first_token, prefilled)
    return state


def _prepare_first_token(
    state: RequestState, on_first_token: Callable[[], None] | None, prefilled: RequestOutput | None
) -> None:
    make = state.make_request_output

    def first(new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        if new_token_ids:
            del state.make_request_output  # the class's own from here on
            if prefilled is not None:  # with the token the state has taken the engine's number
                state.num_cache_creation_tokens = prefilled.num_cache_creation_tokens or 0
            if on_first_token is not None:
                on_first_token()
        return make(new_token_ids, *args, **kwargs)

    state.make_request_output = first  # type: ignore[method-assign]


def adopt(
    llm: AsyncLLM, state: RequestState, request_id: str, queue: RequestOutputCollector
) -> None:
    """Route an engine's outputs into the state of a request that began elsewhere.

    Args:
        request_id: Id of the request in the engine's outputs.
        queue: Queue that replaces the state's own.
    """
    state.request_id, state.queue = request_id, queue
    processor = llm.output_processor
    processor.request_states[state.request_id] = state
    processor.external_req_ids[state.external_req_id].append(state.request_id)


def output_tokens(state: RequestState) -> list[int]:
    """Return the tokens output so far for the request of a front-end state."""
    assert state.detokenizer is not None, "only a pooling request has none"
    return list(state.detokenizer.output_token_ids)


async def send(llm: AsyncLLM, request: EngineCoreRequest) -> None:
    """Send a request, whose front-end state exists already, to the engine core."""
    await llm.engine_core.add_request_async(request)


async def drop(llm: AsyncLLM, request_id: str) -> None:
    """End a request in the engine core, without a last output; call ``forget`` before."""
    await llm.engine_core.abort_requests_async([request_id])


async def call_utility(llm: AsyncLLM, name: str, *args: Any) -> Any:
    """Call a method that ``add_utility`` added to the engine core; it runs between two steps."""
    return await llm.engine_core.call_utility_async(name, *args)


def forget(llm: AsyncLLM, request_id: str) -> None:
    """Remove a request from an engine that has died or was left; the request's state stays.

    An abort would make a last output: text held back for stop strings would count as sent.
    """
    processor = llm.output_processor
    if (state := processor.request_states.pop(request_id, None)) is not None:
        ids = processor.external_req_ids[state.external_req_id]
        ids.remove(request_id)
        if not ids:
            del processor.external_req_ids[state.external_req_id]
        processor.lora_states.request_finished(request_id, state.lora_name)


def put_first_token(
    llm: AsyncLLM,
    request_id: str,
    token_id: int,
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
    prefill_stats: PrefillStats,
    iteration: IterationStats,
    logprobs: tuple[list[int], list[float], int] | None = None,
    weight_version: str | None = None,
) -> bool:
    """Pass a token sampled elsewhere through detokenizer and stop checks to the client.

    Args:
        iteration: Statistics, still empty, that count the token.
        logprobs: Token ids and log probabilities of the token's position, the token itself first,
            and the token's rank.
        weight_version: vLLM's label of the weights that sampled the token; None for none.

    Returns:
        True if the request continues.
    """
    rows = None
    if logprobs is not None:
        token_ids, values, rank = logprobs
        rows = LogprobsLists(
            np.array([token_ids]), np.array([values], np.float32), np.array([rank])
        )
    output = EngineCoreOutput(
        request_id=request_id,
        new_token_ids=[token_id],
        new_logprobs=rows,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        prefill_stats=prefill_stats,
    )
    processor = llm.output_processor
    processor.process_outputs([output], time.monotonic(), iteration, weight_version)
    if llm.logger_manager is not None:
        llm.logger_manager.record(scheduler_stats=None, iteration_stats=iteration)
    return request_state(llm, request_id) is not None


def install_prompt_ending() -> None:
    """Make SIGTERM end engine cores of this process like a death, after the step under way.

    vLLM would first end all their answers as aborted, which clients cannot distinguish from
    complete answers. The front door learns of a death at once, and streams continue elsewhere.
    """
    EngineCoreProc._handle_shutdown = _goes_on
    EngineCoreProc._reject_add_in_shutdown = _take


def install_output_guard() -> None:
    """Make engine cores of this process end if the thread that sends their outputs fails.

    vLLM's core would serve on without an answer to anybody, for instance after a call whose result
    cannot be encoded.
    """
    send = EngineCoreProc.process_output_sockets

    @functools.wraps(send)
    def send_or_end(core: EngineCoreProc, *args: Any) -> None:
        try:
            send(core, *args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    EngineCoreProc.process_output_sockets = send_or_end


def _goes_on(core: EngineCoreProc) -> bool:
    if core.shutdown_state is EngineShutdownState.RUNNING:
        return True
    core._send_engine_dead()
    return False


def _take(core: EngineCoreProc, request: EngineCoreRequest) -> bool:
    """Accept a request during shutdown, which then dies with the others.

    A refusal would be an aborted answer too.
    """
    return False


def install_continuation() -> None:
    """Make engine cores of this process accept requests with earlier output as their own output.

    The output is added where requests are read, on a separate thread: a grammar may take a while.
    """
    preprocess = EngineCore.preprocess_add_request

    @functools.wraps(preprocess)
    def preprocess_and_continue(core: EngineCore, request: EngineCoreRequest) -> Any:
        made, wave = preprocess(core, request)
        if tokens := output_of(request.sampling_params):
            _put_back(core.structured_output_manager, made, tokens)
        return made, wave

    EngineCore.preprocess_add_request = preprocess_and_continue  # type: ignore[method-assign, assignment]


def _put_back(grammars: Any, request: Any, tokens: Sequence[int]) -> None:
    """Add a request's output; with a grammar token by token, as a scheduler would."""
    if len(tokens) > 1:  # blocks of its output are cached too; its prompt was counted elsewhere
        request.prefill_stats = None
    if not request.use_structured_output:
        request.append_output_token_ids(list(tokens))
        return
    structured = request.structured_output_request
    if isinstance(structured._grammar, concurrent.futures.Future):
        structured._grammar.exception()  # waits
    compiled = not isinstance(structured.grammar, Exception)
    for token in tokens:
        request.append_output_token_ids(token)
        if compiled and not grammars.accept_tokens(request, [token]):
            # The scheduler ends a request whose grammar is an error, with that error.
            structured.grammar = ValueError(f"the grammar does not allow its output {tokens}")
            return


class BackendsByRequest(StructuredOutputManager):
    """Manager that compiles each grammar with the backend that the front door found for it.

    vLLM's manager keeps the backend of its first request: the grammars that an engine can compile
    would depend on its earlier requests, and differ between the engines of a request's legs. All
    backends fill masks of the same form.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._backends: dict[str | None, Any] = {}

    def grammar_init(self, request: Any) -> None:
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        # The scheduler's thread and compilations of earlier requests read ``backend`` meanwhile.
        chosen = copy.copy(self)
        chosen.backend = self._backends.get(name)
        StructuredOutputManager.grammar_init(chosen, request)  # makes a backend that is missing
        self.backend = self._backends[name] = chosen.backend

    def clear_backend(self) -> None:
        backends = [one for one in self._backends.values() if one is not self.backend]
        self._backends.clear()
        super().clear_backend()
        for one in backends:
            one.destroy()


def install_backends() -> None:
    """Make engine cores of this process compile grammars with the backend of each request."""
    vllm_core.StructuredOutputManager = BackendsByRequest  # type: ignore[misc]


def add_utility(name: str, utility: Callable[..., Any]) -> None:
    """Make engine cores of this process answer ``call_utility(name)``.

    The core is the first argument of ``utility``.
    """
    setattr(EngineCore, name, utility)


def install_utilities() -> None:
    """Make engine cores of this process accept another budget, and return notes of requests."""
    add_utility(CoreApi.banaserve_set_budget.__name__, _set_budget)
    add_utility(CoreApi.banaserve_notes.__name__, _notes)


def on_wake(woke: Callable[[], None]) -> None:
    """Call ``woke`` whenever an engine core of this process gets work after having none."""
    wait_for_work = EngineCoreProc._process_input_queue

    @functools.wraps(wait_for_work)
    def wait_and_tell(core: EngineCoreProc) -> None:
        had_work = core.has_work()
        wait_for_work(core)
        if not had_work:
            woke()

    EngineCoreProc._process_input_queue = wait_and_tell


def run_engine_core(config: VllmConfig, handshake_address: str) -> None:
    """Run an engine core in this process until it ends or fails."""
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=handshake_address,
        executor_class=Executor.get_class(config),
        log_stats=True,
    )


@implements(CoreApi.banaserve_set_budget)
def _set_budget(core: EngineCore, num_tokens: int, num_requests: int) -> Budget:
    # Requests that run already continue: the limit applies when a request is admitted.
    scheduler = _scheduler(core)
    most_tokens, most_requests = own_budget(scheduler.vllm_config)
    scheduler.max_num_scheduled_tokens = min(num_tokens, most_tokens)
    scheduler.max_num_active_reqs = min(num_requests, most_requests)
    if (connector := _store_connector(core)) is not None:
        connector.limit_steps(scheduler.max_num_scheduled_tokens)
    return Budget(scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs)


@implements(CoreApi.banaserve_notes)
def _notes(core: EngineCore, names: list[str]) -> EngineAnswer | None:
    connector = _store_connector(core)
    return None if connector is None else connector.notes_of(names)


def _store_connector(core: EngineCore) -> Any:
    """Return the store's connector; None if there is none, or the user's own connector."""
    scheduler = _scheduler(core)
    config = scheduler.vllm_config.kv_transfer_config
    is_ours = config is not None and config.kv_connector in ("StoreConnector", "StatesConnector")
    return scheduler.connector if is_ours else None


def _scheduler(core: EngineCore) -> Scheduler:
    """Return the core's scheduler: vLLM's own, or a subclass of it."""
    return cast(Scheduler, core.scheduler)
