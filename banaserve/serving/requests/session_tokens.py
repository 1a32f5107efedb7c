"""Tokens of a realtime session, counted while the session runs."""

from __future__ import annotations

from http import HTTPStatus

from banaserve.base.access.tenants import TenantTerms
from banaserve.engine.compat.requests import (
    GracefulHTTPError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)


class SessionTokens:
    """Counter of the tokens that each output adds to a session's prompt and to its answer.

    A session may last an hour, so counting at its end would be too late to limit the key's other
    requests. A piece of the prompt is counted with the first output after it.

    Args:
        terms: Tenant's terms: they get the number of new tokens, never 0, and decide whether the
            session may continue.
        params: Session's sampling parameters; their ``output_kind`` tells whether an output has
            only the new tokens.
    """

    def __init__(self, terms: TenantTerms, params: SamplingParams) -> None:
        self._terms = terms
        self._is_cumulative = params.output_kind != RequestOutputKind.DELTA
        self._prompt_tokens = self._output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count the new tokens of ``output``; its ``prompt_token_ids`` are of all pieces so far."""
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
        """Return if the session may continue.

        Raises:
            GracefulHTTPError: The session's API key has exceeded its limit.
        """
        if why := self._terms.refuse_session():
            raise GracefulHTTPError(why, HTTPStatus.TOO_MANY_REQUESTS)
