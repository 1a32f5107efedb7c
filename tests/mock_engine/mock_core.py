"""Mock of a vLLM engine core: its protocol, with scripted tokens and times, without a model.

``Steps`` decides, ``MockCore`` speaks. Tokens follow from weights, prompt, position and seed alone,
so a stream that goes on elsewhere has the tokens that it would have had.

Usage: python -P mock_core.py INSTANCE HANDSHAKE_ADDRESS ENGINE_OPTION...
"""

from __future__ import annotations

import array as numbers
import os
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import zmq

import mock_protocol as protocol
from banaserve.base.config.serve_config import Budget
from banaserve.contracts.rpc.engine_api import CoreApi, PoolResize, PoolStatus, WorkerApi
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.engine.continuation import output_of
from banaserve.kvstore.fingerprint import Fingerprint
from mock_facts import VLLM, EngineFacts, MockOptions, Trouble
from mock_protocol import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    PrefillStats,
    PrefixCacheStats,
    RequestType,
    SchedulerStats,
    UtilityOutput,
    token_at,
)

DIES_AT = "dies_at"
"""In a request's ``vllm_xargs``: number of the token, from 0, before which its core dies."""
_CANNOT_MIGRATE = {"type": "Refused", "reason": "a mock engine cannot migrate"}
_PAUSE_MODES = ("abort", "wait", "keep")
_LINGER_MS = 4000
_IDENTITY = (0).to_bytes(2, "little")


