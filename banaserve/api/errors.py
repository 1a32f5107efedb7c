"""Answers in OpenAI's error form, for what is refused before vLLM sees it."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse


def error_response(
    status: HTTPStatus, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """``{"error": {message, type, code}}`` with the given status."""
    body = {"error": {"message": message, "type": status.phrase, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)
