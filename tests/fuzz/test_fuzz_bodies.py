"""Bodies of clients: read within their bounds, or refused with 400 or 413 in one line."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from hypothesis import given

from banaserve.base.text.json_text import as_utf8
from banaserve.base.types import RequestId
from banaserve.frontdoor.bodies.bounds import (
    BodyRefusedError,
    RequestBounds,
    measure,
    read_outline,
    upper_bound,
)
from banaserve.frontdoor.bodies.grammar_checker import grammars_of
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.requests.routing_request import read_request
from corpus import attempt, ends, fuzzed, spoiled

BOUNDS = RequestBounds(containers=64, values=128, strings=64, depth=8, fields=16, messages=8)


@fuzzed
@given(spoiled("bodies"))
def test_a_body_is_read_or_refused(body: bytes) -> None:
    body = as_utf8(body)
    outline, refusal = attempt(lambda: read_outline(body, BOUNDS), BodyRefusedError)
    if isinstance(refusal, BodyRefusedError):
        assert refusal.status in (400, 413)
        assert str(refusal).isprintable()
        assert len(str(refusal)) < 500
        return
    parsed, _ = attempt(lambda: json.loads(body, object_pairs_hook=Members.of), ValueError)
    if parsed is None:
        return  # strings that nothing here reads may be wrong: the endpoint's parser says so
    assert (outline is None) == (not isinstance(parsed, Members))
    if outline is not None:
        assert all(spec.text is not None for spec in grammars_of(outline))
    shape, found = measure(body), _count(parsed)
    assert (shape.containers, shape.depth) == found
    most = upper_bound(body)
    assert (most.containers, most.depth) >= found


class Members(list[object]):
    """Values of an object, also those whose key comes again, which a dict would hide."""

    @classmethod
    def of(cls, pairs: list[tuple[str, object]]) -> Members:
        return cls(value for _, value in pairs)


def _count(value: object) -> tuple[int, int]:
    """Containers and depth of what was parsed."""
    if not isinstance(value, list):
        return 0, 0
    inner = [_count(one) for one in value]
    return 1 + sum(one for one, _ in inner), 1 + max((depth for _, depth in inner), default=0)


@fuzzed
@given(spoiled("bodies"))
def test_a_balancer_routes_whatever_a_body_says(body: bytes) -> None:
    message = ClientRequest()
    message.add_body(body, 1 << 30)
    with ends():
        request = read_request(RequestId("1"), message, 0.0, None, False)
    assert request.num_tokens >= 1
    assert request.expected_output_tokens >= 0
