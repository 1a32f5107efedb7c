"""Intake of a request: what clients may not say, and what its legs need to know before they run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping, Sized
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from banaserve.base.access.tenants import TenantTerms
from banaserve.contracts.rpc.engine_api import WorkerApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import (
    END_TOKENS,
    GracefulHTTPError,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)
from banaserve.engine.connector.block_hash import describe_adapter
from banaserve.serving.instances.instance import Instance

_SEED_BITS = 62
_OURS = "banaserve_"
_TRANSFER = "kv_transfer_params"
_POLL_S = 0.02
_DIGEST_CHARS = 16


def take_client_args(params: Any) -> None:
    """Remove ``kv_transfer_params`` from a client's parameters, and reject banaserve's own keys.

    With the keys that instances use among themselves, a client could skip the cost gate, or have
    tokens counted as cached that are not. Legs get these keys from the server.
    ``kv_transfer_params`` of clients are meant for other connectors.

    Raises:
        ValueError: A key in the parameters is one of banaserve's own.
    """
    extra = params.extra_args or {}
    transfer = extra.get(_TRANSFER)
    for place, given in (("vllm_xargs", extra), (_TRANSFER, transfer)):
        names = given if isinstance(given, Mapping) else ()
        for name in names:
            if str(name).startswith(_OURS):
                raise ValueError(f"{name} is no argument of a request: leave it out of {place}")
    if _TRANSFER in extra:
        params.extra_args = {k: v for k, v in extra.items() if k != _TRANSFER} or None


class Blockers(NamedTuple):
    """Reasons why a request cannot take the usual way over two instances.

    Attributes:
        split: Reason why one instance must compute prompt and output; None if two may.
        first_token: Reason why decode must sample the first token; None if prefill may.
    """

    split: str | None = None
    first_token: str | None = None


def take_in(
    request: compat.EngineCoreRequest, max_model_len: int, has_logits_processors: bool
) -> Blockers:
    """Make a request fit for two legs, and return what keeps it from taking them.

    Args:
        max_model_len: Length of the context in tokens.
        has_logits_processors: True if the server has logits processors: they may count output.
    """
    params = request.sampling_params
    assert params is not None
    give_seed(params)
    end_with_context(request, max_model_len)
    split = split_blocker(request)
    if has_logits_processors:
        return Blockers(split, "logits_processors")
    return Blockers(split, split or first_token_blocker(params))


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


def num_prompt_tokens(request: compat.EngineCoreRequest) -> int:
    """Return the length of a prompt, which may be embeddings in place of token ids."""
    ids, embeddings = request.prompt_token_ids, request.prompt_embeds
    if ids is not None:
        return len(ids)
    return 0 if embeddings is None else len(embeddings)


def split_blocker(request: compat.EngineCoreRequest) -> str | None:
    """Return the reason why one instance must compute prompt and output; None if two may."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt_embeds"
    if request.sampling_params is not None and request.sampling_params.skip_reading_prefix_cache:
        return "prompt_logprobs"
    return None


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


class Adapters:
    """Adapters, with a unique id and name for each load of an adapter.

    vLLM puts the name and path of an adapter into the keys of its KV blocks; of two adapters with
    the same name in a batch it activates only one. Replaced files have the same path as before.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._names: dict[int, str] = {}

    def begin(self, adapter: LoRARequest) -> None:
        """Give an id to an adapter that engines are about to load; modifies ``adapter``.

        An adapter loaded in place of another one gets a new id, too, since running requests
        continue with the old weights.
        """
        adapter.lora_int_id, adapter.load_inplace = next(self._ids), False

    async def loaded(self, adapter: LoRARequest) -> str:
        """Name an adapter by the hash of its files, which identifies them after a restart, too.

        Returns:
            The hash.

        Raises:
            OSError: A file of the adapter cannot be read.
        """
        digest = await asyncio.to_thread(describe_adapter, adapter.lora_path)
        name = f"{adapter.lora_name}@{adapter.lora_int_id}.{digest[:_DIGEST_CHARS]}"
        self._names[adapter.lora_int_id] = name
        return digest

    def resolve_lora(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of ``generate`` or ``encode`` with the adapter as engines know it."""
        adapter = options.get("lora_request")
        if adapter is None:
            return dict(options)
        name = self._names[adapter.lora_int_id]
        return {**options, "lora_request": msgspec.structs.replace(adapter, lora_name=name)}


