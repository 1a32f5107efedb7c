"""Access of a browser tab to the admin API: one-time codes, and tokens that a tab keeps."""

from __future__ import annotations

import hashlib
import secrets
from collections import deque

import msgspec
from starlette.responses import Response

from banaserve.base.clock import Clock
from banaserve.frontdoor.admin.answers import PREFIX, answer
from banaserve.frontdoor.page.records import PageCode, PageToken

CODE_S = 900.0
_MAX_CODES, _MAX_TOKENS = 8, 64
"""Maximum numbers of codes and tokens: a further one replaces the oldest."""


class PageAccess:
    """Codes and tokens of 256 random bits each, of which only digests are kept.

    Codes and tokens end with the server. Tries are not limited: a limit could lock out the holder
    of a code, and 256 random bits cannot be guessed. Used on the event loop only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._codes: deque[tuple[bytes, float]] = deque(maxlen=_MAX_CODES)
        self._tokens: deque[bytes] = deque(maxlen=_MAX_TOKENS)

    def new_code(self) -> str:
        """Return a code that can be exchanged for one token within ``CODE_S`` seconds."""
        code = secrets.token_urlsafe(32)
        self._codes.append((_digest(code), self._clock.now() + CODE_S))
        return code

    def redeem(self, code: str) -> bool:
        """Return whether a code is valid, and make it invalid."""
        given, now_s = _digest(code), self._clock.now()
        found = [one for one in self._codes if secrets.compare_digest(given, one[0])]
        for one in found:
            self._codes.remove(one)
        return any(now_s < until_s for _, until_s in found)

    def new_token(self) -> str:
        """Return a token for the admin API, valid until ``forget`` or the server's end."""
        token = secrets.token_urlsafe(32)
        self._tokens.append(_digest(token))
        return token

    def opens(self, token: str) -> bool:
        """Return whether a token is valid."""
        return bool(self._held(token))

    def forget(self, token: str) -> None:
        """Make a token invalid."""
        for one in self._held(token):
            self._tokens.remove(one)

    def answer(self, method: str, path: str, given: str, *, is_key: bool) -> Response | None:
        """Return the answer to a request about codes or tokens; None for any other request.

        Args:
            path: Request's path below the root path.
            given: Bearer's credential: the admin key, a code or a token.
            is_key: True if the credential is the admin key, which alone obtains codes.
        """
        match method, path.removeprefix(PREFIX):
            case "POST", "/page-code" if is_key:
                return _secret(PageCode(self.new_code(), CODE_S))
            case "POST", "/page-token" if is_key or self.redeem(given):
                return _secret(PageToken(self.new_token()))
            case "DELETE", "/page-token" if self.opens(given):
                self.forget(given)
                return Response(status_code=204)
        return None

    def _held(self, token: str) -> list[bytes]:
        given = _digest(token)
        return [one for one in self._tokens if secrets.compare_digest(given, one)]


def _secret(value: msgspec.Struct) -> Response:
    response = answer(value)
    response.headers["Cache-Control"] = "no-store"
    return response


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
