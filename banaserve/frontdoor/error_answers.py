"""Answers in OpenAI's error form, for requests refused before vLLM sees them."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse


def error_response(
    status: HTTPStatus,
    message: str,
    headers: dict[str, str] | None = None,
    code: str | None = None,
) -> JSONResponse:
    """Return ``{"error": {message, type, code}}``; without ``code``, the status is the code."""
    said = {"message": message, "type": status.phrase, "param": None, "code": code or status}
    return JSONResponse({"error": said}, status_code=status, headers=headers)


async def answer_engines_died(_: Request, error: Exception) -> JSONResponse:
    """Return a 500 that OpenAI's clients do not retry, unlike other 500 answers."""
    return error_response(
        HTTPStatus.INTERNAL_SERVER_ERROR, str(error), {"x-should-retry": "false"}, "engines_died"
    )
