"""Clients of engine cores, which share one renderer with the front door if it is the same for all.

A renderer with its tokenizer takes half a second of processor time and forty megabytes, as much as
all the rest of an instance in the front door's process.
"""

from __future__ import annotations

import functools
import threading
import weakref
from pathlib import Path
from typing import Any, cast

import msgspec
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.v1.engine import EngineCoreOutputs, EngineCoreReadyResponse, async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import IterationStats

from banaserve.engine.compat.config import UsageContext, VllmConfig

_renderers: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_making = threading.Lock()
_make_renderer = async_llm.renderer_from_config
_TOKENIZER_FILES = ("token*", "*.model", "*.jinja", "vocab*", "config.json", "*processor*")


class EngineClient(AsyncLLM):
    """vLLM's client of one engine core, which shares its renderer with other clients."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the connection; the renderer ends with the last client that uses it."""
        renderer = self.__dict__.pop("renderer", None)
        try:
            super().shutdown(timeout)
        finally:
            if renderer is not None:
                self.renderer = renderer


def connect(
    config: VllmConfig, stat_logger: Any, input_address: str, output_address: str
) -> EngineClient:
    """Connect to an engine core that is ready. Blocks.

    Args:
        config: Configuration of this client alone; it receives the engine core's changes.
    """
    client = EngineClient.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[stat_logger],
        client_addresses={"input_address": input_address, "output_address": output_address},
    )
    return cast(EngineClient, client)


def set_iteration_stats(kind: type[IterationStats]) -> None:
    """Make clients of this process count the outputs of a step in an object of this class."""
    async_llm.IterationStats = kind  # type: ignore[misc]


def lent_renderer(config: VllmConfig) -> Any:
    """Make a renderer with this configuration, which later clients share."""
    with _making:
        return _made(config)


def _made(config: VllmConfig) -> Any:
    """Make a renderer that no other shares its tokenizer with.

    For prompt embeddings a renderer adds a token to its tokenizer and to all copies of it. Another
    renderer would take the token's id for one of the model, and engines die of such an id.
    """
    made = _renderers[_key(config)] = _make_renderer(config)
    cached_get_tokenizer.cache_clear()
    return made


def _shared_renderer(config: VllmConfig) -> Any:
    """Return the renderer of all clients with equal rendering options and tokenizer files."""
    key = _key(config)
    with _making:  # clients connect on threads
        if (found := _renderers.get(key)) is None:
            found = _made(config)
        return found


def _key(config: VllmConfig) -> tuple[Any, ...]:
    """Return the options and files of a tokenizer, the part of a renderer that clients use.

    Files may be replaced between two restarts.
    """
    model = config.model_config
    names = sorted({str(model.model), str(model.tokenizer)})
    files = [
        (str(path), path.stat().st_mtime_ns, path.stat().st_size)
        for name in names
        for pattern in _TOKENIZER_FILES
        for path in sorted(Path(name).glob(pattern))
    ]
    said = (model.tokenizer_mode, model.tokenizer_revision, model.revision, model.max_model_len)
    flags = (bool(model.trust_remote_code), bool(model.skip_tokenizer_init))
    return (*names, *said, str(model.runner_type), *flags, *files)


async_llm.renderer_from_config = _shared_renderer  # type: ignore[assignment]
# msgspec publishes the description of a type before it is complete. A client that connects on one
# thread would decode with the half of it that another thread has made so far, and crash.
for _kind in (EngineCoreReadyResponse, EngineCoreOutputs):
    msgspec.msgpack.Decoder(_kind)
# Otherwise the entry points of all installed packages are read again for each client.
async_llm.load_stat_logger_plugin_factories = functools.cache(
    async_llm.load_stat_logger_plugin_factories
)
