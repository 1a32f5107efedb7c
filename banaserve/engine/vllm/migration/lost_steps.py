"""Steps whose output must not count, because KV that they read was lost with a guest."""

from __future__ import annotations

from typing import Any

from banaserve.engine.vllm.migration import store_hooks

LIFE = "banaserve_kv_life"
"""On a scheduler's output: in which life of the KV cache the step was planned."""

LOST_LIFE = "banaserve_lost_life"
"""On a runner's output: the life that is over, so the output must be dropped."""


class LostSteps:
    """Stands around the runner's two halves of a step.

    A step planned before the scheduler has heard of the loss reads what is no longer there, so
    it is lost as well.

    Args:
        runner: vLLM's model runner; its methods are wrapped on this object, not on its class.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._life = 0
        self._valid_from = 0
        self.num_lost = 0
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def kv_lost(self) -> None:
        """KV of the present life is gone: the step under way, or the next one, says so."""
        self._valid_from = self._life + 1
        store_hooks.abandon_step()

    @property
    def _is_lost(self) -> bool:
        return self._life < self._valid_from

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._life = getattr(scheduler_output, LIFE, self._life)
        if self._is_lost:
            store_hooks.abandon_step()
        return self._mark(self._execute(scheduler_output, *args, **kwargs))

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_lost:
            return self._sample(*args, **kwargs)
        # What is drawn for a dropped step would be missing in the step that is run instead.
        generators = self._runner.input_batch.generators
        states = {row: generator.get_state() for row, generator in generators.items()}
        output = self._sample(*args, **kwargs)
        for row, state in states.items():
            if row in generators:
                generators[row].set_state(state)
        return self._mark(output)

    def _mark(self, output: Any) -> Any:
        if output is None or not self._is_lost:
            return output
        self.num_lost += 1
        life = self._life
        if hasattr(output, "get_output"):
            get_output = output.get_output

            def marked() -> Any:
                inner = get_output()
                setattr(inner, LOST_LIFE, life)
                return inner

            output.get_output = marked
        else:
            setattr(output, LOST_LIFE, life)
        return output
