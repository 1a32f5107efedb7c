"""``banaserve chat``: a conversation with a running server's model, or one question."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from banaserve.base.access.key_files import key_option
from banaserve.base.arguments import argument, option
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import admin_on, find_admin
from banaserve.cli.admin.options import ServerChoice
from banaserve.cli.app import App
from banaserve.frontdoor.admin_client import ServerApi

_TIMEOUT_S = 600.0
_CONTROLS = re.compile(r"[\0-\b\v-\x1f\x7f-\x9f]")
"""Control characters except tabs and line feeds."""
Message = dict[str, str]


class ChatServer(ServerApi):
    """A server that speaks OpenAI's chat API."""

    bad_key = "the server refuses the API key: give its --api-key-file"
    key_codes = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    no_answer = (
        "no server answers at {url} ({reason}): give its --run-dir, or its --url, with --cacert "
        "where it has TLS"
    )

    def first_model(self) -> str:
        """Return the name of the first model that the server serves.

        Raises:
            UserError: There is no answer, or the key is refused.
        """
        with self.asked("GET", "/v1/models", None, _TIMEOUT_S) as answer:
            try:
                return str(json.loads(answer.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise UserError(f"{self.url} lists no models: is it an OpenAI API?") from None

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the pieces of an answer as they come.

        Raises:
            UserError: The request is refused, or the answer breaks off.
        """
        told = json.dumps({**body, "stream": True}).encode()
        with self.asked("POST", "/v1/chat/completions", told, _TIMEOUT_S) as answer:
            yield from pieces(answer)


def pieces(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the text in the events of a streamed answer, reasoning included.

    Raises:
        UserError: The server has sent an error, or the stream ends before its last event.
    """
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise UserError(f"the answer broke off: {event['error'].get('message', data)}")
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            if text := delta.get("content") or delta.get("reasoning"):
                yield text
    raise UserError("the answer broke off: the server has closed the connection")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ServerChoice):
    """Options of ``banaserve chat``."""

    question: str | None = argument("one question; without it a conversation begins", None)
    api_key: str = key_option(
        "--api-key",
        "API key, if the server needs one ($BANASERVE_API_KEY)",
        "file with that key",
        "BANASERVE_API_KEY",
        metavar="KEY",
    )
    model: str | None = option("name of the model (the first one)", None)
    system: str | None = option("text that the model is told first", None)
    max_tokens: int | None = option("length of an answer in tokens", None, int)
    temperature: float = option(
        "randomness of answers; at 0 a question always gets the same answer (0)", 0.0
    )


def chat(asked: ChatOptions) -> None:
    """Talk to the model of a running server. An empty line, or Ctrl-D, ends the conversation."""
    asked.check_server()
    server, question, system = _server(asked), asked.question, asked.system
    body: dict[str, Any] = {
        "model": asked.model or server.first_model(),
        "temperature": asked.temperature,
    }
    if asked.max_tokens is not None:
        body["max_tokens"] = asked.max_tokens
    said: list[Message] = [{"role": "system", "content": system}] if system else []
    for words in [question] if question is not None else _typed():
        said.append({"role": "user", "content": words})
        answer = ""
        for piece in server.stream({**body, "messages": said}):
            answer += piece
            print(_shown(piece), end="", flush=True)
        print()
        said.append({"role": "assistant", "content": answer})


def _shown(text: str) -> str:
    """Return ``text`` without what would control a terminal; all of it if it goes elsewhere."""
    return _CONTROLS.sub("", text) if sys.stdout.isatty() else text


def _server(asked: ChatOptions) -> ChatServer:
    """Return the server that the options name; a port suffices if its run folder is not known."""
    key, url = asked.api_key, asked.url
    certificate = str(asked.cacert) if asked.cacert else ""
    if url is None:
        access = find_admin(asked.run_dir) if asked.port is None else admin_on(asked.port)
        if access is not None:
            return ChatServer(access.url, key, access.certificate, is_own=True)
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{asked.port}"
    return ChatServer(url.rstrip("/").removesuffix("/v1"), key, certificate, is_own=False)


def _typed() -> Iterator[str]:
    """Yield lines until one is empty; prompts go to stderr, so that answers can be piped."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        words = sys.stdin.readline().strip()
        if not words:
            return
        yield words


app = App(chat)
