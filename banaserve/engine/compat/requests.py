"""vLLM's requests and answers: parameters, outputs, adapters and error classes for HTTP."""

from __future__ import annotations

from vllm.exceptions import GracefulHTTPError, MaxQueuedTokensError, QueueOverflowError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType

__all__ = [
    "GracefulHTTPError",
    "LoRARequest",
    "MaxQueuedTokensError",
    "PoolingParams",
    "PoolingRequestOutput",
    "QueueOverflowError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
]

END_TOKENS = frozenset({"_eos_token_id", "_all_stop_token_ids"})
"""Fields of ``SamplingParams`` that vLLM fills in itself, from the model's own end tokens."""
