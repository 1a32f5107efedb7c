"""Legs of a request: the legs' parameters, the request's seed, and the first token.

``first_token_blocker`` decides whether the token sampled by the prefill leg may go to the client at
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
    """Lower ``max_tokens`` to the room left in the context; the output stays the same.

    An engine ends a request at the end of the context by itself. But if the prefill leg ended
    there, the decode leg would kill its engine: vLLM dies of a prompt as long as the context.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is not None and params.max_tokens is not None and prompt is not None:
        params.max_tokens = min(params.max_tokens, max(1, max_model_len - len(prompt)))
        params.min_tokens = min(params.min_tokens, params.max_tokens)  # engines check it again


def give_seed(params: SamplingParams) -> None:
    """Give a request with random sampling a seed, unless set, so that it can continue elsewhere."""
    if params.temperature > 0.0 and params.seed is None:
        params.seed = secrets.randbits(_SEED_BITS)


def prefill_leg(
    request: compat.EngineCoreRequest,
    keeps_token: bool,
    push_to: str = "",
    hold: int = 0,
    num_readers: int = 1,
) -> compat.EngineCoreRequest:
    """Return the prefill leg: one output token, and the prompt's KV left in the store.

    Args:
        keeps_token: True if the token is the answer's first one; otherwise it is discarded, and
            sampled in the cheapest way.
        push_to: ``HOST:PORT`` of another machine's store that gets the KV while it is computed;
            empty for none.
        hold: Number under which the store holds the KV until decode has read it; 0 for none.
        num_readers: Number of decode legs that will read the KV, one per sequence.
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
    """Return the decode leg: the request, to be continued after the output ``tokens``.

    Args:
        tokens: Output tokens so far, which the leg includes.
        handed_over: True if the prompt's KV is in the store, partial last block included.
        is_stored: True if there was no prefill leg because the store had enough of the prompt.
        hold: Number of the prefill leg's hold; 0 for none.
        reader: Index of the sequence among those that read the held blocks.
        pushed_from: ``HOST:PORT`` of the store on the prefill leg's machine, if that is another
            machine; empty for none.
    """
    leg = copy.copy(request)
    given = request.sampling_params
    assert given is not None
    params = copy.copy(given)
    # After a death the store has whole blocks of prompt and output: then all of them are looked up.
    if len(tokens) <= 1 and handed_over:
        num_tokens = len(request.prompt_token_ids or ())
        handover = Handover(tokens=num_tokens, hold=hold, reader=reader, pushed_from=pushed_from)
        params.extra_args = _with_handover(given, handover)
    elif len(tokens) <= 1 and is_stored:
        params.extra_args = _with_handover(given, Handover(is_stored=True))
    if tokens:
        params.extra_args = with_output(params.extra_args, tokens)
        params.prompt_logprobs = None  # already sent to the client
    leg.sampling_params = params
    return leg


def _with_handover(params: SamplingParams, handover: Handover) -> dict[str, Any]:
    extra = dict(params.extra_args or {})
    extra["kv_transfer_params"] = handover.to_params()
    return extra


# Parameters with the same effect on either side of the boundary between the two legs: they concern
# text, the end of the output, the logits of one position only, or output that is sent along with
# the decode leg. All others must have their defaults, so that an option of a later vLLM is safe
# until it is reviewed.
_CARRIED = frozenset(
    {
        "n",  # each sequence has its own legs
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
    """Return the reason why decode must sample the first token itself; None if prefill may.

    Decode continues from prompt and first token as a single engine would. Random draws can continue
    only with a seed.
    """
    if params.sampling_type is SamplingType.RANDOM:
        return "unseeded"
    for name in _CHECKED:
        given, default = _said(getattr(params, name)), _said(getattr(_GREEDY, name))
        if given is not default and (given is None or default is None or given != default):
            return name.lstrip("_")
    return None


def _said(value: Any) -> Any:
    """Return ``value``, or None if it is False or empty; 0 is kept: logprobs=0 asks for some."""
    is_empty = isinstance(value, Sized) and len(value) == 0
    return None if value is False or is_empty else value
