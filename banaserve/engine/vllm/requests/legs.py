"""Legs of a request: their parameters, its seed, and the first token.

``first_token_blocker`` says whether the token that the prefill leg samples may go to the client at
once.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sized
from typing import Any

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.requests import (
    END_TOKENS,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)
from banaserve.engine.vllm.continuation import with_output
from banaserve.engine.vllm.kv_connector.handover import Handover

_SEED_BITS = 62


def end_with_context(request: compat.EngineCoreRequest, max_model_len: int) -> None:
    """Lower ``max_tokens`` to what the context has room for; the output is the same.

    An engine ends a request there by itself, but the first leg cannot end the second: vLLM's
    engine dies of a prompt that is as long as the context.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is not None and params.max_tokens is not None and prompt is not None:
        params.max_tokens = min(params.max_tokens, max(1, max_model_len - len(prompt)))
        params.min_tokens = min(params.min_tokens, params.max_tokens)  # an engine checks it again


def give_seed(params: SamplingParams) -> None:
    """Give a request that draws a seed if it has none, so that its draws can go on elsewhere."""
    if params.temperature > 0.0 and params.seed is None:
        params.seed = secrets.randbits(_SEED_BITS)


def prefill_leg(
    request: compat.EngineCoreRequest,
    keeps_token: bool,
    push_to: str = "",
    hold: int = 0,
    num_readers: int = 1,
) -> compat.EngineCoreRequest:
    """The request with one output token, its prompt's KV to be left in the store.

    Args:
        push_to: Store of another machine that gets it while it is computed; empty for none.
        hold: Number under which the store keeps it until decode has read it; 0 for none.
        num_readers: Number of decode legs that will read it, one a sequence.
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
    params.extra_args = _with_handover(
        given,
        Handover(leaves_tail=True, push_to=push_to, hold=hold, num_readers=num_readers),
    )
    leg.sampling_params = params
    return leg


def decode_leg(
    request: compat.EngineCoreRequest,
    tokens: list[int],
    handed_over: bool,
    is_stored: bool = False,
    hold: int = 0,
    reader: int = 0,
    pushed_from: str = "",
) -> compat.EngineCoreRequest:
    """The request as it goes on after the output ``tokens``, which it brings along.

    Args:
        handed_over: The prompt's KV lies in the store, partial last block included.
        is_stored: The store had so much of the prompt that it needs no prefill leg.
        hold: Number of the prefill leg's hold; 0 for none.
        reader: Number of the sequence among those that read what is held.
        pushed_from: Store of the prefill leg's machine, where it is another one; empty for none.
    """
    leg = copy.copy(request)
    given = request.sampling_params
    assert given is not None
    params = copy.copy(given)
    # After a death the store has whole blocks of prompt and output: then all of it is looked up.
    if len(tokens) <= 1 and handed_over:
        num_tokens = len(request.prompt_token_ids or ())
        handover = Handover(tokens=num_tokens, hold=hold, reader=reader, pushed_from=pushed_from)
        params.extra_args = _with_handover(given, handover)
    elif len(tokens) <= 1 and is_stored:
        params.extra_args = _with_handover(given, Handover(is_stored=True))
    if tokens:
        params.extra_args = with_output(params.extra_args, tokens)
        params.prompt_logprobs = None  # its client has had them
    leg.sampling_params = params
    return leg


def _with_handover(params: SamplingParams, handover: Handover) -> dict[str, Any]:
    extra = dict(params.extra_args or {})
    extra["kv_transfer_params"] = handover.to_params()
    return extra


# What these say is the same on either side of the boundary between the two legs: it concerns text,
# the end of the output, one position's logits alone, or output that the decode leg brings along.
# Everything else must be at its default, so that an option of a later vLLM is safe until it is
# reviewed.
_CARRIED = frozenset(
    {
        "n",  # each sequence has legs of its own
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "logit_bias",
        "allowed_token_ids",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "bad_words",
        "_bad_words_token_ids",
        "structured_outputs",
        "logprobs",
    }
    | END_TOKENS
)
_GREEDY = SamplingParams(temperature=0.0)
_CHECKED = tuple(name for name in SamplingParams.__struct_fields__ if name not in _CARRIED)


def first_token_blocker(params: SamplingParams) -> str | None:
    """Reason for which decode must sample the first token itself; None where prefill may.

    Decode goes on from prompt and token as one engine would. Draws go on only with a seed.
    """
    if params.sampling_type is SamplingType.RANDOM:
        return "unseeded"
    for name in _CHECKED:
        given, default = _said(getattr(params, name)), _said(getattr(_GREEDY, name))
        if given is not default and (given is None or default is None or given != default):
            return name.lstrip("_")
    return None


def _said(value: Any) -> Any:
    """``value``, or None where it says nothing. 0 says something: logprobs=0 asks for logprobs."""
    is_empty = isinstance(value, Sized) and len(value) == 0
    return None if value is False or is_empty else value
