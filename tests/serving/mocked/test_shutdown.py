"""A signal ends a server with mock engines within half a minute, and nothing is left behind.

``live/test_shutdown.py`` shows it of real ones.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from endless_streams import endless_stream, how_it_ends
from mock_facts import MockOptions
from observing import until, writer

pytestmark = pytest.mark.deep

MODEL = "smollm2-135m"
NUM_STREAMS = 4
MOCKS = MockOptions(step_ms=4.0)
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(scope="module")
def port(free_port):
    """One for all: that of a server that has ended is free at once."""
    return free_port()


@BOTH
def test_while_it_starts(number, launch, port):
    run = launch(port=port, mocks=MockOptions(start_ms=600_000.0))
    run.wait_for("starting instances")
    assert run.end(number) in (0, 128 + number)
    assert run.errors.read_text() == ""


@BOTH
def test_with_streams_under_way(number, serve, port):
    run = serve("--drain-timeout", "0", port=port, mocks=MOCKS)
    streams = [endless_stream(run) for _ in range(NUM_STREAMS)]
    for stream in streams:
        assert next(stream).choices
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        ends = [threads.submit(how_it_ends, stream) for stream in streams]
        assert run.end(number) == 0
        assert [end.result() for end in ends] == ["error"] * NUM_STREAMS
    assert run.errors.read_text() == ""


def test_sigterm_lets_streams_end_and_takes_no_more(serve, port):
    """As Kubernetes and Docker send it: to the server alone, not to its engines."""
    run = serve("--drain-timeout", "600", port=port, mocks=MOCKS)
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 300}
    body = {**asked, "stream": True, "ignore_eos": True}
    decodes = writer(run.run_dir, "d0")
    with ThreadPoolExecutor(1) as threads:
        # The stream cannot end before anybody has looked.
        os.kill(decodes, signal.SIGSTOP)
        stream = threads.submit(run.post, "/v1/completions", body)
        until(lambda: run.metric("banaserve_requests_in_flight") == 1, "it is under way")
        os.kill(run.process.pid, signal.SIGTERM)
        until(lambda: run.get("/ready").status_code == 503, "it is closing")
        assert run.post("/v1/completions", asked).status_code == 503
        os.kill(decodes, signal.SIGCONT)
    rest = [line for line in stream.result().text.splitlines() if line]
    assert (rest[-1], '"finish_reason":"length"' in rest[-2]) == ("data: [DONE]", True)
    until(run.is_gone, "every process of the server has ended")
    assert run.process.returncode == 0
    run.check_nothing_left()
    assert run.errors.read_text() == ""
