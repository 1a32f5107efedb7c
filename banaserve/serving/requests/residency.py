"""KV of prompts in the engines' own caches: the router's record of which instance computed what."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from banaserve.base.types import NOWHERE, InstanceId
from banaserve.engine.compat import engine as compat
from banaserve.orchestrator.control.model.resident_prefixes import ResidentPrefixes
from banaserve.serving.instance import Instance


class Residency:
    """Record of the requests that instances have computed, for the next turn of the same chat.

    Args:
        block_tokens: Number of tokens of an engine's KV block; 0 to record nothing, for policies
            that do not use the record.
    """

    def __init__(self, block_tokens: int = 0) -> None:
        self._prefixes = ResidentPrefixes(block_tokens) if block_tokens else None

    def computed(
        self, instance: Instance, request: compat.EngineCoreRequest, output: Sequence[int] = ()
    ) -> None:
        """Record that ``instance`` has the KV of the prompt and of ``output``.

        The last token of ``output`` has no KV yet, and an engine that has ended has no KV.
        """
        if self._prefixes is None or request.prompt_token_ids is None:
            return
        if instance.llm is not None:
            tokens = [*request.prompt_token_ids, *output[:-1]]
            self._prefixes.add(instance.id, _root(request), tokens, instance.view().kv_tokens)

    def found(self, request: compat.EngineCoreRequest) -> Mapping[InstanceId, int]:
        """Return the number of prompt tokens probably cached, by instance.

        See ``ResidentPrefixes``.
        """
        params = request.sampling_params
        if self._prefixes is None or request.prompt_token_ids is None:
            return NOWHERE
        if request.prompt_embeds is not None or (params and params.skip_reading_prefix_cache):
            return NOWHERE
        return self._prefixes.found(_root(request), request.prompt_token_ids)

    def forget(self, instance: InstanceId | None = None) -> None:
        """Forget the cache of ``instance``, or of every instance if None."""
        if self._prefixes is not None:
            self._prefixes.forget(instance)


def _root(request: compat.EngineCoreRequest) -> Hashable:
    """Return the values that distinguish equal tokens, as in vLLM's own hashes of blocks."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    media = tuple(feature.identifier for feature in request.mm_features or ())
    return request.cache_salt, adapter, media