class Running:
    """A request in a mock core.

    Attributes:
        output: Tokens so far, those that it has brought along included.
        is_counted: True once the counts of the prompt have been reported.
        num_computed: Tokens of prompt and output whose KV it has.
        num_cached: Tokens of the prompt that lay in the prefix cache.
        blocks: Number of KV blocks that it holds.
        events: Events that have not been told.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None, "mock cores do not pool"
        self.id = request.request_id
        self.priority = request.priority
        self.client_index = request.client_index
        self.params = request.sampling_params
        self.prompt = request.prompt_token_ids or []
        self.salt = request.cache_salt
        self.output = list(output_of(self.params))
        self.is_counted = len(self.output) > 1  # its prompt was counted where it was computed
        self.num_computed = self.num_cached = self.blocks = 0
        self.events = [EngineCoreEvent(EventType.QUEUED, time.monotonic())]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def is_deadly(self) -> bool:
        """Whether its core is to die before its next token."""
        number = (self.params.extra_args or {}).get(DIES_AT)
        return number is not None and len(self.output) >= number

    @property
    def max_tokens(self) -> int:
        """Number of output tokens after which it ends."""
        return self.params.max_tokens if self.params.max_tokens is not None else sys.maxsize


class Steps:
    """Requests of an engine and its KV blocks: which compute in a step, and what comes of it.

    All blocks that a request may need are taken when it begins, so none is preempted.

    Attributes:
        budget: Limits of a step.
        num_blocks: KV blocks of the pool.
        is_paused: True while no waiting request may start.
        is_frozen: True while running requests stand still too.
    """

    def __init__(self, facts: EngineFacts, options: MockOptions) -> None:
        self._facts = facts
        self._end_after = options.answer_tokens
        self._tokens = range(*facts.tokens)
        self.budget = Budget(facts.max_step_tokens, facts.max_running)
        self.num_blocks = facts.num_blocks
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        self.is_paused = self.is_frozen = False
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cache_stats = PrefixCacheStats()
        self._scheduled: dict[str, int] = {}
        self._has_finished = False

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made; one follows the end of a request, as in vLLM."""
        if self.is_frozen:
            return False
        begins = bool(self.waiting) and not self.is_paused
        return bool(self.running) or begins or self._has_finished

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(one.blocks for one in self.running.values())

    def add(self, request: Running) -> None:
        self.waiting[request.id] = request

    def remove(self, request_id: str) -> Running | None:
        """Take a request out; None where there is none of this id."""
        found = self.running.pop(request_id, None)
        if found is not None:
            self._has_finished = True
            return found
        return self.waiting.pop(request_id, None)

    def schedule(self) -> int:
        """Choose what the next step computes; returns the number of its tokens."""
        self._scheduled = {}
        self._has_finished = False
        left = self.budget.num_tokens
        for one in self.running.values():
            left -= self._take(one, left)
        for one in list(self._next_waiting()):
            if left <= 0 or len(self.running) >= self.budget.num_requests or not self._admit(one):
                break
            left -= self._take(one, left)
        return self.budget.num_tokens - left

    def _next_waiting(self) -> Iterator[Running]:
        if not self.is_paused:
            yield from sorted(self.waiting.values(), key=lambda one: one.priority)

    def _take(self, request: Running, left: int) -> int:
        taken = min(request.num_tokens - request.num_computed, left)
        if taken > 0:
            self._scheduled[request.id] = taken
        return max(taken, 0)

    def _admit(self, request: Running) -> bool:
        most = min(len(request.prompt) + request.max_tokens, self._facts.max_model_len)
        blocks = -(-most // self._facts.block_size)
        if blocks > self.free_blocks:
            return False
        request.blocks = blocks
        request.num_computed = request.num_cached = self._hit(request)
        request.events.append(EngineCoreEvent(EventType.SCHEDULED, time.monotonic()))
        self.running[request.id] = self.waiting.pop(request.id)
        return True

    def _hit(self, request: Running) -> int:
        """Tokens of its prompt that lie in the prefix cache; its blocks are put there."""
        size, key, cached = self._facts.block_size, hash(request.salt), 0
        for first in range(0, len(request.prompt) - size, size):
            key = hash((key, tuple(request.prompt[first : first + size])))
            if key in self._cached and cached == first:
                cached = first + size
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self.num_blocks:
            self._cached.popitem(last=False)
        self._cache_stats.requests += 1
        self._cache_stats.queries += len(request.prompt)
        self._cache_stats.hits += cached
        return cached

    @property
    def is_deadly(self) -> bool:
        """Whether the step computes a token of which its core is to die."""
        return any(self.running[one].is_deadly for one in self._scheduled if one in self.running)

    def finish(self) -> list[tuple[int, EngineCoreOutput]]:
        """Outputs of the step that was chosen, each with the number of its client."""
        found = []
        for request_id, taken in self._scheduled.items():
            request = self.running.get(request_id)
            if request is None:
                continue
            request.num_computed += taken
            if request.num_computed >= request.num_tokens:
                found.append((request.client_index, self._advance(request)))
        return found

    def _advance(self, request: Running) -> EngineCoreOutput:
        token = self._next_token(request)
        request.output.append(token)
        reason, stop = self._end(request, token)
        output = EngineCoreOutput(
            request.id,
            [token],
            new_logprobs=_logprobs(token, request.params.logprobs, self._tokens),
            finish_reason=reason,
            stop_reason=stop,
            events=request.events or None,
            prefill_stats=None if request.is_counted else _prefill_stats(request),
        )
        request.events, request.is_counted = [], True
        if reason is not None:
            self.remove(request.id)
        return output

    def _next_token(self, request: Running) -> int:
        params, position = request.params, len(request.output)
        is_early = position < params.min_tokens
        end = params.eos_token_id
        if end is not None and 0 < self._end_after <= position + 1 and not is_early:
            return end
        return token_at(
            self._facts.weights,
            request.prompt,
            position,
            (params.seed or 0) if params.temperature > 0 else 0,
            params.allowed_token_ids or self._tokens,
            params.all_stop_token_ids if is_early else (),
        )

    def _end(self, request: Running, token: int) -> tuple[FinishReason | None, int | None]:
        if token == request.params.eos_token_id:
            return FinishReason.STOP, None
        if token in (request.params.stop_token_ids or ()):
            return FinishReason.STOP, token
        is_full = request.num_tokens >= self._facts.max_model_len
        if is_full or len(request.output) >= request.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def stats(self) -> SchedulerStats:
        """Statistics of the step; those of the prefix cache since the last ones."""
        told, self._cache_stats = self._cache_stats, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=1.0 - self.free_blocks / self.num_blocks,
            prefix_cache_stats=told,
        )

    def reset_cache(self) -> None:
        self._cached.clear()
        self._cache_stats.reset = True


def _prefill_stats(request: Running) -> PrefillStats:
    num, cached = len(request.prompt), request.num_cached
    return PrefillStats(
        num_prompt_tokens=num,
        num_computed_tokens=num - cached,
        num_cached_tokens=cached,
        num_local_cached_tokens=cached,
    )


def _logprobs(token: int, num: int | None, tokens: range) -> Any:
    """Log probabilities of a position: the token's own first, and those of ``num`` others."""
    if num is None:
        return None
    others = [tokens[(token + step) % len(tokens)] for step in range(num)]
    ids, values = [token, *others], [-1.0 - place for place in range(num + 1)]
    shape = (1, len(ids))
    return (
        protocol.array("<i4", shape, numbers.array("i", ids).tobytes()),
        protocol.array("<f4", shape, numbers.array("f", values).tobytes()),
        protocol.array("<i8", (1,), numbers.array("q", [1]).tobytes()),
        None,
    )


