"""Changes to vLLM's model runners, in each process that has one.

An engine with one worker runs the model in its own process. With several workers, each is a process
that vLLM starts, on CPU by spawning. A spawned process lacks the engine's changes, so each worker
applies them before it makes its runner (``worker.py``, which vLLM imports there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from banaserve.base.platform import huge_pages
from banaserve.engine.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.continuation import output_of
from banaserve.engine.process_groups import share_group

_prepared: list[type[Any]] = []


def prepare_runners(config: VllmConfig) -> type[Any]:
    """Let runners of this process accept requests with output so far, with correct random draws.

    Returns the class of runners. Idempotent: a process is prepared once.
    """
    runner_class = (
        runner_hooks.cpu_model_runner() if is_on_cpu() else runner_hooks.gpu_model_runner(config)
    )
    if runner_class in _prepared:
        return runner_class
    _prepared.append(runner_class)
    if is_on_cpu():
        runner_hooks.restore_output(runner_class, output_of)
        compile_model_alone(runner_class, config.model_config.enforce_eager)
        use_huge_pages(runner_class)
        share_group()
        runner_hooks.shorten_spinning()
        runner_hooks.rewind_discarded_draws(runner_class)
    elif not config.use_v2_model_runner:
        runner_hooks.restore_output(runner_class, output_of)
    return runner_class


def use_huge_pages(runner_class: type[Any]) -> None:
    """Put weights and KV cache of an engine on CPU in huge pages, once they are allocated."""

    def initialize(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = call(*args, **kwargs)
        huge_pages.gather()
        return done

    runner_hooks.wrap_kv_cache(runner_class, initialize)


def compile_model_alone(runner_class: type[Any], is_eager: bool) -> None:
    """Restrict compilation to the engine's model, and disable it entirely if ``is_eager``.

    vLLM compiles parts of its sampler at their first use, even with --enforce-eager: all streams
    would wait 10 s for the first request with logprobs, and the engine would die if no compiler is
    installed. A model compiled ahead of time stays compiled in spite of torch's eager stance.
    """
    if is_eager:
        torch.compiler.set_stance("force_eager")
        return

    def warm_up(call: Callable[..., Any], *args: Any) -> Any:
        done = call(*args)
        torch.compiler.set_stance("force_eager")
        return done

    runner_hooks.wrap_warm_up(runner_class, warm_up)
