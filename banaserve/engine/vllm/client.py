"""vLLM's EngineClient over many instances: what vLLM's own API server talks to."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import AsyncGenerator, Iterable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import SamplingParams

from banaserve.engine.vllm import compat
from banaserve.engine.vllm.adapters import Adapters
from banaserve.engine.vllm.all_instances import AllInstances
from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.first_token import obstacle
from banaserve.engine.vllm.journey import Job, travel
from banaserve.engine.vllm.pooling import pool
from banaserve.engine.vllm.requests import end_with_context

tenant: ContextVar[str | None] = ContextVar("tenant", default=None)
"""Whose request the current task serves; set by the front door where there are several keys."""


class DisaggregatedClient(AllInstances):
    """``generate`` is two legs; everything else goes to one instance or to all.

    Args:
        config: As the engines got it; a copy is kept, with the context length they settled on.
        request_timeout_s: One time budget for all legs of a request.
        lookup_above_tokens: Shorter prompts are not looked up in the store before routing.
    """

    def __init__(
        self,
        config: VllmConfig,
        cluster: Cluster,
        request_timeout_s: float,
        lookup_above_tokens: int,
    ) -> None:
        self.vllm_config = copy.deepcopy(config)
        self.model_config = self.vllm_config.model_config
        self.renderer = compat.renderer_from_config(self.vllm_config)
        self.input_processor = compat.InputProcessor(self.vllm_config, self.renderer)
        self._cluster = cluster
        self._adapters = Adapters()
        self._request_timeout_s = request_timeout_s
        self._lookup_above_tokens = lookup_above_tokens
        self._supported_tasks: tuple[Any, ...] = ()
        self._jobs: dict[int, Job] = {}

    async def adopt_engine_facts(self) -> None:
        """Take over what the engines decided at start: context length, cache size, tasks."""
        engines = [i.llm.vllm_config for i in self._cluster.serving() if i.llm is not None]
        self.model_config.max_model_len = min(e.model_config.max_model_len for e in engines)
        cache = self.vllm_config.cache_config
        cache.num_gpu_blocks = engines[0].cache_config.num_gpu_blocks
        cache.block_size = engines[0].cache_config.block_size
        (self._supported_tasks, *_) = await self._all("get_supported_tasks")

    # ---- generating

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prefill leg, then decode leg; see ``journey``."""
        options = self._adapters.told_apart(options)
        if inspect.isasyncgen(prompt):
            stream = self._streaming_input(prompt, sampling_params, request_id, options)
        else:
            job = await self._prepare(prompt, sampling_params, request_id, options)
            stream = travel(job, self._cluster)
            self._jobs[id(stream)] = job
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._jobs.pop(id(stream), None)

    async def _prepare(
        self, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> Job:
        given = dict(options)
        prompt_text = given.pop("prompt_text", None)
        reasoning_ended = given.pop("reasoning_ended", None)
        parser_kwargs = given.pop("reasoning_parser_kwargs", None)
        prepare = (
            self.input_processor.process_inputs
            if isinstance(prompt, dict) and "type" in prompt
            else self.input_processor.process_inputs_async
        )
        made = prepare(request_id, prompt, params, supported_tasks=self._supported_tasks, **given)
        request = await made if inspect.isawaitable(made) else made
        request.reasoning_ended = reasoning_ended
        request.reasoning_parser_kwargs = parser_kwargs
        self.input_processor.assign_request_id(request)
        end_with_context(request, self.model_config.max_model_len)
        self._salt(request, prompt)
        if prompt_text is None:
            prompt_text, _, _ = extract_prompt_components(self.model_config, prompt)
        return Job(
            request=request,
            prompt=prompt,
            prompt_text=prompt_text,
            obstacle=self._obstacle(request),
            deadline=self._deadline(),
            generate_options=options,
            uncached_tokens=await self._uncached_tokens(request),
            one_leg_because=_one_leg_because(request),
        )

    def _obstacle(self, request: compat.EngineCoreRequest) -> str | None:
        assert request.sampling_params is not None
        if self.model_config.logits_processors:
            return "logits_processors"  # they may count what they take for the output
        return _one_leg_because(request) or obstacle(request.sampling_params)

    def _salt(self, request: compat.EngineCoreRequest, prompt: Any) -> None:
        """Keep the caches of different API keys apart."""
        request.cache_salt = _own(request.cache_salt)
        if request.cache_salt is not None and isinstance(prompt, dict):
            prompt["cache_salt"] = request.cache_salt

    async def _uncached_tokens(self, request: compat.EngineCoreRequest) -> int:
        num_tokens = len(request.prompt_token_ids or ())
        if num_tokens <= self._lookup_above_tokens:
            return num_tokens
        return max(0, num_tokens - await self._cluster.cached_tokens(request))

    async def _streaming_input(
        self, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """A session whose prompt arrives in pieces stays on one instance."""
        serving = [i for i in self._cluster.serving() if i.llm is not None]
        if not serving:
            raise GracefulHTTPError("no instance serves", HTTPStatus.SERVICE_UNAVAILABLE)
        instance = serving[-1]
        assert instance.llm is not None
        stream = instance.llm.generate(prompt, params, request_id, **options)
        with instance.holding(0):
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    yield output

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """See ``pooling``."""
        if isinstance(prompt, dict) and (salt := _own(prompt.get("cache_salt"))) is not None:
            prompt["cache_salt"] = salt
        request = (prompt, pooling_params, request_id)
        options = self._adapters.told_apart(options)
        stream = pool(self._cluster, self._deadline(), *request, **options)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._request_timeout_s

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        if self._cluster.has_failed:
            raise GracefulHTTPError(
                "all instances have failed; see the server's log", HTTPStatus.SERVICE_UNAVAILABLE
            )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for job in self._jobs.values():
            job.aborted = job.aborted or job.request.external_req_id in ids
        ids += [f"{one}-p" for one in ids]
        await self._all("abort", ids)

    # ---- state

    @property
    def is_running(self) -> bool:
        return not self._cluster.has_failed

    @property
    def is_stopped(self) -> bool:
        return self._cluster.has_failed

    @property
    def errored(self) -> bool:
        return self._cluster.has_failed

    @property
    def dead_error(self) -> BaseException:
        return compat.EngineDeadError()

    async def check_health(self) -> None:
        """``/health`` is about this process; ``/ready`` tells of the instances."""

    async def is_tracing_enabled(self) -> bool:
        return self.vllm_config.observability_config.otlp_traces_endpoint is not None

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return self._supported_tasks

    async def do_log_stats(self) -> None:
        """Statistics are in ``/metrics``."""

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()


def _own(cache_salt: str | None) -> str | None:
    """The current tenant's ``cache_salt``; the same again for a prompt that comes again."""
    name, given = tenant.get(), cache_salt or ""
    if name is None:
        return cache_salt
    return given if given.startswith(f"{name}:") else f"{name}:{given}"


def _one_leg_because(request: compat.EngineCoreRequest) -> str | None:
    """Why one instance must compute prompt and output: the store cannot stand in between."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt_embeds"
    if request.sampling_params is not None and request.sampling_params.skip_reading_prefix_cache:
        return "prompt_logprobs"
    return None