class MockCore:
    """A mock engine core that serves one front end.

    Args:
        instance_id: Name of its instance, by which troubles name it.
    """

    def __init__(
        self, instance_id: str, handshake_address: str, facts: EngineFacts, options: MockOptions
    ) -> None:
        self._id = instance_id
        self._facts = facts
        self._options = options
        self._steps = Steps(facts, options)
        trouble = options.trouble_of(instance_id)
        # One of a start leaves its file to a core that starts.
        self._trouble = None if trouble is None or trouble.is_of_start else trouble
        self._num_tokens = 0
        self._weight_version = "default"
        self._is_ending = False
        self._pausing: deque[UtilityOutput] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._read_request = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._context = zmq.Context(io_threads=1)
        self._wake_read, self._wake_write = socket.socketpair()
        self._own_signals()
        inputs, outputs = self._shake(handshake_address)
        self._input = self._socket(zmq.SocketType.DEALER, inputs)
        self._output = self._socket(zmq.SocketType.PUSH, outputs)
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.PollEvent.POLLIN)
        self._poller.register(self._wake_read, zmq.PollEvent.POLLIN)
        self._input.send(self._encoder.encode(self._ready_response()))
        self._handshake.send(self._encoder.encode(_status("READY")))
        self._handshake.close()

    def run(self) -> None:
        """Serve until SIGTERM; the step under way is finished first."""
        while not self._is_ending:
            self._read_input()
            if self._steps.has_work:
                self._step()
        self._say_dead()

    # ---- sockets

    def _shake(self, address: str) -> tuple[str, str]:
        self._handshake = self._socket(zmq.SocketType.DEALER, address)
        self._handshake.send(self._encoder.encode(_status("HELLO")))
        told = msgspec.msgpack.decode(self._handshake.recv())["addresses"]
        return told["inputs"][0], told["outputs"][0]

    def _socket(self, kind: zmq.SocketType, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        for option in (zmq.SocketOption.SNDHWM, zmq.SocketOption.RCVHWM):
            made.setsockopt(option, 0)
        made.setsockopt(zmq.SocketOption.LINGER, _LINGER_MS)
        if kind is zmq.SocketType.DEALER:
            made.setsockopt(zmq.SocketOption.IDENTITY, _IDENTITY)
        made.connect(address)
        return made

    def _own_signals(self) -> None:
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def _ready_response(self) -> protocol.EngineCoreReadyResponse:
        facts = self._facts
        num_tokens = facts.num_blocks * facts.block_size
        return protocol.EngineCoreReadyResponse(
            max_model_len=facts.max_model_len,
            num_gpu_blocks=facts.num_blocks,
            block_size=facts.block_size,
            dp_stats_address=None,
            dtype=facts.dtype,
            vllm_version=VLLM,
            world_size=facts.num_ranks,
            data_parallel_size=1,
            tensor_parallel_size=facts.num_ranks,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            max_num_seqs=facts.max_running,
            max_num_batched_tokens=facts.max_step_tokens,
            instance_id=f"{self._id}.{os.getpid()}",
            supports_lora=False,
            max_loras=0,
            kv_cache_size_tokens=num_tokens,
            kv_cache_max_concurrency=num_tokens / facts.max_model_len,
            effective_attention_block_size=facts.block_size,
        )

    def _send(self, outputs: EngineCoreOutputs) -> None:
        self._output.send(self._encoder.encode(outputs))

    def _say_dead(self) -> None:
        self._output.send(protocol.ENGINE_CORE_DEAD)
        self._flush()

    def _die(self) -> NoReturn:
        """End by a kill, once what has been put out is on its way: a thread of zmq's sends it."""
        self._flush()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("nobody survives that")

    def _flush(self) -> None:
        for one in (self._input, self._output):
            one.close()
        self._context.term()

    # ---- messages

    def _read_input(self) -> None:
        """Read all messages that have come; wait for one where there is nothing to compute."""
        waits_ms = 0 if self._steps.has_work else None
        for source, _ in self._poller.poll(waits_ms):
            if source == self._wake_read.fileno():
                self._wake_read.recv(64)
        while self._input.poll(0):
            kind, *body = self._input.recv_multipart()
            self._handle(RequestType(kind), body[0])

    def _handle(self, kind: RequestType, body: bytes) -> None:
        match kind:
            case RequestType.ADD:
                request = self._read_request.decode(body)
                self._steps.add(Running(request))
                if self._trouble is not None and self._trouble.token in request.prompt_token_ids:
                    self._meet(self._trouble, request.request_id)
            case RequestType.ABORT:
                for request_id in msgspec.msgpack.decode(body):
                    self._steps.remove(request_id)
            case RequestType.UTILITY:
                self._answer(*msgspec.msgpack.decode(body))
            case RequestType.START_DP_WAVE:
                pass

    def _answer(self, _client: int, call_id: int, method: str, args: Sequence[Any]) -> None:
        if self._options.answer_ms:
            time.sleep(self._options.answer_ms / 1000)
        answer = UtilityOutput(call_id)
        try:
            utility = getattr(self, f"utility_{method}", None)
            if utility is None:
                raise AttributeError(f"'EngineCoreProc' object has no attribute '{method}'")
            result = utility(*args)
        except Exception as error:
            answer.failure_message = f"Call to {method} method failed: {error}"
        else:
            answer.result = (None, result)
            if method == "pause_scheduler" and self._steps.has_work:
                self._pausing.append(answer)
                return
        self._send(EngineCoreOutputs(utility_output=answer))

    # ---- steps

    def _step(self) -> None:
        began_s = time.monotonic()
        num_tokens = self._steps.schedule()
        if num_tokens:
            options = self._options
            took_ms = options.step_ms + options.prefill_token_ms * num_tokens
            took_ms += options.request_ms * len(self._steps.running)
            time.sleep(max(0.0, began_s + took_ms / 1000 - time.monotonic()))
        if self._steps.is_deadly:
            self._die()
        outputs = [output for _, output in self._steps.finish()]
        stats = self._steps.stats()
        if self._facts.fingerprint is not None and num_tokens:
            stats.kv_connector_stats = self._work(num_tokens, len(outputs), began_s, stats)
        self._send(
            EngineCoreOutputs(
                outputs=outputs, scheduler_stats=stats, weight_version=self._weight_version
            )
        )
        self._count(len(outputs))
        while self._pausing and not self._steps.has_work:
            self._send(EngineCoreOutputs(utility_output=self._pausing.popleft()))

    def _work(
        self, num_tokens: int, num_decoding: int, began_s: float, stats: SchedulerStats
    ) -> dict[str, float]:
        """Counts of a step by banaserve's connector."""
        begun = stats.prefix_cache_stats
        return {
            "steps": 1,
            "busy_seconds": time.monotonic() - began_s,
            "step_prefill_tokens": max(0, num_tokens - num_decoding),
            "step_decode_requests": num_decoding,
            "scheduled_requests": begun.requests,
            "prompt_tokens_computed": begun.queries - begun.hits,
            "prompt_tokens_cached": begun.hits,
        }

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        trouble = self._trouble
        if trouble is None or trouble.token is not None or not num_tokens:
            return
        if self._num_tokens >= trouble.after_tokens:
            self._meet(trouble)

    def _meet(self, trouble: Trouble, request_id: str = "") -> None:
        """Let a trouble happen, unless it has happened to another core.

        Args:
            request_id: Of the request that it happens at; empty for none.
        """
        if not takes(trouble):
            return
        match trouble.how:
            case "die":
                self._die()
            case "hang":
                hang()
            case "spin":
                while True:
                    pass
            case "end in error":
                self._end_all([request_id], FinishReason.ERROR)
            case "fatal":
                print("RuntimeError: a mock core's fatal error", file=sys.stderr, flush=True)
                self._say_dead()
                sys.exit(1)

    # ---- utility calls of vLLM

    def utility_get_supported_tasks(self) -> list[str]:
        return ["generate"]

    def utility_is_scheduler_paused(self) -> bool:
        return self._steps.is_paused

    def utility_is_sleeping(self) -> bool:
        return self._steps.is_paused

    def utility_pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode not in _PAUSE_MODES:
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            self._abort_all()
        self._steps.is_paused, self._steps.is_frozen = True, mode == "keep"
        if clear_cache:
            self._steps.reset_cache()

    def utility_resume_scheduler(self) -> None:
        self._steps.is_paused = self._steps.is_frozen = False

    def utility_sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.utility_pause_scheduler(mode, level >= 1)

    def utility_wake_up(self, tags: list[str] | None = None) -> bool:
        self.utility_resume_scheduler()
        return True

    def utility_reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self._steps.reset_cache()
        return True

    def utility_set_weight_version(self, weight_version: str) -> None:
        self._weight_version = weight_version

    def utility_get_weight_version(self) -> str:
        return self._weight_version

    def utility_profile(self, *_: Any) -> None: ...

    def utility_reset_mm_cache(self) -> None: ...

    def utility_reset_encoder_cache(self) -> None: ...

    def utility_release_kv_cache_memory(self) -> None: ...

    def utility_execute_dummy_batch(self) -> None: ...

    def utility_list_loras(self) -> NoReturn:
        raise RuntimeError("LoRA is not enabled. Use --enable-lora to enable LoRA.")

    utility_add_lora = utility_remove_lora = utility_pin_lora = utility_list_loras

    def utility_collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        if method == WorkerApi.banaserve_fingerprint.__name__:
            return [self._fingerprint(*args)] * self._facts.num_ranks
        if method.startswith("banaserve_migration_"):
            return [_CANNOT_MIGRATE] * self._facts.num_ranks
        raise NotImplementedError(f"Method '{method}' is not implemented.")

    def _abort_all(self) -> None:
        steps = self._steps
        names = [*steps.running, *steps.waiting]
        if not names:
            return
        self._end_all(names, FinishReason.ABORT)

    def _end_all(self, names: Sequence[str], reason: FinishReason) -> None:
        """End requests with no further token."""
        for name in names:
            self._steps.remove(name)
        outputs = [EngineCoreOutput(name, [], finish_reason=reason) for name in names]
        self._send(EngineCoreOutputs(outputs=outputs, finished_requests=set(names)))

    # ---- utility calls of banaserve

    @implements(WorkerApi.banaserve_fingerprint)
    def _fingerprint(self) -> Fingerprint | None:
        return self._facts.fingerprint

    @implements(CoreApi.banaserve_set_budget)
    def utility_banaserve_set_budget(self, num_tokens: int, num_requests: int) -> Budget:
        facts = self._facts
        self._steps.budget = Budget(
            min(num_tokens, facts.max_step_tokens), min(num_requests, facts.max_running)
        )
        return self._steps.budget

    @implements(CoreApi.banaserve_notes)
    def utility_banaserve_notes(self, names: list[str]) -> None:
        return None

    @implements(CoreApi.banaserve_pool_info)
    def utility_banaserve_pool_info(self) -> PoolStatus:
        return self._pool()

    @implements(CoreApi.banaserve_resize_pool)
    def utility_banaserve_resize_pool(self, num_blocks: int, hold: bool = False) -> PoolResize:
        used = self._steps.num_blocks - self._steps.free_blocks
        busy = max(0, used - num_blocks)
        if not busy:
            self._steps.num_blocks = num_blocks
        return PoolResize(self._pool(), busy)

    def _pool(self) -> PoolStatus:
        steps = self._steps
        return PoolStatus(
            steps.num_blocks, steps.free_blocks, len(steps.running), len(steps.waiting), 0
        )


def _status(word: str) -> dict[str, Any]:
    return {"status": word, "local": True, "headless": False}


def takes(trouble: Trouble) -> bool:
    """Whether a trouble happens to this process: one with a file happens to one process."""
    if not trouble.once:
        return True
    try:
        os.rename(trouble.once, taken(trouble.once, os.getpid()))
    except FileNotFoundError:
        return False
    return True


def taken(once: str, pid: int | str) -> str:
    """Name that the file of a trouble has after the trouble has happened to process ``pid``."""
    return f"{once}.of.{pid}"


def hang() -> NoReturn:
    """Answer nothing, and use no processor, until killed."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def serve(
    instance_id: str, handshake_address: str, argv: Sequence[str], shown: Callable[[], object]
) -> None:
    """Be the mock core of an instance until told to end.

    Args:
        argv: Options of the engine that it stands for.
        shown: Called before the handshake: lets others see that this process lives.
    """
    options = MockOptions.read()
    trouble = options.trouble_of(instance_id)
    time.sleep(options.start_ms / 1000)
    if trouble is not None and trouble.how == "fail at start" and takes(trouble):
        print("RuntimeError: a mock core that fails at its start", file=sys.stderr, flush=True)
        sys.exit(1)
    if trouble is not None and trouble.how == "never ready" and takes(trouble):
        hang()
    shown()
    MockCore(instance_id, handshake_address, EngineFacts.of(argv, options), options).run()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3:], lambda: None)
