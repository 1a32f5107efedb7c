"""Hooks in vLLM's model runners, attention modules and metadata builders.

A hook takes a callable ``around(call, *args, **kwargs)``, which gets vLLM's own method as ``call``
and the arguments that vLLM passes. On a class the first argument is the runner. Importing this
module imports nothing of vLLM, so that modules that run without vLLM can use the names of hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import numpy as np
import torch

Call = Callable[..., Any]

_HOST = "banaserve_migration"
"""Attribute of a model runner or its class: see ``host_of``."""
_KV_LIFE = "banaserve_kv_life"
_LOST_LIFE = "banaserve_lost_life"


def cpu_model_runner() -> type[Any]:
    """Return the runner class whose ``_sample`` precedes discarding draws of unfinished prompts."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner


def gpu_model_runner(config: Any) -> type[Any]:
    """Return the class of an engine's model runner on a GPU."""
    if config.use_v2_model_runner:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondModelRunner

        return SecondModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def around_runners(prepare: Callable[[Any], object], settle: Callable[[], object]) -> None:
    """Make workers of this process call functions before and after they make their runners.

    Args:
        prepare: Function called before, with the configuration.
        settle: Function called after, when process groups exist too.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def init_device(call: Call, wrapper: Any) -> Any:
        prepare(wrapper.vllm_config)
        done = call(wrapper)
        settle()
        return done

    wrap_call(WorkerWrapperBase, "init_device", init_device)


_SPIN_S = 0.005


def shorten_spinning() -> None:
    """Make ranks of an engine on a CPU, and its core, sleep soon while no message arrives.

    vLLM makes the reader of a queue between them poll without a pause for a second after each
    message: a rank that waits for a step takes a processor from one that computes. The reader must
    poll for longer than ZeroMQ takes until it has room for another notification (a millisecond), or
    it may miss the one that would wake it.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def make(call: Call, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **{"busy_loop_s": _SPIN_S, **kwargs})

    wrap_call(SpinCondition, "__init__", make)


# ---- methods of a model runner, or of its class


def wrap_call(owner: Any, name: str, around: Call) -> None:
    """Run ``around`` in place of a method of a class or an object, or of a module's function."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(owner, name, wrapped)


def wrap_execute_model(runner: Any, around: Call) -> None:
    """Run ``around`` in place of a step's forward pass; it gets the scheduler's output."""
    wrap_call(runner, "execute_model", around)


def wrap_sample_tokens(runner: Any, around: Call) -> None:
    """Run ``around`` in place of a step's sampling."""
    wrap_call(runner, "sample_tokens", around)


