"""Forms of the two legs of a request, as they are sent to engines."""

from __future__ import annotations

import copy
from typing import Any

from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import RequestOutputKind, SamplingParams
from banaserve.engine.connector.handover import Handover
from banaserve.engine.continuation import with_output


def prefill_leg(
    request: compat.EngineCoreRequest, keeps_token: bool, handover: Handover
) -> compat.EngineCoreRequest:
    """Return the prefill leg: one output token, and the prompt's KV left in the store.

    Args:
        keeps_token: True if the token is the answer's first one; otherwise it is discarded, and
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
    params.extra_args = _with_handover(given, handover)
    leg.sampling_params = params
    return leg


def decode_leg(
    request: compat.EngineCoreRequest, tokens: list[int], handover: Handover | None
) -> compat.EngineCoreRequest:
    """Return the decode leg: the request, to be continued after the output ``tokens``.

    Args:
        tokens: Output tokens so far, which the leg includes.
        handover: Facts about the prompt's KV in the store; None if the engine finds out itself.
    """
    leg = copy.copy(request)
    given = request.sampling_params
    assert given is not None
    params = copy.copy(given)
    # After a death the store has whole blocks of prompt and output: then all of them are looked up.
    if handover is not None and len(tokens) <= 1:
        params.extra_args = _with_handover(given, handover)
    if tokens:
        params.extra_args = with_output(params.extra_args, tokens)
        params.prompt_logprobs = None  # already sent to the client
    leg.sampling_params = params
    return leg


def _with_handover(params: SamplingParams, handover: Handover) -> dict[str, Any]:
    return {**(params.extra_args or {}), "kv_transfer_params": handover.to_params()}
