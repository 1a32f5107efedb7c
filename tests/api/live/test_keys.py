"""API keys: what needs one, and that two tenants share no cache."""

from __future__ import annotations

import signal

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.spine]

MODEL = "smollm2-135m"
KEYS = ("first-secret-key", "second-secret-key")
SERVE_OPTIONS = tuple(word for key in KEYS for word in ("--api-key", key))
END_SIGNAL = signal.SIGINT
# Of three blocks of 128 tokens two are whole.
PROMPT = [100 + i * 31 for i in range(300)]


def computed_by_prefill(server, key: str) -> float:
    """Prompt tokens that p0 computed for one request of the holder of ``key``."""
    name = "banaserve_prompt_tokens_computed_total"
    before = server.metric(name, instance_id="p0")
    answer = server.client(key).completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0.0
    )
    assert answer.usage.prompt_tokens == len(PROMPT)
    return server.metric(name, instance_id="p0") - before


def test_tenants_share_no_cache(server):
    assert computed_by_prefill(server, KEYS[0]) == len(PROMPT)
    assert computed_by_prefill(server, KEYS[0]) <= 1
    assert computed_by_prefill(server, KEYS[1]) == len(PROMPT)
    assert computed_by_prefill(server, KEYS[1]) <= 1


@pytest.mark.parametrize("key", ["wrong", "", "first-secret-ke", " ".join(KEYS)])
def test_a_wrong_key(key, server):
    with pytest.raises(openai.AuthenticationError, match="no valid API key"):
        server.client(key or "none").models.list()


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}, {"X-Api-Key": KEYS[0]}],
)
def test_no_bearer_key(headers, server):
    answer = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key, server):
    assert [model.id for model in server.client(key).models.list()] == [MODEL]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/health/"])
def test_a_probe_needs_no_key(path, server):
    assert httpx.get(f"{server.url}{path}", follow_redirects=True).status_code == 200


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
        ("GET", "/nothing"),
    ],
)
def test_everything_else_is_closed(method, path, server):
    answer = httpx.request(method, f"{server.url}{path}", json={} if method == "POST" else None)
    assert answer.status_code == (405 if path == "/health" else 401)


def test_keys_are_in_no_log(server):
    written = "".join(path.read_text(errors="replace") for path in server.run_dir.iterdir())
    assert not any(key in written + server.tails() for key in KEYS)
