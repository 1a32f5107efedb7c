"""Every private vLLM name that banaserve relies on, in one file.

Tried with vLLM 0.32. When a release moves one of these, this file is where it breaks.

Every private vLLM name that the end of an engine relies on, in one file; see ``compat``.

Every private vLLM name that budgets of steps rely on, in one file; see ``compat``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import vllm.envs as vllm_envs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
)
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, PrefillStats, PromptTokenStats
from vllm.v1.request import Request

__all__ = [
    "AsyncLLM",
    "EngineCoreOutput",
    "EngineCoreProc",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineHandshakeMetadata",
    "EngineZmqAddresses",
    "Executor",
    "FinishReason",
    "FlexibleArgumentParser",
    "InputProcessor",
    "IterationStats",
    "PrefillStats",
    "PrometheusStatLogger",
    "Request",
    "RequestOutputCollector",
    "StatLoggerBase",
    "adopt",
    "batch_copier",
    "block_hasher",
    "build_app",
    "cpu_model_runner",
    "engine_notes",
    "forget",
    "generate_block_hash_extra_keys",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_app_state",
    "init_none_hash",
    "install_notes_utility",
    "make_arg_parser",
    "mark_dead",
    "put_first_token",
    "register",
    "renderer_from_config",
    "request_state",
    "start_output_handler",
    "submit",
    "validate_parsed_serve_args",
    "vllm_envs",
]


def cpu_model_runner() -> type[Any]:
    """The class whose ``_sample`` runs before draws for unfinished prompts are discarded."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner


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
) -> None:
    """Register a prepared request with the front-end state and send it to the engine core."""
    await llm._add_request(request, prompt_text, None, 0, queue)


def register(
    llm: AsyncLLM,
    request: EngineCoreRequest,
    prompt_text: str | None,
    queue: RequestOutputCollector,
) -> Any:
    """Make the front-end state of a request without sending it; returns the state."""
    llm.output_processor.add_request(request, prompt_text, None, 0, queue)
    return llm.output_processor.request_states[request.request_id]


def adopt(llm: AsyncLLM, state: Any) -> None:
    """Let another engine's outputs flow into the state of a request that began elsewhere."""
    processor = llm.output_processor
    processor.request_states[state.request_id] = state
    processor.external_req_ids[state.external_req_id].append(state.request_id)


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
) -> bool:
    """Pass a token sampled elsewhere through detokenizer and stop checks to the client.

    The token counts for latency here; its prompt was counted where it was computed.

    Returns:
        Whether the request goes on.
    """
    iteration = IterationStats()
    output = EngineCoreOutput(
        request_id=request_id,
        new_token_ids=[token_id],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        prefill_stats=prefill_stats,
    )
    llm.output_processor.process_outputs([output], time.monotonic(), iteration)
    iteration.prompt_token_stats = PromptTokenStats()
    if llm.logger_manager is not None:
        llm.logger_manager.record(scheduler_stats=None, iteration_stats=iteration)
    return request_state(llm, request_id) is not None


def block_hasher(config: VllmConfig, block_size: int) -> Callable[[Request], list[bytes]]:
    """vLLM's own chained block hasher, initialised for this process."""
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return get_request_block_hasher(block_size, hash_function)


def batch_copier() -> Callable[[Any, Any, Any], None]:
    """``copy(source_addresses, target_addresses, sizes_bytes)``, in one call on a GPU's stream.

    Each argument is a CPU tensor ``[num_copies]`` int64.
    """
    from vllm import _custom_ops

    copy: Callable[[Any, Any, Any], None] = _custom_ops.swap_blocks_batch
    return copy


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


UTILITY = "banaserve_set_budget"


def install_budget_utility() -> None:
    """Let engine cores of this process take another budget between two steps."""
    setattr(EngineCore, UTILITY, _set_budget)


def own_budget(config: VllmConfig) -> tuple[int, int]:
    """Tokens of a step and requests that run at once, as vLLM's options say.

    What a runner has buffers for: no more can be had at run time.
    """
    scheduler = config.scheduler_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    return tokens, scheduler.max_num_active_seqs or scheduler.max_num_seqs


def _set_budget(core: Any, num_tokens: int, num_requests: int) -> dict[str, int]:
    # Requests that run already go on: the limit is asked for where one is admitted.
    scheduler = core.scheduler
    most_tokens, most_requests = own_budget(scheduler.vllm_config)
    scheduler.max_num_scheduled_tokens = min(num_tokens, most_tokens)
    scheduler.max_num_active_reqs = min(num_requests, most_requests)
    return {
        "num_tokens": scheduler.max_num_scheduled_tokens,
        "num_requests": scheduler.max_num_active_reqs,
    }


NOTES_UTILITY = "banaserve_notes"


def install_notes_utility() -> None:
    """Let engine cores of this process say what their connector noted of a request."""
    setattr(EngineCore, NOTES_UTILITY, _notes)


def _notes(core: Any, name: str) -> bytes:
    connector = core.scheduler.connector
    return msgspec.msgpack.encode(None if connector is None else connector.notes_of(name))


async def engine_notes(llm: AsyncLLM, name: str) -> bytes:
    """Notes of the requests that an engine calls ``name``, as ``list[EngineNotes]`` in msgpack.

    None in msgpack where the engine has no connector.

    Raises:
        EngineDeadError: The engine has died.
    """
    answer: bytes = await llm.engine_core.call_utility_async(NOTES_UTILITY, name)
    return answer
