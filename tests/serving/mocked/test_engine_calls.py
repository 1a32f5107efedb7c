"""vLLM's administrative calls reach all engines: those too that start later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.frontdoor.admin_client import AdminClient
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until, writer
from restart_load import restarted
from scaling_streams import scaled
from streams import back

pytestmark = pytest.mark.deep

NAMES = ("p0", "d0")
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    mocks = MockOptions(step_ms=10.0, prefill_token_ms=1.0)
    run = serve("--pd", "1:1", mocks=mocks, env={"VLLM_SERVER_DEV_MODE": "1"})
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def client(server: MockRun) -> Iterator[Client]:
    with ThreadPoolExecutor() as threads:
        yield Client(server, threads)


class Client:
    """Client that calls a server, also while earlier calls have no answer."""

    def __init__(self, server: MockRun, threads: ThreadPoolExecutor) -> None:
        self._server, self._threads = server, threads

    def call(self, path: str, body: object = None) -> httpx.Response:
        return self._server.post(path, body)

    def begin(self, path: str, body: object = None) -> Future[httpx.Response]:
        return self._threads.submit(self.call, path, body)

    def begin_request(self, num_tokens: int = NUM_TOKENS, **more: Any) -> Future[httpx.Response]:
        """Return once the request is under way, or has been where a busy machine looks late.

        Between its two legs a request is not counted: none of these may be under way before.
        """
        before = self._in_flight()
        body = {"model": "smollm2-135m", "prompt": [7] * 300, "max_tokens": num_tokens, **more}
        begun = self.begin("/v1/completions", {"ignore_eos": True, **body})
        until(lambda: self._in_flight() > before or begun.done(), "the request is under way")
        return begun

    def _in_flight(self) -> float:
        return self._server.metric("banaserve_requests_in_flight")


def finish_reasons(answer: Future[httpx.Response]) -> list[str]:
    found = answer.result(60)
    assert found.status_code == 200, found.text
    return [choice["finish_reason"] for choice in found.json()["choices"]]


def test_engines_that_start_while_others_are_paused_are_paused(
    server: MockRun, client: Client
) -> None:
    assert client.call("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    held = client.begin_request()
    pids = {name: writer(server.run_dir, name) for name in NAMES}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    assert server.get("/is_paused").json() == {"is_paused": True}
    for name, pid in pids.items():
        back(server, name, pid)
    admin = AdminClient(*find_admin(server.run_dir))
    scaled(admin, 1, 2)
    scaled(admin, 1, 1)
    assert not held.done()
    assert client.call("/resume").json() == {"status": "resumed"}
    assert finish_reasons(held) == ["length"]


def test_a_restart_goes_on_while_engines_are_paused(server: MockRun, client: Client) -> None:
    """Each new engine has computed a token before it is paused."""

    def pause(_: RollingRestart) -> None:
        paused = client.call("/pause?mode=keep&clear_cache=false")
        assert paused.json() == {"status": "paused"}

    ended = restarted(server, RestartRequest(), pause)
    assert (ended.state, ended.reason) == ("done", "")
    assert server.get("/is_paused").json() == {"is_paused": True}
    with pytest.raises(UserError, match="sleep or are paused"):
        restarted(server, RestartRequest())
    held = client.begin_request()
    assert client.call("/resume").json() == {"status": "resumed"}
    assert finish_reasons(held) == ["length"]


def test_a_pause_that_waits_lets_both_legs_end(client: Client) -> None:
    begun = client.begin_request()  # its prompt is being computed
    pausing = client.begin("/pause?mode=wait")
    assert pausing.result(60).json() == {"status": "paused"}
    assert finish_reasons(begun) == ["length"]
    held = client.begin_request()
    assert client.call("/wake_up").json()["status"] == "awake"
    assert finish_reasons(held) == ["length"]


def test_all_requests_are_aborted_by_one_call(client: Client) -> None:
    one_leg = {"prompt": [7] * 3, "num_tokens": 6000}
    streams = [
        client.begin_request(**one_leg),
        client.begin_request(**one_leg, n=2, temperature=1.0),
    ]
    assert client.call("/abort_requests", {"request_ids": ["unknown"]}).json()["aborted"] == 0
    answer = client.call("/abort_requests", {})
    assert answer.json() == {"status": "aborted", "aborted": 2}
    assert [finish_reasons(one) for one in streams] == [["abort"], ["abort", "abort"]]
    assert client.call("/abort_requests", []).status_code == 400
