"""Requests of public reports: what plain vLLM serves is served, and what fails is its own fault.

Each stands for a kind: engines with a history, calls that report success and do nothing, and bodies
in another encoding. Of requests that are taken for the death of an engine, see
``serving/mocked/test_request_errors.py``.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from observing import until, writer
from server_run import DEADLINE_S, Run

pytestmark = pytest.mark.e2e

COMPLETIONS = "/v1/completions"
MODEL = "smollm2-135m"
SHORT = "n:"
LONG = "Shopping list for the week, one thing on each line:\n" + "1. apples\n2. bread\n" * 6
_FIVES = {"type": "integer", "multipleOf": 5}
GUIDANCE_ALONE = {"json": {"type": "object", "properties": {"n": _FIVES}, "required": ["n"]}}
"""xgrammar has no multipleOf."""
REGEX = {"regex": ".{3,20}"}
GUIDANCE_COMPILES = (
    {"grammar": 'root ::= "a"\nroot ::= "b"'},
    {"json": {"type": "array", "items": [{"type": "string"}]}},
)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve(
        *("--pd", "1:1", "--enable-prompt-tokens-details", "--max-model-len", "1024"),
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    yield run
    assert run.end() == 0


def asked(server: Run, prompt: Any, constraint: Any = None, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **more}
    if constraint is not None:
        body["structured_outputs"] = constraint
    return server.post(COMPLETIONS, body)


def test_what_an_engine_has_served_does_not_decide_what_it_can_serve(server: Run) -> None:
    """The short prompt is served by decode alone, which sees the backend that prefill does not."""
    first = asked(server, SHORT, GUIDANCE_ALONE)
    assert (first.status_code, asked(server, LONG, REGEX).status_code) == (200, 200)
    pid = writer(server.run_dir, "d0")
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.is_ready("p0", "d0"), "the engine is back")
    for prompt, constraint in ((LONG, REGEX), (LONG, GUIDANCE_ALONE), (SHORT, REGEX)):
        answer = asked(server, prompt, constraint)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        if constraint is REGEX:
            assert re.fullmatch(r"[^\n]{3,20}", text)
        assert '"error"' not in asked(server, prompt, constraint, stream=True).text
    assert asked(server, SHORT, GUIDANCE_ALONE).json()["choices"] == first.json()["choices"]


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["one leg", "two legs"])
@pytest.mark.parametrize("constraint", GUIDANCE_COMPILES, ids=["rule twice", "old items"])
def test_a_grammar_is_compiled_by_the_backend_that_has_checked_it(
    server: Run, prompt: str, constraint: Any
) -> None:
    """xgrammar, which has served the requests before, would fail."""
    answer = asked(server, prompt, constraint)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith(("a", "b", "["))
    assert '"error"' not in asked(server, prompt, constraint, stream=True).text


def test_a_reset_of_the_store_is_one(server: Run) -> None:
    prompt = random.Random(5).choices(range(100, 40_000), k=400)

    def cached() -> int:
        usage = asked(server, prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() > 0
    until(lambda: server.metric("banaserve_kvstore_leased_slots") == 0, "no request holds blocks")
    said = server.post("/reset_prefix_cache?reset_external=true", {})
    assert said.json() == {"success": True}
    assert cached() == 0


def test_an_agent_s_kv_is_kept_during_a_tool_call(server: Run) -> None:
    prompt = random.Random(6).choices(range(100, 40_000), k=400)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}

    def answered(keep: str) -> httpx.Response:
        headers = {"X-Banaserve-Keep": keep}
        return httpx.post(server.url + COMPLETIONS, json=body, headers=headers, timeout=DEADLINE_S)

    assert answered("a while").status_code == 400
    assert answered("0").status_code == 200
    assert server.metric("banaserve_kvstore_kept_slots") == 0
    assert answered("600").status_code == 200
    until(lambda: server.metric("banaserve_kvstore_kept_slots") == 3, "its whole blocks are kept")
    assert server.post("/reset_prefix_cache?reset_external=true", {}).json() == {"success": True}
    assert server.metric("banaserve_kvstore_kept_slots") == 0


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["Hello", "Grüße, 你好 🎉 " * 60_000], ids=["short", "long"])
def test_a_body_in_another_encoding_is_one(server: Run, encoding: str, text: str) -> None:
    """A long one is parsed elsewhere; this one is too long for the model, in vLLM's words."""
    body = json.dumps({"model": MODEL, "prompt": text, "max_tokens": 2}, ensure_ascii=False)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        server.url + COMPLETIONS, content=body.encode(encoding), headers=headers, timeout=DEADLINE_S
    )
    if text == "Hello":
        assert answer.status_code == 200, answer.text
    else:
        assert "maximum context length" in answer.text


def test_a_target_in_absolute_form_is_one(server: Run) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"GET http://any.example/v1/models HTTP/1.1\r\nHost: any.example\r\n"
            b"Connection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert MODEL.encode() in answer
