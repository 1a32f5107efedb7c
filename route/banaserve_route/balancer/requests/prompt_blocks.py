"""Tokens of prompts, and the keys of their blocks, read in threads beside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import structs
from tokenizers import Tokenizer

from banaserve.base.errors import UserError
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.policies.caches.cache_view import block_keys
from banaserve_route.policies.interface import Request

_PATHS = (b"/v1/completions", b"/v1/chat/completions")
_MAX_BODY_BYTES = 2**20
_MAX_READING = 64
_NUM_THREADS = 2
_WAIT_S = 0.2
"""Maximum time for which a request waits for its tokens."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class _Prompt(msgspec.Struct):
    """The parts of a request that make its tokens; a part of another type fails to decode."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # A prompt with one of these is made in ways that are not followed here.
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None

    @property
    def is_plain(self) -> bool:
        others = (self.chat_template, self.continue_final_message, self.documents)
        return not any((*others, self.prompt_embeds, self.truncate_prompt_tokens))


_decode = msgspec.json.Decoder(_Prompt).decode


class ModelTokenizer:
    """Tokenizer of a model with its chat template, which give the tokens that vLLM computes."""

    def __init__(self, folder: Path) -> None:
        """Load them.

        Raises:
            UserError: The folder has no ``tokenizer.json``, or a file cannot be read.
        """
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._read_template(folder)
        except Exception as error:  # the tokenizers package raises bare Exception
            raise UserError(f"tokenizer: cannot read {file}: {error}") from error

    def _read_template(self, folder: Path) -> None:
        config, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        known = json.loads(config.read_text("utf-8")) if config.is_file() else {}
        source = file.read_text("utf-8") if file.is_file() else known.get("chat_template")
        if isinstance(source, list):
            source = {one["name"]: one["template"] for one in source}.get("default")
        tokens = {name: known.get(name) for name in _SPECIAL_TOKENS}
        self._special = {
            name: one["content"] if isinstance(one, dict) else one
            for name, one in tokens.items()
            if one is not None
        }
        self._template = _environment().from_string(source) if source else None

    def of_text(self, text: str, adds_special: bool) -> Sequence[int]:
        """Return the tokens of ``text``."""
        # A batch of one: unlike a single text, it is encoded without the interpreter's lock.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        ids: Sequence[int] = found.ids
        return ids

    def of_chat(self, asked: _Prompt) -> Sequence[int] | None:
        """Return the tokens of a conversation; None if it is not text alone."""
        messages = [_plain_message(one) for one in asked.messages or ()]
        if self._template is None or None in messages:
            return None
        effort = {"reasoning_effort": asked.reasoning_effort} if asked.reasoning_effort else {}
        text = self._template.render(
            messages=messages,
            tools=asked.tools or None,
            add_generation_prompt=asked.add_generation_prompt,
            **{**self._special, **effort, **(asked.chat_template_kwargs or {})},
        )
        return self.of_text(text, bool(asked.add_special_tokens))


class PromptReader:
    """Reader of prompts for the comparison with blocks that replicas hold.

    Attributes:
        counts: Number of requests by what came of reading their tokens.
    """

    def __init__(self, folder: str) -> None:
        """Read texts with the tokenizer in ``folder``; without one, token ids alone.

        Raises:
            UserError: The tokenizer cannot be read.
        """
        self.counts: Counter[str] = Counter()
        self._tokenizer = ModelTokenizer(Path(folder)) if folder else None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompts")
        self._num_reading = 0

    async def with_blocks(
        self, request: Request, message: ClientRequest, sizes: Iterable[int], adapters: set[str]
    ) -> Request:
        """Return ``request`` with its blocks and number of tokens, or as it is without them.

        Args:
            sizes: Sizes of the blocks of replicas, in tokens.
            adapters: Names of models that are LoRA adapters.
        """
        size = sum(map(len, message.body))
        if message.path not in _PATHS or size > _MAX_BODY_BYTES:
            return self._counted("other", request)
        if self._num_reading >= _MAX_READING:
            return self._counted("busy", request)
        adapter = request.model if request.model in adapters else ""
        self._num_reading += 1
        reading = asyncio.get_running_loop().run_in_executor(
            self._threads, self._read, b"".join(message.body), tuple(sizes), adapter
        )
        reading.add_done_callback(self._read_one)
        try:
            found = await asyncio.wait_for(asyncio.shield(reading), _WAIT_S)
        except TimeoutError:
            return self._counted("late", request)
        if found is None:
            return self._counted("other", request)
        num_tokens, blocks = found
        return self._counted("read", structs.replace(request, num_tokens=num_tokens, blocks=blocks))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_one(self, reading: asyncio.Future[Any]) -> None:
        self._num_reading -= 1
        if not reading.cancelled():
            reading.exception()

    def _counted(self, outcome: str, request: Request) -> Request:
        self.counts[outcome] += 1
        return request

    def _read(
        self, body: bytes, sizes: tuple[int, ...], adapter: str
    ) -> tuple[int, Mapping[int, Sequence[bytes]]] | None:
        try:
            asked = _decode(body)
            tokens = self._tokens(asked)
            if not tokens:
                return None
            own = [adapter] if adapter else []
            first = [*own, asked.cache_salt] if asked.cache_salt else own
            # The last token is always computed, since the answer begins with what comes of it.
            known = tokens[:-1]
            return len(tokens), {
                size: block_keys(known, size, [first] + [own] * (len(known) // size))
                for size in sizes
            }
        except Exception:  # a template may raise any, and the tokenizers package raises it bare
            return None

    def _tokens(self, asked: _Prompt) -> Sequence[int] | None:
        if isinstance(asked.prompt, list):
            return asked.prompt if asked.is_plain else None
        if self._tokenizer is None or not asked.is_plain:
            return None
        if asked.messages is not None:
            return self._tokenizer.of_chat(asked)
        if asked.prompt is None:
            return None
        return self._tokenizer.of_text(asked.prompt, asked.add_special_tokens is not False)


def _plain_message(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return a message as vLLM gives it to a chat template; None if it is not text alone."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if part.get("type") == "text" else None for part in content]
        if None in texts:
            return None
        content = "\n".join(map(str, texts))
    plain = {**message, "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_parsed_call(call) for call in calls]
    return plain


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function = {**function, "arguments": json.loads(arguments or "{}")}
    return {**call, "function": function}


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what chat templates are written for: the environment of Hugging Face transformers."""

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
