"""vLLM's engine: its front-end client, the engine core and the hooks in both."""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector
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

from banaserve.config import Budget
from banaserve.engine.vllm.compat.config import VllmConfig, own_budget
from banaserve.engine.vllm.continuation import output_of
from banaserve.engine.vllm.rpc.engine_api import CoreApi
from banaserve.engine.vllm.rpc.typed_rpc import implements
from banaserve.engine.vllm.tracing.events import EngineAnswer

__all__ = [
    "PRE_IMPORTED",
    "AsyncLLM",
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
    "add_utility",
    "adopt",
    "call_utility",
    "drop",
    "forget",
    "install_continuation",
    "install_notes_utility",
    "mark_dead",
    "on_wake",
    "output_tokens",
    "override_kernels",
    "put_first_token",
    "register",
    "request_state",
    "run_engine_core",
    "send",
    "set_cached_tokens",
    "set_created_tokens",
    "start_output_handler",
    "submit",
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
"""Modules that an engine core on CPU needs, in the order in which they are imported."""


def override_kernels() -> None:
    """Put vLLM's C++ kernels in the place of Triton's where those cannot run, for all forks too.

    vLLM looks through all names of all modules for that: more than half a second for each engine.
    """
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None


def mark_dead(llm: AsyncLLM) -> None:
    """Make every request on this engine fail now with ``EngineDeadError``, and every later one."""
    llm.engine_core.resources.engine_dead = True
    llm.output_processor.propagate_error(EngineDeadError())
    llm.output_processor.request_states.clear()  # an output that comes late must change no state


def start_output_handler(llm: AsyncLLM) -> None:
    """Start reading the engine's outputs on the running event loop."""
    llm.engine_core._ensure_output_queue_task()
    llm._run_output_handler()


def request_state(llm: AsyncLLM, request_id: str) -> Any | None:
    """The front-end state (detokenizer, logprobs, queue) of a request, None once it has ended."""
    return llm.output_processor.request_states.get(request_id)


async def submit(
    llm: AsyncLLM,
    request: EngineCoreRequest,
    prompt_text: str | None,
    queue: RequestOutputCollector,
    stats: RequestStateStats,
) -> None:
    """Register a prepared request with the front-end state and send it to the engine core."""
    llm.check_admission(request_id=request.request_id)
    register(llm, request, prompt_text, queue, stats)
    await send(llm, request)


def register(
    llm: AsyncLLM,
    request: EngineCoreRequest,
    prompt_text: str | None,
    queue: RequestOutputCollector,
    stats: RequestStateStats,
    on_first_token: Callable[[], None] | None = None,
) -> Any:
    """Make the front-end state of a request without sending it; returns the state.

    Args:
        stats: Takes the place of the state's own.
        on_first_token: Called once, before its first token goes on to ``queue``; to an answer that
            is not streamed that happens only with the last one.
    """
    llm.output_processor.add_request(request, prompt_text, None, 0, queue)
    state = llm.output_processor.request_states[request.request_id]
    state.stats = stats
    if on_first_token is not None:
        _call_at_first_token(state, on_first_token)
    return state


def _call_at_first_token(state: Any, on_first_token: Callable[[], None]) -> None:
    make = state.make_request_output

    def first(new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        if new_token_ids:
            del state.make_request_output  # the class's own from here on
            on_first_token()
        return make(new_token_ids, *args, **kwargs)

    state.make_request_output = first


def adopt(llm: AsyncLLM, state: Any, request_id: str, queue: RequestOutputCollector) -> None:
    """Let an engine's outputs flow into the state of a request that began elsewhere.

    Args:
        state: As ``register`` returned it.
        request_id: The engine's outputs bear it.
        queue: Takes the place of the one that it has.
    """
    state.request_id, state.queue = request_id, queue
    processor = llm.output_processor
    processor.request_states[state.request_id] = state
    processor.external_req_ids[state.external_req_id].append(state.request_id)


def output_tokens(state: Any) -> list[int]:
    """Tokens that have been put out for the request of a front-end state."""
    return list(state.detokenizer.output_token_ids)


def set_cached_tokens(state: Any, num_tokens: int) -> None:
    """Let the client be told that so many tokens of the prompt were cached."""
    state.remote_prefill_cached_tokens = num_tokens


def set_created_tokens(state: Any, num_tokens: int) -> None:
    """Let the client be told that so many tokens of the prompt were computed and cached.

    From its first token on: with that the state takes over what the engine says.
    """
    state.num_cache_creation_tokens = num_tokens


async def send(llm: AsyncLLM, request: EngineCoreRequest) -> None:
    """Send a request to the engine core; its front-end state is there already."""
    await llm.engine_core.add_request_async(request)


async def drop(llm: AsyncLLM, request_id: str) -> None:
    """Let the engine core end a request without a word; its front-end state has been forgotten."""
    await llm.engine_core.abort_requests_async([request_id])


async def call_utility(llm: AsyncLLM, name: str, *args: Any) -> Any:
    """Ask the engine core what ``add_utility`` let it answer; between two of its steps."""
    return await llm.engine_core.call_utility_async(name, *args)


def forget(llm: AsyncLLM, request_id: str) -> None:
    """Take a request from an engine that has died, and leave its state as it is.

    An abort would make a last output: text held back for stop strings would count as sent.
    """
    processor = llm.output_processor
    if (state := processor.request_states.pop(request_id, None)) is not None:
        ids = processor.external_req_ids[state.external_req_id]
        ids.remove(request_id)
        if not ids:
            del processor.external_req_ids[state.external_req_id]


def put_first_token(
    llm: AsyncLLM,
    request_id: str,
    token_id: int,
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
    prefill_stats: PrefillStats,
    iteration: IterationStats,
    logprobs: tuple[list[int], list[float], int] | None = None,
) -> bool:
    """Pass a token sampled elsewhere through detokenizer and stop checks to the client.

    Args:
        iteration: Counts the token; empty before.
        logprobs: Token ids and log probabilities of its position, its own first, and its rank.

    Returns:
        Whether the request goes on.
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
    llm.output_processor.process_outputs([output], time.monotonic(), iteration)
    if llm.logger_manager is not None:
        llm.logger_manager.record(scheduler_stats=None, iteration_stats=iteration)
    return request_state(llm, request_id) is not None


def install_prompt_ending() -> None:
    """Let SIGTERM end engine cores of this process as a death does, after the step under way.

    vLLM would end all their answers as aborted ones first, which no client can tell from complete
    ones. Of a death the front door hears at once, and streams go on elsewhere.
    """
    EngineCoreProc._handle_shutdown = _goes_on
    EngineCoreProc._reject_add_in_shutdown = _take


def _goes_on(core: Any) -> bool:
    if core.shutdown_state is EngineShutdownState.RUNNING:
        return True
    core._send_engine_dead()
    return False


def _take(core: Any, request: EngineCoreRequest) -> bool:
    """A refusal is an aborted answer too: what still comes dies with the rest."""
    return False


def install_continuation() -> None:
    """Let engine cores of this process take requests that bring output along, as output.

    That is done where a request is read, on a thread of its own: a grammar may take a while.
    """
    preprocess = EngineCore.preprocess_add_request

    @functools.wraps(preprocess)
    def preprocess_and_continue(core: Any, request: EngineCoreRequest) -> Any:
        made, wave = preprocess(core, request)
        if tokens := output_of(request.sampling_params):
            _put_back(core.structured_output_manager, made, tokens)
        return made, wave

    EngineCore.preprocess_add_request = preprocess_and_continue


def _put_back(grammars: Any, request: Any, tokens: Sequence[int]) -> None:
    """Give a request its output, token by token as a scheduler would where it has a grammar."""
    if len(tokens) > 1:  # blocks of its output are cached, too: its prompt was counted elsewhere
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


def add_utility(name: str, utility: Callable[..., Any]) -> None:
    """Let engine cores of this process answer ``call_utility(name)``; it gets the core first."""
    setattr(EngineCore, name, utility)


def install_budget_utility() -> None:
    """Let engine cores of this process take another budget between two steps."""
    add_utility(CoreApi.banaserve_set_budget.__name__, _set_budget)


def on_wake(woke: Callable[[], None]) -> None:
    """Call ``woke`` whenever an engine core of this process had no work and has got some."""
    wait_for_work = EngineCoreProc._process_input_queue

    @functools.wraps(wait_for_work)
    def wait_and_tell(core: Any) -> None:
        had_work = core.has_work()
        wait_for_work(core)
        if not had_work:
            woke()

    EngineCoreProc._process_input_queue = wait_and_tell


def run_engine_core(config: VllmConfig, handshake_address: str) -> None:
    """Be an engine core until told to end; returns or raises when it has."""
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=handshake_address,
        executor_class=Executor.get_class(config),
        log_stats=True,
    )


@implements(CoreApi.banaserve_set_budget)
def _set_budget(core: Any, num_tokens: int, num_requests: int) -> Budget:
    # Requests that run already go on: the limit is asked for where one is admitted.
    scheduler = core.scheduler
    most_tokens, most_requests = own_budget(scheduler.vllm_config)
    scheduler.max_num_scheduled_tokens = min(num_tokens, most_tokens)
    scheduler.max_num_active_reqs = min(num_requests, most_requests)
    if (connector := _store_connector(core)) is not None:
        connector.limit_steps(scheduler.max_num_scheduled_tokens)
    return Budget(scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs)


def install_notes_utility() -> None:
    """Let engine cores of this process say what their connector noted of requests."""
    add_utility(CoreApi.banaserve_notes.__name__, _notes)


@implements(CoreApi.banaserve_notes)
def _notes(core: Any, names: list[str]) -> EngineAnswer | None:
    connector = _store_connector(core)
    return None if connector is None else connector.notes_of(names)


def _store_connector(core: Any) -> Any:
    """The store's connector; None without one, and where users bring one of their own along."""
    config = core.scheduler.vllm_config.kv_transfer_config
    is_ours = config is not None and config.kv_connector in ("StoreConnector", "StatesConnector")
    return core.scheduler.connector if is_ours else None
