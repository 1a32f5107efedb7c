"""Every private vLLM name that banaserve relies on, in one file.

Tried with vLLM 0.32. When a release moves one of these, this file is where it breaks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import vllm.envs as vllm_envs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
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
from vllm.v1.engine.core import EngineCoreProc
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
    "adopt_kv_layout",
    "block_hasher",
    "build_app",
    "cpu_model_runner",
    "end_alone",
    "generate_block_hash_extra_keys",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_app_state",
    "init_none_hash",
    "initialize_model",
    "make_arg_parser",
    "mark_dead",
    "pipeline_stage",
    "process_weights_after_loading",
    "put_first_token",
    "register",
    "renderer_from_config",
    "request_state",
    "start_alone",
    "start_output_handler",
    "submit",
    "validate_parsed_serve_args",
    "vllm_envs",
]

TESTED_VLLM = ("0.32",)


def cpu_model_runner() -> type[Any]:
    """The class whose ``_sample`` runs before draws for unfinished prompts are discarded."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner


def mark_dead(llm: AsyncLLM) -> None:
    """Make every request on this engine fail now with ``EngineDeadError``, and every later one."""
    llm.engine_core.resources.engine_dead = True
    llm.output_processor.propagate_error(EngineDeadError())


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


# ---- guests: layers without an engine


class _MiddleStage:
    """A pipeline group in which this process is neither first nor last."""

    rank_in_group = 1
    world_size = 3
    is_first_rank = False
    is_last_rank = False


@contextlib.contextmanager
def pipeline_stage(start: int, end: int) -> Iterator[None]:
    """Models built inside hold decoder layers ``start`` to ``end - 1`` and nothing else.

    ``make_layers`` imports both names when it is called, and the models' loaders skip what a
    pipeline stage lacks.
    """
    import vllm.distributed.parallel_state as parallel_state
    import vllm.distributed.utils as distributed_utils

    with (
        mock.patch.object(distributed_utils, "get_pp_indices", lambda *_: (start, end)),
        mock.patch.object(parallel_state, "_PP", _MiddleStage()),
    ):
        yield


def start_alone(rendezvous: str) -> None:
    """Make the process groups that vLLM's layers expect, with this process alone in each.

    Args:
        rendezvous: Path of a file that does not exist yet.
    """
    from vllm.distributed import parallel_state

    parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)


def end_alone() -> None:
    """Undo ``start_alone``."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def adopt_kv_layout(config: VllmConfig, layout: str, block_size: int) -> None:
    """What an engine core has resolved after its configuration was made.

    Raises:
        ValueError: Another layout was adopted before.
    """
    from vllm.v1.attention.backends.utils import record_kv_cache_layout

    config.cache_config.block_size = block_size
    record_kv_cache_layout(config.cache_config, layout)
