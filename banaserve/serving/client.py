"""Engine client over many instances: the object that vLLM's own API server calls."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

from banaserve.base.access.cache_salt import own_prompt, own_salt
from banaserve.base.access.tenants import tenant_terms
from banaserve.base.clock import WallClock
from banaserve.base.types import NO_LIMITS, RequestLimits
from banaserve.contracts.rpc.engine_api import WorkerApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.contracts.trace_events import LookedUp, Prepared
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.front.clients import lent_renderer
from banaserve.engine.compat.front.server import (
    EngineClient,
    InputProcessor,
    extract_prompt_components,
    xgrammar_vocabulary,
)
from banaserve.engine.compat.requests import (
    GracefulHTTPError,
    LoRARequest,
    MaxQueuedTokensError,
    PoolingParams,
    PoolingRequestOutput,
    QueueOverflowError,
    RequestOutput,
    SamplingParams,
)
from banaserve.serving.instances.instance import Instance
from banaserve.serving.instances.lasting_calls import LastingCalls
from banaserve.serving.monitoring import metrics
from banaserve.serving.requests.disagg_request import DEAD, out_of_time, run_request
from banaserve.serving.requests.intake import (
    Adapters,
    Blockers,
    Gate,
    SessionTokens,
    load_adapter,
    num_prompt_tokens,
    take_client_args,
    take_in,
)
from banaserve.serving.requests.request_context import RequestContext
from banaserve.serving.requests.router import Router
from banaserve.serving.requests.sequences import run_sequences, sequences_of
from banaserve.serving.requests.suspects import MAX_DEATHS, given_up
from banaserve.serving.tracing.request_log import HttpCall, RequestLog, http_call

if TYPE_CHECKING:  # OpenTelemetry is imported only if it is used
    from banaserve.serving.tracing.otlp import OtlpTracer

logger = logging.getLogger(__name__)

request_limits: ContextVar[RequestLimits] = ContextVar("request_limits", default=NO_LIMITS)
"""Latency limits that the request of the current task specifies."""
request_keep_s: ContextVar[float] = ContextVar("request_keep_s", default=0.0)
"""Time for which the request of the current task asks to keep its KV, in seconds."""

_WEIGHTS = (
    "weights stay as they are while banaserve serves, since its store holds KV of these: restart it"
)
_FAULTS = "banaserve starts failed engines again by itself: see /ready and `banaserve status`"
_SCALE = "the number of instances is changed with `banaserve scale`"
_CHANGE_WEIGHTS = frozenset({"discard", "load_model", "sleep"})
_LIGHT_SLEEP = 1
_POLL_S, _END_S = 0.02, 5.0
"""Interval of looks at aborted requests, and maximum wait for their ends, in seconds."""


def _refusing(words: str) -> Callable[..., Coroutine[Any, Any, NoReturn]]:
    async def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(words)

    return refuse


def _to_serving(method: str) -> Callable[..., Coroutine[Any, Any, None]]:
    async def broadcast(client: DisaggregatedClient, *args: Any, **kwargs: Any) -> None:
        await client._broadcast(method, *args, **kwargs)

    return broadcast


def _to_all(method: str) -> Callable[..., Coroutine[Any, Any, None]]:
    async def call_all(client: DisaggregatedClient, *args: Any, **kwargs: Any) -> None:
        await client._call_all(method, *args, **kwargs)

    return call_all


class DisaggregatedClient(EngineClient):
    """vLLM's ``EngineClient`` over all instances, called by vLLM's own API server.

    ``generate`` runs two legs, ``encode`` uses one instance; control methods go to every instance
    that serves, and those whose effect lasts to the others when they start. Methods that would
    invalidate the store's KV, or whose work banaserve does itself, raise NotImplementedError, which
    the API server answers with status 501.

    Args:
        config: Configuration of the engines; a copy is kept, with the engines' context length.
        request_timeout_s: Time budget for all legs of a request together, in seconds.
        lookup_above_tokens: Prompt length in tokens above which prompts are looked up in the store
            before routing.
        lasting: Lasting calls to the engines.
        end_moves: Function that ends all moves of modules for the reason given; none begins while
            engines are paused.
        has_store_peers: True if the store fetches blocks from stores of other servers.

    Attributes:
        requests: Notes of the last requests, for ``banaserve trace``.
        tracer: Maker of the OpenTelemetry spans of requests; None if tracing is off.
    """

    def __init__(
        self,
        config: VllmConfig,
        router: Router,
        request_timeout_s: float,
        lookup_above_tokens: int,
        lasting: LastingCalls,
        end_moves: Callable[[str], Awaitable[None]],
        has_store_peers: bool = False,
    ) -> None:
        self.vllm_config = copy.deepcopy(config)
        self.model_config = self.vllm_config.model_config
        self.renderer = lent_renderer(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self._router = router
        self._cluster = router.cluster
        self._adapters = Adapters()
        self._request_timeout_s = request_timeout_s
        self._lookup_above_tokens = lookup_above_tokens
        self._has_store_peers = has_store_peers
        self._lasting = lasting
        self._end_moves = end_moves
        self._calling = asyncio.Lock()  # engines get lasting calls in the same order
        self._gate = Gate()
        self._supported_tasks: tuple[Any, ...] = ()
        self._sequences: dict[int, Sequence[RequestContext]] = {}
        self._clock = WallClock()
        self.requests = RequestLog(self._clock)
        self.tracer: OtlpTracer | None = None

    async def adopt_engine_facts(self) -> None:
        """Adopt the values that the engines chose at start: context length, cache size, tasks."""
        engines = [i.llm.vllm_config for i in self._cluster.serving() if i.llm is not None]
        if not engines:
            raise compat.EngineDeadError
        self.model_config.max_model_len = min(e.model_config.max_model_len for e in engines)
        cache = self.vllm_config.cache_config
        cache.num_gpu_blocks = engines[0].cache_config.num_gpu_blocks
        cache.block_size = engines[0].cache_config.block_size
        (self._supported_tasks, *_) = await self.ask("get_supported_tasks")

    def grammar_vocabulary(self) -> str:
        """Return the model's vocabulary in xgrammar's format; empty if it has none. Blocks."""
        return xgrammar_vocabulary(self.vllm_config)

    # ---- generating

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run the prefill leg, then the decode leg; see ``run_request``."""
        http = http_call.get()
        call = http or HttpCall(self._clock.now(), time.time())
        if inspect.isasyncgen(prompt):
            session = self._streaming_input(prompt, sampling_params, request_id, options)
            async with contextlib.aclosing(session) as outputs:
                async for output in outputs:
                    yield output
            return
        made = await self._processed(prompt, sampling_params, request_id, options)
        request, prompt_text, blockers = made
        num_tokens, terms = num_prompt_tokens(request), tenant_terms.get()
        if terms is not None:
            terms.use_tokens(num_tokens)
        with self.requests.following(request_id, num_tokens, call) as notes:
            if http is not None and self.tracer is not None:
                notes.span = self.tracer.begin(call, notes, sampling_params)
            notes.note(Prepared())
            limits, cached_tokens = request_limits.get(), 0
            if num_tokens > self._lookup_above_tokens:
                began_s = self._clock.now()
                cached_tokens = await self._router.lookups.cached_tokens(request)
                notes.cached_tokens = cached_tokens
                notes.note(LookedUp(cached_tokens, self._clock.now() - began_s))
            uncached_tokens = max(0, num_tokens - cached_tokens)
            await self._gate.passed()
            self.check_admission(sampling_params.n)
            deadline = asyncio.get_running_loop().time() + self._request_timeout_s
            whole = RequestContext(
                request,
                prompt_text,
                blockers,
                deadline,
                notes,
                limits,
                uncached_tokens,
                request_keep_s.get(),
            )
            if whole.params.n == 1:
                sequences, run = [whole], run_request(whole, self._router)
            else:
                sequences = sequences_of(whole)
                run = run_sequences(sequences, self._router)
            notes.tokens_so_far = lambda: sum(one.num_output_tokens for one in sequences)
            self._sequences[id(run)] = sequences
            try:
                async with contextlib.aclosing(run) as outputs:
                    async for output in outputs:
                        if output.finished:
                            notes.finish_reason = output.outputs[0].finish_reason
                        yield output
            finally:
                self._sequences.pop(id(run), None)
                num_output_tokens = notes.count_output()
                if terms is not None:
                    terms.use_tokens(num_output_tokens)
                if notes.finish_reason in ("stop", "length"):
                    for one in sequences:
                        self._router.output_lengths.ended(one.num_output_tokens)

    async def _processed(
        self, prompt: Any, params: SamplingParams, request_id: str, options: Mapping[str, Any]
    ) -> tuple[compat.EngineCoreRequest, str | None, Blockers]:
        """Return the request, tokenised and validated, the text of its prompt, and its blockers."""
        given = self._engine_options(params, options)
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
        model = self.model_config
        blockers = take_in(request, model.max_model_len, bool(model.logits_processors))
        request.cache_salt = own_salt(request.cache_salt)
        if request.cache_salt is not None and isinstance(prompt, dict):
            prompt["cache_salt"] = request.cache_salt
        if prompt_text is None:
            prompt_text, _, _ = extract_prompt_components(model, prompt)
        return request, prompt_text, blockers

    def _engine_options(self, params: SamplingParams, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of ``generate`` as engines take them; remove what clients may not say."""
        given = self._adapters.resolve_lora(options)
        given.pop("trace_headers", None)  # engines do not use them: spans are made here
        take_client_args(params)
        terms = tenant_terms.get()
        if terms is not None and terms.priority is not None:
            given["priority"] = terms.priority
        return given

    async def _streaming_input(
        self, prompt: Any, params: SamplingParams, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a session whose prompt arrives in pieces, on one instance."""
        given = self._engine_options(params, options)
        instance = (await self._serving())[-1]
        assert instance.llm is not None
        tokens = SessionTokens(tenant_terms.get(), params)
        tokens.check()
        stream = instance.llm.generate(_salted(prompt), params, request_id, **given)
        try:
            await load_adapter(instance, given.get("lora_request"))
            with instance.holding(0):
                async with contextlib.aclosing(stream) as outputs:
                    async for output in outputs:
                        tokens.add(output)
                        yield output
                        tokens.check()
        except DEAD as death:
            metrics.BROKEN.inc()
            raise compat.EngineGenerateError(
                f"instance {instance.id} died in mid-session; begin it again"
            ) from death

    async def encode(  # type: ignore[override]  # of its options only those that it names
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Compute a pooling request on the least busy instance, or on another if that one dies.

        Raises:
            GracefulHTTPError: No instance serves, the deadline has passed, or ``MAX_DEATHS``
                instances died under the request.
        """
        own_prompt(prompt)
        options.pop("trace_headers", None)
        options = self._adapters.resolve_lora(options)
        deadline = asyncio.get_running_loop().time() + self._request_timeout_s
        num_deaths = 0
        while num_deaths < MAX_DEATHS:
            try:
                async with asyncio.timeout_at(deadline):
                    serving = await self._serving()
            except TimeoutError:
                raise out_of_time() from None
            instance = min(serving, key=lambda i: i.inflight_requests)
            llm = instance.llm  # None again if the engine ends meanwhile
            assert llm is not None
            try:
                async with asyncio.timeout_at(deadline):
                    await load_adapter(instance, options.get("lora_request"))
                with instance.holding(0):
                    stream = llm.encode(prompt, pooling_params, request_id, **options)
                    async with contextlib.aclosing(stream):
                        while True:
                            # Encloses no yield, since different tasks may ask for the outputs.
                            async with asyncio.timeout_at(deadline):
                                output = await anext(stream, None)
                            if output is None:
                                return
                            yield output
                            if (terms := tenant_terms.get()) is not None and output.finished:
                                terms.use_tokens(len(output.prompt_token_ids))
            except DEAD:
                num_deaths += not instance.is_orphaned
                metrics.RETRIES.labels("pooling").inc()
            except TimeoutError:
                raise out_of_time() from None
        raise given_up(request_id, MAX_DEATHS)

    async def _serving(self) -> list[Instance]:
        """Return the instances that a request of one leg may go to, at least one.

        Raises:
            GracefulHTTPError: No instance serves.
        """
        if serving := await self._cluster.taking():
            return serving
        raise _nobody_serves()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request beyond vLLM's limits, which are of all instances together.

        Raises:
            GracefulHTTPError: 503: all instances have failed, or too many requests or tokens wait.
        """
        if self._cluster.has_failed:
            raise GracefulHTTPError(
                "all instances have failed; see the server's log", HTTPStatus.SERVICE_UNAVAILABLE
            )
        limits = self.vllm_config.scheduler_config
        most, most_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
        if most is not None and sum(1 for _ in self._under_way()) + n > most:
            raise QueueOverflowError
        if most_tokens is not None:
            waiting = (one.num_prompt_tokens for one in self._under_way() if not one.progress)
            if sum(waiting) >= most_tokens:
                raise MaxQueuedTokensError

    # ---- methods that go to every instance

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for context in self._under_way():
            context.aborted = context.aborted or context.request.external_req_id in ids
        ids += [f"{one}-p" for one in ids]
        await self._broadcast("abort", ids)

    def request_ids(self) -> set[str]:
        """Return the ids, as clients know them, of the requests that have not ended."""
        here = {str(context.request.external_req_id) for context in self._under_way()}
        engines = [i.llm for i in self._cluster.serving() if i.llm is not None]
        legs = {one for llm in engines for one in compat.request_ids(llm)}
        return here | {one for one in legs if one.removesuffix("-p") not in here}

    start_profile = _to_all("start_profile")
    stop_profile = _to_all("stop_profile")
    reset_mm_cache = _to_serving("reset_mm_cache")
    reset_encoder_cache = _to_serving("reset_encoder_cache")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self._router.residency.forget()
        await self._router.lookups.told()
        answers = await self._broadcast(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )
        if reset_connector and self._has_store_peers:
            logger.warning("reset of the store: the stores of --kv-store-peer keep their blocks")
            return False
        return bool(answers) and all(answers)

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        if level > _LIGHT_SLEEP:
            # Awake again, the engine would compute without them and put wrong KV into the store.
            raise NotImplementedError(f"sleep level {level} throws weights away: use level 1")
        drops_kept = level and mode == "keep"
        if drops_kept:
            self._check_none_under_way()
        self._router.residency.forget()
        held = self._gate.closed(()) if drops_kept else contextlib.nullcontext()
        async with held, self._stopped(mode):
            paused = self._lasting.calls
            self._lasting.begin("sleep", level, "keep")
            try:
                await self._broadcast("sleep", level, mode)
            except Exception:
                self._lasting.calls = paused
                raise

    def _check_none_under_way(self) -> None:
        if self.request_ids():
            raise ValueError("this drops the KV of requests under way: pause with another mode")

    async def release_kv_cache_memory(self) -> None:
        async with self._calling:
            self._check_none_under_way()  # or some engines would do it, and others refuse
            self._router.residency.forget()
            await self._broadcast("release_kv_cache_memory")
            self._lasting.begin("release_kv_cache_memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        async with self._calling:
            if tags is None:
                self._lasting.end()
            elif self._lasting.calls:
                self._lasting.begin("wake_up", tags)
            is_awake = all(await self._broadcast("wake_up", tags))
            if is_awake:
                self._lasting.end()
        return is_awake

    async def is_sleeping(self) -> bool:
        return bool(self._lasting.calls) or any(await self._broadcast("is_sleeping"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        self._adapters.begin(lora_request)
        for instance in self._cluster.serving():
            instance.adapters.add(lora_request.lora_int_id)
        added = all(await self.ask("add_lora", lora_request))
        digest = await self._adapters.loaded(lora_request)
        asked = call(WorkerApi.banaserve_describe_adapter, lora_request.lora_path)
        answers = await self._broadcast("collective_rpc", asked.name, args=asked.args)
        if any(asked.read(one) != digest for answer in answers for one in answer):
            raise ValueError(f"{lora_request.lora_path}: copy the same files to all machines")
        return added

    async def pause_generation(self, *, mode: Any = "abort", clear_cache: bool = True) -> None:
        async with self._stopped(mode):
            if clear_cache and mode != "keep":  # requests that are kept hold blocks in the store
                self._router.residency.forget()
                await self._broadcast("pause_generation", mode=mode, clear_cache=True)

    async def resume_generation(self) -> None:
        self._gate.open()
        async with self._calling:
            self._lasting.end()
            await self._broadcast("resume_generation")

    async def is_paused(self) -> bool:
        return bool(self._lasting.calls) or any(await self._broadcast("is_paused"))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if "weight" in method or method in _CHANGE_WEIGHTS:
            raise NotImplementedError(f"{method}: {_WEIGHTS}")
        answers = await self._call_all("collective_rpc", method, timeout, args, kwargs)
        return [one for answer in answers for one in answer]

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: Mapping[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Ignore the rejection: leases end with their request."""

    @contextlib.asynccontextmanager
    async def _stopped(self, mode: Any) -> AsyncIterator[None]:
        """Stop all engines until they are resumed, also those that start later; then run the block.

        With ``mode`` "wait", engines are told once all requests under way have ended: an engine
        would hold back the decode leg of a request that another engine has begun. Caches are left
        to the block: the first engine that clears them empties the store, in which neither other
        engines nor requests that have ended may hold blocks any more. Moves of modules are aborted:
        a move reads memory that sleep gives back.
        """
        is_waiting = mode == "wait" and not self._lasting.calls
        held = self._gate.closed(self._sequences) if is_waiting else contextlib.nullcontext()
        async with held, self._calling:
            self._lasting.begin("pause_generation", mode="keep", clear_cache=False)
            # One that shrinks a pool holds blocks, so that no cache could be cleared.
            await self._end_moves("the engines sleep or are paused")
            ending = set(self._sequences) if mode == "abort" else set()
            if mode == "abort":  # prefill legs must not be retried as if an engine died
                for context in self._under_way():
                    context.aborted = True
            await self._broadcast("pause_generation", mode=mode, clear_cache=False)
            until_s = self._clock.now() + _END_S
            while ending & self._sequences.keys() and self._clock.now() < until_s:
                await self._clock.sleep(_POLL_S)
            await self._router.lookups.told()
            yield

    async def _call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every engine.

        Raises:
            GracefulHTTPError: An instance does not serve, so that none is called, or one has ended
                during the call.
        """
        every = self._cluster.instances.values()
        serving = self._cluster.serving()
        if away := [one.id for one in every if one not in serving]:
            words = f"instance {', '.join(away)} does not serve: nothing has been done"
        else:
            answers = await self._broadcast(method, *args, **kwargs)
            if len(answers) == len(serving):
                return answers
            words = "an instance ended meanwhile: only the others have done it"
        raise GracefulHTTPError(f"{method}: {words}", HTTPStatus.SERVICE_UNAVAILABLE)

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of the engines that serve to a call, at least one answer.

        Raises:
            GracefulHTTPError: No instance serves.
        """
        if answers := await self._broadcast(method, *args):
            return answers
        raise _nobody_serves()

    async def _broadcast(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every engine that serves, and return their answers.

        An engine that ends meanwhile gives none: when it serves again it has neither requests nor
        caches, and has got the lasting calls.

        Raises:
            Exception: First error of an engine, after all have answered.
        """
        llms = [i.llm for i in self._cluster.serving() if i.llm is not None]
        calls = (getattr(llm, method)(*args, **kwargs) for llm in llms)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for one in answers:
            if isinstance(one, BaseException) and not isinstance(one, compat.EngineDeadError):
                raise one
        return [one for one in answers if not isinstance(one, BaseException)]

    def _under_way(self) -> Iterator[RequestContext]:
        return itertools.chain.from_iterable(self._sequences.values())

    # ---- methods that are refused

    init_weight_transfer_engine = _refusing(_WEIGHTS)
    shutdown_weight_transfer_engine = _refusing(_WEIGHTS)
    start_weight_update = _refusing(_WEIGHTS)
    start_draft_weight_update = _refusing(_WEIGHTS)
    update_weights = _refusing(_WEIGHTS)
    finish_weight_update = _refusing(_WEIGHTS)
    update_weight_version = _refusing(_WEIGHTS)
    get_weight_version = _refusing(_WEIGHTS)
    compute_weight_checksums = _refusing(_WEIGHTS)
    handle_fault = _refusing(_FAULTS)
    get_status = _refusing(_FAULTS)
    scale_elastic_ep = _refusing(_SCALE)

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
        """Return if the server serves, or did so recently; called for ``/health``.

        Instances that are being restarted make only ``/ready`` fail: an orchestrator that restarts
        an unhealthy server would only prolong the outage.

        Raises:
            EngineDeadError: All instances have been given up, or none has taken requests for
                minutes.
        """
        if not self._cluster.is_healthy:
            raise compat.EngineDeadError

    async def is_tracing_enabled(self) -> bool:
        return self.tracer is not None

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return self._supported_tasks

    async def do_log_stats(self) -> None:
        """Log nothing: statistics are in ``/metrics``."""

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()


def _nobody_serves() -> GracefulHTTPError:
    return GracefulHTTPError("no instance serves", HTTPStatus.SERVICE_UNAVAILABLE)


async def _salted(pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the pieces of a session's prompt, each with the tenant's ``cache_salt``."""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            own_prompt(piece.prompt)
            yield piece
