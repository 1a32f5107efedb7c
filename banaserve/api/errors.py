"""Answers in OpenAI's error form, for what is refused before vLLM sees it."""

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
    """``{"error": {message, type, code}}`` with the given status, which is the code as well."""
    said = {"message": message, "type": status.phrase, "param": None, "code": code or status}
    return JSONResponse({"error": said}, status_code=status, headers=headers)


async def answer_engines_died(_: Request, error: Exception) -> JSONResponse:
    """500 that OpenAI's clients do not follow by the same request again, as they do others."""
    return error_response(
        HTTPStatus.INTERNAL_SERVER_ERROR, str(error), {"x-should-retry": "false"}, "engines_died"
    )
