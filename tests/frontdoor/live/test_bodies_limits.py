"""Bodies that are made to hurt: each is refused in one line, and the server goes on.

Those that need no compiler of grammars are tried with mock engines, in
``mocked/test_bodies_limits.py``.
"""

from __future__ import annotations

import json
import re

import pytest

from hurting_bodies import CASES, COMPLETIONS, MODEL, SERVE_OPTIONS, refused

__all__ = ["SERVE_OPTIONS"]

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["n", "an exploding grammar"])
def test_a_body_that_hurts_is_refused(server, name):
    refused(server, *CASES[name])


def test_grammars_that_are_fine_still_shape_the_answer(server):
    given = {"model": MODEL, "prompt": "a", "max_tokens": 40, "temperature": 0}
    choice = server.post(COMPLETIONS, {**given, "structured_outputs": {"choice": ["yes", "no"]}})
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["only"]}}}
    answer = server.post(COMPLETIONS, {**given, "response_format": shaped})
    expression = server.post(COMPLETIONS, {**given, "structured_outputs": {"regex": "[xyz]{5}"}})
    assert choice.json()["choices"][0]["text"] in ("yes", "no")
    assert json.loads(answer.json()["choices"][0]["text"]) == "only"
    assert re.fullmatch("[xyz]{5}", expression.json()["choices"][0]["text"])
