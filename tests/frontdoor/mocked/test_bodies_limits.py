"""Bodies that are made to hurt: each is refused in one line, and the server goes on.

A grammar that takes long to compile is in ``live/test_bodies_limits.py``.
"""

from __future__ import annotations

import pytest

from hurting_bodies import CASES, COMPLETIONS, MODEL, SERVE_OPTIONS, refused
from mock_facts import MockOptions

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def server(serve):
    run = serve(*SERVE_OPTIONS, mocks=MockOptions(step_ms=8.0))
    yield run
    assert run.end() == 0


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"an exploding grammar"}))
def test_a_body_that_hurts_is_refused(server, name):
    refused(server, *CASES[name])


def test_a_long_body_that_is_fine_is_answered(server):
    # Longer than the context: the endpoint itself says so, having got all of it.
    answer = server.post(COMPLETIONS, {"model": MODEL, "prompt": "hello " * 100_000})
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]["message"]
