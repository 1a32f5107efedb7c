"""Tokens of a realtime session, told while it goes on."""

from __future__ import annotations

from collections.abc import Callable

from banaserve.engine.vllm.compat.requests import RequestOutput, RequestOutputKind, SamplingParams


class SessionTokens:
    """Counts what each output of a session adds to its prompt and to its answer.

    A session may last an hour, so a count at its end would come too late for the requests beside
    it. A piece of the prompt is counted with the first output after it.

    Args:
        use_tokens: Told how many tokens have come since the last call; never 0.
        params: Of the session; they say whether outputs have the new tokens alone.
    """

    def __init__(self, use_tokens: Callable[[int], None], params: SamplingParams) -> None:
        self._use_tokens = use_tokens
        self._is_cumulative = params.output_kind != RequestOutputKind.DELTA
        self._prompt_tokens = self._output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count what ``output`` adds; its ``prompt_token_ids`` are those of all pieces so far."""
        prompt_tokens = max(self._prompt_tokens, len(output.prompt_token_ids or ()))
        output_tokens = sum(len(one.token_ids) for one in output.outputs)
        if not self._is_cumulative:
            output_tokens += self._output_tokens
        new = prompt_tokens - self._prompt_tokens + max(0, output_tokens - self._output_tokens)
        self._prompt_tokens = prompt_tokens
        self._output_tokens = max(self._output_tokens, output_tokens)
        if new:
            self._use_tokens(new)
