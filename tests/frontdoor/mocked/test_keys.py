"""API keys: what needs one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from mock_run import MockRun
from server_run import DEADLINE_S

pytestmark = pytest.mark.deep

MODEL = "smollm2-135m"
KEYS = ("first-secret-key", "second-secret-key")
SERVE_OPTIONS = (
    *(word for key in KEYS for word in ("--api-key", key)),
    *("--root-path", "/api", "--disable-access-log-for-endpoints", "/load, /ready"),
)


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    # A key of plain vLLM is required of nobody.
    run = serve(*SERVE_OPTIONS, env={"VLLM_API_KEY": "key-of-plain-vllm"})
    yield run
    assert run.end(signal.SIGINT) == 0


@pytest.mark.parametrize("key", ["wrong", "", "first-secret-ke", " ".join(KEYS)])
def test_a_wrong_key(key, server):
    with pytest.raises(openai.AuthenticationError, match="no valid API key"):
        server.client(key or "none").models.list()


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}, {"X-Api-Key": KEYS[0]}],
)
def test_no_bearer_key(headers, server):
    answer = server.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key, server):
    assert [model.id for model in server.client(key).models.list()] == [MODEL]


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/health/", "/api/health", "/api/ready"]
)
def test_a_probe_needs_no_key(path, server):
    assert server.get(path, follow_redirects=True).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/invocations"),
        ("POST", "/health"),
        ("GET", "/load"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "//v1/models"),
        ("GET", "/api/v1/models"),
        ("GET", "/nothing"),
    ],
)
def test_everything_else_is_closed(method, path, server):
    body = {} if method == "POST" else None
    answer = httpx.request(method, f"{server.url}{path}", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 401


def test_keys_are_in_no_log(server):
    written = "".join(path.read_text(errors="replace") for path in server.run_dir.iterdir())
    assert not any(key in written + server.tails() for key in KEYS)


def test_paths_are_left_out_of_the_access_log(server):
    for path in ("/ready", "/load", "/version"):
        httpx.get(f"{server.url}{path}")
    written = (server.run_dir / "front.log").read_text()
    assert "GET /version " in written
    assert "GET /ready " not in written
    assert "GET /load " not in written