async def load_adapter(instance: Instance, adapter: LoRARequest | None) -> None:
    """Load the adapter of a request in an engine that lacks it, as one does that has restarted.

    An engine dies of an adapter that it cannot load within a step.

    Raises:
        GracefulHTTPError: The adapter cannot be loaded, or its files have changed since.
        EngineDeadError: The engine has ended.
    """
    llm = instance.llm  # None again if the engine ends meanwhile
    if adapter is None or llm is None or adapter.lora_int_id in instance.adapters:
        return
    try:
        asked = call(WorkerApi.banaserve_describe_adapter, adapter.lora_path)
        for answer in await llm.collective_rpc(asked.name, args=asked.args):
            if not adapter.lora_name.endswith(f".{asked.read(answer)[:_DIGEST_CHARS]}"):
                raise ValueError("its files have changed since it was loaded: load it again")
        await llm.add_lora(adapter)
    except compat.EngineDeadError:
        raise
    except Exception as error:
        name = adapter.lora_name.rpartition("@")[0]
        words = f"{instance.id} cannot load adapter {name}: {error}"
        raise GracefulHTTPError(words, HTTPStatus.SERVICE_UNAVAILABLE) from error
    instance.adapters.add(adapter.lora_int_id)


class Gate:
    """Gate before the engines: new requests wait while it is closed."""

    def __init__(self) -> None:
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._num_closing = self._num_openings = 0

    async def passed(self) -> None:
        """Return while the gate is open."""
        while not self._may_pass.is_set():
            await self._may_pass.wait()

    def open(self) -> None:
        """End all waits for requests under way."""
        self._num_openings += 1

    @contextlib.asynccontextmanager
    async def closed(self, under_way: Sized) -> AsyncIterator[None]:
        """Close the gate for the duration of the block, which begins when nothing is under way.

        Raises:
            ValueError: ``open`` has been called before.
        """
        num_openings = self._num_openings
        self._num_closing += 1
        self._may_pass.clear()
        try:
            while under_way:
                if self._num_openings > num_openings:
                    raise ValueError("the engines have been resumed before all requests had ended")
                await asyncio.sleep(_POLL_S)
            yield
        finally:
            self._num_closing -= 1
            if not self._num_closing:
                self._may_pass.set()


class SessionTokens:
    """Counter of the tokens that each output adds to a session's prompt and to its answer.

    A session may last an hour, so counting at its end would be too late to limit the key's other
    requests. A piece of the prompt is counted with the first output after it.

    Args:
        terms: Tenant's terms: they get the number of new tokens, never 0, and decide whether the
            session may continue. None without tenants: it may.
        params: Session's sampling parameters; their ``output_kind`` tells whether an output has
            only the new tokens.
    """

    def __init__(self, terms: TenantTerms | None, params: SamplingParams) -> None:
        self._terms = terms
        self._is_cumulative = params.output_kind != RequestOutputKind.DELTA
        self._prompt_tokens = self._output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count the new tokens of ``output``; its ``prompt_token_ids`` are of all pieces so far."""
        if self._terms is None:
            return
        prompt_tokens = max(self._prompt_tokens, len(output.prompt_token_ids or ()))
        output_tokens = sum(len(one.token_ids) for one in output.outputs)
        if not self._is_cumulative:
            output_tokens += self._output_tokens
        new = prompt_tokens - self._prompt_tokens + max(0, output_tokens - self._output_tokens)
        self._prompt_tokens = prompt_tokens
        self._output_tokens = max(self._output_tokens, output_tokens)
        if new:
            self._terms.use_tokens(new)

    def check(self) -> None:
        """Return if the session may continue.

        Raises:
            GracefulHTTPError: The session's API key has exceeded its limit.
        """
        if self._terms is not None and (why := self._terms.refuse_session()):
            raise GracefulHTTPError(why, HTTPStatus.TOO_MANY_REQUESTS)
