"""Changes to every model runner of ours, in whichever process it is.

An engine of one worker runs its model itself. With several each is a process that vLLM starts, by
spawning it where engines compute on a CPU: nothing that the engine has changed is there, so each
changes it anew before it makes its runner (``worker.py``, which vLLM imports there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from banaserve.engine.vllm.compat import runner_hooks
from banaserve.engine.vllm.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.vllm.continuation import output_of
from banaserve.engine.vllm.process_groups import share_group
from banaserve.platform import huge_pages

_prepared: list[type[Any]] = []


def prepare_runners(config: VllmConfig) -> type[Any]:
    """Let runners of this process take requests that bring output, and keep draws right.

    Once in a process, however often it is called; returns the class of runners.
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
        runner_hooks.rewind_failed_loads(runner_class)
    elif not config.use_v2_model_runner:
        runner_hooks.restore_output(runner_class, output_of)
        runner_hooks.rewind_failed_loads(runner_class)
    return runner_class


def use_huge_pages(runner_class: type[Any]) -> None:
    """Let an engine on a CPU have its weights and KV cache in huge pages, once all are there."""

    def initialize(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = call(*args, **kwargs)
        huge_pages.gather()
        return done

    runner_hooks.wrap_kv_cache(runner_class, initialize)


def compile_model_alone(runner_class: type[Any], is_eager: bool) -> None:
    """Let no part of an engine compile but the model, and that only where it is to.

    vLLM compiles parts of its sampler at their first use, with --enforce-eager too: all streams
    would wait 10 s for the first request with logprobs, and the engine would die where no compiler
    is. A model that is compiled ahead of time stays so, whatever the stance is.
    """
    if is_eager:
        torch.compiler.set_stance("force_eager")
        return

    def warm_up(call: Callable[..., Any], *args: Any) -> Any:
        done = call(*args)
        torch.compiler.set_stance("force_eager")
        return done

    runner_hooks.wrap_warm_up(runner_class, warm_up)
