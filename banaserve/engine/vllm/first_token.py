"""When the token that the prefill leg samples may go to the client at once."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from vllm.sampling_params import SamplingParams

# What these say does not depend on where the boundary between the two legs lies: they concern
# text, the end of the output, or one position's logits alone. Everything else must be at its
# default, so that an option of a later vLLM is safe until somebody has thought about it.
_INDIFFERENT = frozenset(
    {
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
        "_eos_token_id",
        "_all_stop_token_ids",
    }
)
_GREEDY = SamplingParams(temperature=0.0)
_CHECKED = tuple(name for name in SamplingParams.__struct_fields__ if name not in _INDIFFERENT)


def obstacle(params: SamplingParams) -> str | None:
    """Why decode must sample the first token itself; None where prefill's token is the same.

    It is the same for greedy sampling without anything that looks back over the output: no
    penalties, no guided decoding, no bad words, no logprobs, one sequence. Decode then goes on
    from prompt and token as one engine would.
    """
    if params.temperature != 0.0:
        return "sampling"
    for name in _CHECKED:
        given, default = _said(getattr(params, name)), _said(getattr(_GREEDY, name))
        if given is not default and (given is None or default is None or given != default):
            return name.lstrip("_")
    return None


def _said(value: Any) -> Any:
    """``value``, or None where it says nothing. 0 says something: logprobs=0 asks for logprobs."""
    is_empty = isinstance(value, Sized) and len(value) == 0
    return None if value is False or is_empty else value
