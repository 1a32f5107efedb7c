"""Bodies that are made to hurt: each is refused in one line, and the server goes on."""

from __future__ import annotations

import json
import re

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.spine]

MODEL = "smollm2-135m"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "hi"}
SERVE_OPTIONS = ("--colocated", "1", "--request-bound", "tools=4")
EXPLODING = "root ::= " + " ".join(['("a" | "aa" | "aaa")*'] * 2_000)
CASES = {
    "a million tiny messages": (CHAT, {"messages": [HELLO] * 1_000_000}, 413, "containers"),
    "many tools": (CHAT, {"messages": [HELLO], "tools": [{}] * 5}, 400, "tools: 5 are more than 4"),
    "n": (COMPLETIONS, {"prompt": "a", "n": 10_000}, 400, "n: 10000"),
    "an exploding grammar": (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"grammar": EXPLODING}},
        400,
        "make it simpler",
    ),
    "a wrong expression": (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        400,
        "",
    ),
    "words between instances": (
        COMPLETIONS,
        {"prompt": "a", "kv_transfer_params": {"banaserve_handover": 100}},
        400,
        "kv_transfer_params",
    ),
}


@pytest.mark.parametrize(("path", "body", "status", "words"), CASES.values(), ids=CASES)
def test_a_body_that_hurts_is_refused(server, path, body, status, words):
    with httpx.stream(
        "POST",
        f"{server.url}{COMPLETIONS}",
        json={"model": MODEL, "prompt": "a", "max_tokens": 64, "ignore_eos": True, "stream": True},
        timeout=120,
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        refused = httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=120)
        rest = [line for line in lines if line]
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (status, True), (
        refused.text[:500]
    )
    assert rest[-1] == "data: [DONE]"


def test_grammars_that_are_fine_still_shape_the_answer(server):
    given = {"model": MODEL, "prompt": "a", "max_tokens": 40, "temperature": 0}
    choice = server.post(COMPLETIONS, {**given, "structured_outputs": {"choice": ["yes", "no"]}})
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["only"]}}}
    answer = server.post(COMPLETIONS, {**given, "response_format": shaped})
    expression = server.post(COMPLETIONS, {**given, "structured_outputs": {"regex": "[xyz]{5}"}})
    assert choice.json()["choices"][0]["text"] in ("yes", "no")
    assert json.loads(answer.json()["choices"][0]["text"]) == "only"
    assert re.fullmatch("[xyz]{5}", expression.json()["choices"][0]["text"])


def test_a_long_body_that_is_fine_is_answered(server):
    # Longer than the context: the endpoint itself says so, having got all of it.
    answer = server.post(COMPLETIONS, {"model": MODEL, "prompt": "hello " * 100_000})
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]["message"]
