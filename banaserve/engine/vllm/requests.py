"""The forms that one request takes on its two legs."""

from __future__ import annotations

import copy
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from banaserve.engine.vllm import compat
from banaserve.engine.vllm.handover import Handover


def end_with_context(request: compat.EngineCoreRequest, max_model_len: int) -> None:
    """Lower ``max_tokens`` to what the context has room for; the output is the same.

    An engine ends a request there by itself, but the first leg cannot end the second: vLLM's
    engine dies of a prompt that is as long as the context.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is not None and params.max_tokens is not None and prompt is not None:
        params.max_tokens = min(params.max_tokens, max(1, max_model_len - len(prompt)))
        params.min_tokens = min(params.min_tokens, params.max_tokens)  # an engine checks it again


def prefill_leg(request: compat.EngineCoreRequest, keeps_token: bool) -> compat.EngineCoreRequest:
    """The request with one output token, its prompt's KV to be left in the store.

    Args:
        keeps_token: The token is the answer's first one; otherwise it is thrown away, and
            sampled in the cheapest way.
    """
    leg = copy.copy(request)
    leg.request_id = f"{request.request_id}-p"
    leg.external_req_id = f"{request.external_req_id}-p"
    given = request.sampling_params
    assert given is not None
    if keeps_token:
        params = copy.copy(given)
        params.min_tokens = min(given.min_tokens, 1)
        params.stop = []
        params.output_text_buffer_length = 0
    else:
        params = SamplingParams(temperature=0.0, ignore_eos=True, watermarking=False)
    params.max_tokens = 1
    params.detokenize = False
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.extra_args = _with_handover(given, Handover(leaves_tail=True))
    leg.sampling_params = params
    return leg


def decode_leg(
    request: compat.EngineCoreRequest, tokens: list[int], handed_over: bool
) -> compat.EngineCoreRequest:
    """The request as it goes on after the output ``tokens``.

    Args:
        handed_over: The prompt's KV lies in the store, partial last block included.
    """
    leg = copy.copy(request)
    given = request.sampling_params
    assert given is not None
    assert request.prompt_token_ids is not None
    params = copy.copy(given)
    if handed_over:
        params.extra_args = _with_handover(given, Handover(tokens=len(request.prompt_token_ids)))
    if tokens:
        assert given.max_tokens is not None
        leg.prompt_token_ids = request.prompt_token_ids + tokens
        params.max_tokens = given.max_tokens - len(tokens)
        params.min_tokens = max(0, given.min_tokens - len(tokens))
    leg.sampling_params = params
    return leg


def _with_handover(params: SamplingParams, handover: Handover) -> dict[str, Any]:
    extra = dict(params.extra_args or {})
    extra["kv_transfer_params"] = handover.to_params()
    return extra
