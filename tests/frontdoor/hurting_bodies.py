"""Bodies that are made to hurt, and how a server that streams meanwhile refuses one."""

from __future__ import annotations

from typing import Any

import httpx

from server_run import Run

MODEL = "smollm2-135m"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "hi"}
SERVE_OPTIONS = ("--colocated", "1", "--request-bound", "tools=4")
EXPLODING = "root ::= " + " ".join(['("a" | "aa" | "aaa")*'] * 2_000)
CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
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


def refused(server: Run, path: str, body: dict[str, Any], status: int, words: str) -> None:
    """Send a body while a stream is under way; the stream goes on, and the answer says why."""
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
