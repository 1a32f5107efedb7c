"""Serve one prefill and one decode instance from Python, ask a question, end the server.

    python examples/serve_one_to_one.py [any option of banaserve serve]

The server is a child process, as a shell or a service manager would start it: engines are
processes of their own in any case, and a child can be ended and started again.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai

MODEL = "smollm2-135m"  # comes with banaserve's tests; or any model that vLLM serves
PORT = 8000
START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def server(*options: str) -> Iterator[str]:
    """``banaserve serve`` until the block ends; yields its URL when it serves."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=PORT)
    given, others = parser.parse_known_args(options)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", given.port)) == 0:  # another server would answer
            raise SystemExit(f"port {given.port} is taken: give another one with --port")
    command = [sys.executable, "-m", "banaserve", "serve", "--model", MODEL, "--pd", "1:1"]
    # Of an option given twice the last one counts.
    command += ["--port", str(given.port), *others]
    url = f"http://127.0.0.1:{given.port}"
    # A process group of its own: a Ctrl-C here then ends the server through ``terminate`` alone.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)  # ends the engines and the store too
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Return when every role has an instance that serves."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=2).close()
            return
        time.sleep(0.2)
    raise SystemExit("the server was not ready in time")


def main() -> None:
    with server(*sys.argv[1:]) as url:
        # The unchanged OpenAI client: it does not see that two instances serve it.
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Name the capital of France."}],
            max_tokens=16,
            temperature=0.0,
        )
        print("answer:", answer.choices[0].message.content)
        print("its path:", f"banaserve trace {answer.id}")


if __name__ == "__main__":
    main()
