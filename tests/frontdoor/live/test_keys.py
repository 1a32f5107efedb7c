"""Two tenants share no cache, and their keys are in no log.

What needs a key is in ``mocked/test_keys.py``.
"""

from __future__ import annotations

import signal

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


def test_keys_are_in_no_log(server):
    written = "".join(path.read_text(errors="replace") for path in server.run_dir.iterdir())
    assert not any(key in written + server.tails() for key in KEYS)
