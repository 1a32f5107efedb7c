"""A request that its engine ends with an error, as one whose grammar does not compile, is at fault.

No instance has died: nothing is tried again, and nothing counts as given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mock_facts import MockOptions, Trouble
from mock_run import MockRun

pytestmark = pytest.mark.deep

WRONG_TOKEN = 7_777
ONE_LEG, TWO_LEGS = 3, 300
BLAMED = ("banaserve_requests_given_up_total", "banaserve_leg_retries_total")


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    troubles = (Trouble("end in error", token=WRONG_TOKEN),)
    run = serve("--pd", "1:1", mocks=MockOptions(troubles=troubles))
    yield run
    assert run.end() == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("length", [ONE_LEG, TWO_LEGS], ids=["one leg", "two legs"])
@pytest.mark.parametrize(
    ("constraint", "status", "words"),
    [
        ({"structured_outputs": {"regex": "a|b"}}, 400, "does not compile"),
        ({}, 500, "Internal server error"),
    ],
    ids=["grammar", "anything else"],
)
def test_it_blames_no_engine(
    server: MockRun,
    constraint: dict[str, object],
    status: int,
    words: str,
    length: int,
    stream: bool,
) -> None:
    def blamed() -> list[float]:
        return [sum(server.metrics().get(name, {}).values()) for name in BLAMED]

    before = blamed()
    body = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}
    wrong = {**body, "prompt": [WRONG_TOKEN] * length, "stream": stream, **constraint}
    answer = server.post("/v1/completions", wrong)
    assert words in answer.text
    assert "died" not in answer.text
    assert stream or answer.status_code == status
    assert blamed() == before
    served = server.post("/v1/completions", {**body, "prompt": [500] * length})
    assert served.json()["usage"]["completion_tokens"] == 9
