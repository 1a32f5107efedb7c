"""Every private vLLM name that pacing relies on, in one file; see ``compat``.

Seeded sampling with chunked prefill on CPU, which ends a plain vLLM 0.32 engine.

vLLM samples at every chunk of a prompt and takes the draw back by moving the generator's offset.
CPU generators have no offset: the engine dies, and with it every request it holds. Here the state
before such a draw is kept and restored instead, so a seed gives the same tokens however a prompt
was cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.engine.core import EngineCoreProc


def on_wake(woke: Callable[[], None]) -> None:
    """Call ``woke`` whenever an engine core of this process had no work and has got some."""
    wait_for_work = EngineCoreProc._process_input_queue

    @functools.wraps(wait_for_work)
    def wait_and_tell(core: Any) -> None:
        had_work = core.has_work()
        wait_for_work(core)
        if not had_work:
            woke()

    EngineCoreProc._process_input_queue = wait_and_tell


_OFFSET_OF_ONE_DRAW = 4


class RewindableGenerator(torch.Generator):
    """A CPU generator that can take back what was drawn since ``remember``."""

    _remembered: torch.Tensor | None = None

    @classmethod
    def like(cls, other: torch.Generator) -> RewindableGenerator:
        made = cls(device="cpu")
        made.set_state(other.get_state())
        return made

    def remember(self) -> None:
        self._remembered = self.get_state()

    def get_offset(self) -> int:
        """As on a GPU after one draw."""
        return _OFFSET_OF_ONE_DRAW

    def set_offset(self, offset: int) -> None:
        """Take the last draw back: the only move vLLM makes.

        Raises:
            ValueError: Any other move.
        """
        if offset != 0 or self._remembered is None:
            raise ValueError(f"offset {offset}: only the draw since remember() can be taken back")
        self.set_state(self._remembered)


def install(runner_class: type[Any]) -> None:
    """Make a CPU model runner remember the generators whose draw it is about to discard."""
    sample = runner_class._sample

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        _remember(self)
        return sample(self, *args, **kwargs)

    runner_class._sample = _sample


def _remember(runner: Any) -> None:
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