def wrap_kv_cache_tensors(runner_class: type[Any], around: Call) -> None:
    """Run ``around`` where runners make the tensors of their KV cache, which it returns by name.

    Not for the small KV cache with which a GPU runner measures the memory of its CUDA graphs.
    """
    served: list[Any] = []

    def initialize(call: Call, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_profiling"):
            return call(runner, *args, **kwargs)
        served.append(runner)
        try:
            return call(runner, *args, **kwargs)
        finally:
            served.pop()

    def make(call: Call, *args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs) if served else call(*args, **kwargs)

    wrap_call(runner_class, "initialize_kv_cache", initialize)
    if hasattr(runner_class, "initialize_kv_cache_tensors"):
        wrap_call(runner_class, "initialize_kv_cache_tensors", make)
        return
    from vllm.v1.worker.gpu import model_runner

    # The second runner calls a function, which does not get the runner.
    def make_for(call: Call, *args: Any, **kwargs: Any) -> Any:
        if not served:
            return call(*args, **kwargs)
        return around(lambda _, *own, **named: call(*own, **named), served[-1], *args, **kwargs)

    wrap_call(model_runner, "init_kv_cache", make_for)


def wrap_kv_cache(runner_class: type[Any], around: Call) -> None:
    """Run ``around`` where runners make their KV cache and pass it to the connector."""
    wrap_call(runner_class, "initialize_kv_cache", around)


def wrap_warm_up(runner_class: type[Any], around: Call) -> None:
    """Run ``around`` where runners on a CPU run the model once, which compiles it."""
    wrap_call(runner_class, "warming_up_model", around)


def wrap_output(output: Any, change: Callable[[Any], None]) -> None:
    """Call ``change`` with a step's output, as soon as it has been computed."""
    if not hasattr(output, "get_output"):
        change(output)
        return

    def get_output(call: Call) -> Any:
        inner = call()
        change(inner)
        return inner

    wrap_call(output, "get_output", get_output)


# ---- attributes attached to objects of vLLM


def set_host(runner: Any, host: Any) -> None:
    """Attach a ``MigrationHost`` to a runner, or to it or its class the reason why it has none."""
    setattr(runner, _HOST, host)


def host_of(runner: Any) -> Any:
    """Return the object that ``set_host`` attached; None for none."""
    return getattr(runner, _HOST, None)


def set_kv_life(scheduler_output: Any, life: int) -> None:
    """Record the life of the KV cache in which a step was planned."""
    setattr(scheduler_output, _KV_LIFE, life)


def kv_life_of(scheduler_output: Any) -> int | None:
    """Return the life of the KV cache in which a step was planned; None if not recorded."""
    return getattr(scheduler_output, _KV_LIFE, None)


def set_lost_life(runner_output: Any, life: int) -> None:
    """Record that this life of the KV cache has ended, so that the output must be dropped."""
    setattr(runner_output, _LOST_LIFE, life)


def lost_life_of(runner_output: Any) -> int | None:
    """Return the life of the KV cache that has ended; None if the output is valid."""
    return getattr(runner_output, _LOST_LIFE, None)


# ---- memory and layers of a runner


def replace_kv_caches(runner: GPUModelRunner, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make a runner's attention layers keep their KV in other tensors, by name in layer order."""
    context = runner.vllm_config.compilation_config.static_forward_context
    for name, tensor in tensors.items():
        context[name].bind_kv_cache(tensor)
    if not runner.vllm_config.use_v2_model_runner:  # which makes the list afterwards
        runner.kv_caches[:] = list(tensors.values())


def prompt_logprobs_of(runner: GPUModelRunner) -> dict[str, int]:
    """Return the runner's own record of prompts whose log probabilities are not complete.

    The second model runner has none: to it, a request that starts over is a new one.
    """
    if runner.vllm_config.use_v2_model_runner:
        return {}
    found: dict[str, int] = runner.num_prompt_logprobs
    return found


def set_implementation(layer: Any, implementation: Any) -> None:
    """Make an attention module use another implementation; call between two steps."""
    layer.impl = implementation


def window_tokens(implementation: Any) -> int | None:
    """Return the number of latest tokens that an attention reads, its own among them.

    vLLM's attention on CPUs keeps this number, or -1 or 0 for no window. Attention on GPUs keeps a
    pair, how many tokens it reads before and after its own, whose first is -1 without a window.

    Returns:
        None if the attention reads all tokens.
    """
    window = implementation.sliding_window
    if isinstance(window, tuple | list):
        window = window[0] + 1
    return window if window and window > 0 else None


def wrap_build(builder: Any, begin: Callable[[Any], None]) -> Call:
    """Call ``begin`` with a batch's common metadata before a builder makes its own metadata.

    Returns:
        The builder's original ``build``, which does not call ``begin``.
    """
    own: Call = builder.build

    def build(call: Call, common_prefix_len: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        begin(common)
        return call(common_prefix_len, common, *args, **kwargs)

    wrap_call(builder, "build", build)
    return own


# ---- requests that begin with output


def restore_output(runner_class: type[Any], output_of: Callable[[Any], Any]) -> None:
    """Make a runner accept new requests with output tokens from another instance.

    The draws of a request that was preempted continue after its output as well: output that its
    scheduler has dropped, because KV was lost, is drawn again. vLLM's second model runner gets
    these tokens from the scheduler, and draws by position.

    Args:
        output_of: Function that returns these tokens, given a request's sampling parameters.
    """

    def update(call: Call, runner: GPUModelRunner, scheduler_output: Any) -> Any:
        _draw_again(runner, scheduler_output.scheduled_cached_reqs)
        brought = {
            new.req_id: tokens
            for new in scheduler_output.scheduled_new_reqs
            if new.req_id not in runner.requests and (tokens := output_of(new.sampling_params))
        }
        if not brought:
            return call(runner, scheduler_output)
        batch = runner.input_batch

        def add_request(add: Call, state: Any) -> Any:
            if tokens := brought.get(state.req_id):
                state.output_token_ids = list(tokens)
                if state.generator is not None:
                    advance(state.generator, len(tokens), batch.vocab_size)
            return add(state)

        wrap_call(batch, "add_request", add_request)
        try:
            return call(runner, scheduler_output)
        finally:
            del batch.add_request  # the object's attribute, which hides its class's method

    wrap_call(runner_class, "_update_states", update)


def _draw_again(runner: GPUModelRunner, cached: Any) -> None:
    """Set the generators of resumed requests to their states after the output that counts."""
    if not cached.resumed_req_ids:
        return
    for name, num_tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        state = runner.requests[name]
        if name in cached.resumed_req_ids and state.generator is not None:
            assert state.sampling_params is not None
            state.generator.manual_seed(state.sampling_params.seed)
            advance(state.generator, num_tokens, runner.input_batch.vocab_size)


def advance(generator: torch.Generator, num_draws: int, vocab_size: int) -> None:
    """Advance a request's generator to its state after ``num_draws`` sampled tokens.

    For each token vLLM's sampler draws, on a CPU, one number, which seeds other noise; on a GPU, a
    row of noise.
    """
    if generator.device.type == "cpu":
        for _ in range(num_draws):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return
    before = generator.get_offset()
    torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)
    generator.set_offset(before + (generator.get_offset() - before) * num_draws)


# ---- seeded sampling with chunked prefill on CPU


_OFFSET_OF_ONE_DRAW = 4


class RewindableGenerator(torch.Generator):
    """A CPU generator that can undo the draws since ``remember``."""

    _remembered: torch.Tensor | None = None

    @classmethod
    def like(cls, other: torch.Generator) -> RewindableGenerator:
        made = cls(device="cpu")
        made.set_state(other.get_state())
        return made

    def remember(self) -> None:
        self._remembered = self.get_state()

    def get_offset(self) -> int:
        """Return the offset that a GPU's generator has after one draw."""
        return _OFFSET_OF_ONE_DRAW

    def set_offset(self, offset: int) -> None:
        """Undo the last draw, the only use that vLLM makes of this method.

        Raises:
            ValueError: The offset is not 0, or ``remember`` was not called.
        """
        if offset != 0 or self._remembered is None:
            raise ValueError(f"offset {offset}: only the draw since remember() can be taken back")
        self.set_state(self._remembered)


def rewind_discarded_draws(runner_class: type[Any]) -> None:
    """Make a CPU model runner remember the generators whose draw it is about to discard.

    vLLM samples at every chunk of a prompt and undoes the draw by moving the generator's offset.
    CPU generators have no offset: a plain vLLM 0.32 engine dies, and with it every request it
    holds. Here the state before such a draw is kept and restored instead, so that a seed gives the
    same tokens however a prompt was cut.
    """

    def sample(call: Call, runner: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        _remember(runner)
        return call(runner, *args, **kwargs)

    wrap_call(runner_class, "_sample", sample)


def _remember(runner: GPUModelRunner) -> None:
    batch = runner.input_batch
    if not batch.generators:
        return
    for row in np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist():
        generator = batch.generators.get(row)
        if generator is None:
            continue
        if not isinstance(generator, RewindableGenerator):
            generator = RewindableGenerator.like(generator)
            batch.generators[row] = generator
            runner.requests[batch.req_ids[row]].generator = generator
        generator.remember()
