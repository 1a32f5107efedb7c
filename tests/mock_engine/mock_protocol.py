"""Messages between vLLM's front end and its engine cores, as they travel, without vLLM.

Structs have the names, fields, order and defaults of vLLM's own (``vllm/v1/engine/__init__.py``,
``vllm/v1/metrics/stats.py``): ``test_protocol.py`` compares them with recordings of real engines.
Of sampling parameters only what a mock core obeys is read.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import msgspec

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
RAW_VIEW = 3
"""Number of vLLM's MessagePack extension for the bytes of an array."""


class RequestType(Enum):
    """First frame of a message to an engine core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class FinishReason(IntEnum):
    """Reason for which a request has ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class SamplingParams(msgspec.Struct, gc=False):
    """The part of a request's sampling parameters that a mock core obeys."""

    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: list[int] = msgspec.field(default=[], name="_all_stop_token_ids")
    extra_args: dict[str, Any] | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request, as ``ADD`` brings it."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None


class EventType(IntEnum):
    """Kind of an event in the life of a request."""

    QUEUED = 1
    SCHEDULED = 2


class EngineCoreEvent(msgspec.Struct):
    """Time, on the monotonic clock, of an event in the life of a request."""

    type: EventType
    timestamp: float


@dataclass
class PrefillStats:
    """Counts of a prompt's tokens, by where their KV comes from."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


@dataclass
class PrefixCacheStats:
    """Queries of the prefix cache since the last statistics, and what of them hit."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = field(default_factory=dict)


@dataclass
class SchedulerStats:
    """Statistics of one step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = field(
        default_factory=lambda: {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0}
    )
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: None = None
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[Any] = field(default_factory=list)
    spec_decoding_stats: None = None
    kv_connector_stats: dict[str, float] | None = None
    ec_connector_stats: None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    cudagraph_stats: None = None
    perf_stats: None = None


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Output of one request in one step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call: the text of a failure, or a pair of no type and a plain value."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A message of an engine core."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


@dataclass
class EngineCoreReadyResponse:
    """First message on the input socket: what the engine core has made of its options."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None


STRUCTS = (
    EngineCoreRequest,
    EngineCoreEvent,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    EngineCoreOutput,
    UtilityOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
)
"""Structs that have all fields of vLLM's."""


def token_at(
    weights: str,
    prompt: Sequence[int],
    position: int,
    seed: int,
    tokens: range | Sequence[int],
    left_out: Collection[int] = (),
) -> int:
    """The token that every mock core with these weights puts out there.

    Args:
        position: Number of output tokens before it.
        seed: 0 of a request that takes the likeliest token.
        tokens: Candidates, of which one is returned.
        left_out: Candidates that are avoided while another one is left.
    """
    found = zlib.crc32(f"{weights} {list(prompt)} {position} {seed}".encode())
    for number in range(min(len(tokens), len(left_out) + 1)):
        token = tokens[(found + number) % len(tokens)]
        if token not in left_out:
            break
    return token


def field_names(struct: Any) -> list[str]:
    """Names of a struct's or dataclass's fields in order."""
    names = getattr(struct, "__struct_fields__", None) or struct.__dataclass_fields__
    return list(names)


def array(dtype: str, shape: Sequence[int], data: bytes) -> tuple[Any, ...]:
    """A small array as vLLM's encoder writes it; ``dtype`` as numpy spells it."""
    return dtype, tuple(shape), msgspec.msgpack.Ext(RAW_VIEW, data)
