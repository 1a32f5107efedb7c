"""A signal ends a server within ten seconds, whatever it is doing, and nothing is left behind.

``Run.end`` checks that: processes, sockets, other temporary files, /dev/shm. That an idle server
ends well on SIGTERM and on SIGINT is checked wherever the fixture ``server`` is used.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m"
NUM_STREAMS = 4
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def port(free_port):
    """One for all: that of a server that has ended is free at once."""
    return free_port()


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("loading vLLM", signal.SIGINT),
        ("starting instances", signal.SIGTERM),
        pytest.param("loading vLLM", signal.SIGTERM, marks=LONG),
        pytest.param("starting instances", signal.SIGINT, marks=LONG),
    ],
)
def test_while_it_starts(stage, number, launch, port):
    # Its imports are what the first stage is.
    is_fresh = stage == "loading vLLM"
    run = launch("--model", MODEL, "--kv-store-size", "512MiB", port=port, fresh=is_fresh)
    run.wait_for(stage)
    assert run.end(number) in (0, 128 + number)
    assert run.errors.read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=LONG)])
def test_with_streams_under_way(number, serve, port):
    run = serve(port=port)
    streams = [endless_stream(run) for _ in range(NUM_STREAMS)]
    for stream in streams:
        assert next(stream).choices
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        ends = [threads.submit(how_it_ends, stream) for stream in streams]
        assert run.end(number) == 0
        assert [end.result() for end in ends] == ["error"] * NUM_STREAMS
    assert run.errors.read_text() == ""


def endless_stream(run):
    return run.client().completions.create(
        model=MODEL,
        prompt="Once upon a time there was a town by the sea where every house was painted blue,"
        " and one day a stranger came there and painted his house red.",
        max_tokens=8000,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def how_it_ends(stream) -> str:
    """``error`` where the server said so in an event of the stream."""
    try:
        for _ in stream:
            pass
    except openai.APIError:
        return "error"
    return "end"
