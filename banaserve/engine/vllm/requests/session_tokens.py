"""Tokens of a realtime session, told while it goes on."""

from __future__ import annotations

from http import HTTPStatus

from banaserve.access.tenants import TenantTerms
from banaserve.engine.vllm.compat.requests import (
    GracefulHTTPError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)


class SessionTokens:
    """Counts what each output of a session adds to its prompt and to its answer.

    A session may last an hour, so a count at its end would come too late for the requests beside
    it. A piece of the prompt is counted with the first output after it.

    Args:
        terms: Told how many tokens have come since the last time, never 0; they say whether the
            session goes on.
        params: Of the session; they say whether outputs have the new tokens alone.
    """

    def __init__(self, terms: TenantTerms, params: SamplingParams) -> None:
        self._terms = terms
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
            self._terms.use_tokens(new)

    def check(self) -> None:
        """Return if the session goes on.

        Raises:
            GracefulHTTPError: Its key has used more than it may.
        """
        if why := self._terms.refuse_session():
            raise GracefulHTTPError(why, HTTPStatus.TOO_MANY_REQUESTS)
