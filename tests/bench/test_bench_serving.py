"""``bench serving`` against a server of canned answers: what it sends, counts and refuses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from banaserve_bench.serving.cell import CellFile, Sent
from banaserve_bench.serving.command import main, parse

KEY = "secret"


def _lines_of(path: Path) -> list[Sent]:
    return [msgspec.json.decode(line, type=Sent) for line in path.read_bytes().splitlines()]


class CannedServer:
    """Answers each request with the tokens it asks for; can be told to fail or to hang.

    Attributes:
        on_hang: Called with the first request that hangs.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.fails_from = 1 << 30
        self.hangs_from = 1 << 30
        self.on_hang = lambda: None
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._released = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0)

        async def start() -> None:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

        self._loop.run_until_complete(start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        card = {"id": "canned", "max_model_len": 200, "root": "/nowhere"}
        return web.json_response({"data": [card]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) > self.fails_from:
            return web.Response(status=500, text="it broke")
        response = web.StreamResponse()
        await response.prepare(request)
        if len(self.bodies) > self.hangs_from:
            if len(self.bodies) == self.hangs_from + 1:
                self.on_hang()
            await self._released.wait()
            return response
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices":[{"text":" x"}]}\n\n')
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        end = json.dumps({"choices": [], "usage": usage})
        await response.write(f"data: {end}\n\ndata: [DONE]\n\n".encode())
        return response


@pytest.fixture
def server() -> Iterator[CannedServer]:
    canned = CannedServer()
    canned.start()
    yield canned
    canned.stop()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["".join(letters) for letters in product("abc", repeat=4)]
    vocabulary = {"[UNK]": 0, **{f"Ġ{word}": n for n, word in enumerate(words, start=1)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def bench(server: CannedServer, tokenizer: Path, tmp_path: Path) -> Any:
    def run(*options: str, out: str = "run") -> int:
        return main(
            [
                *("--url", server.url, "--api-key", KEY, "--tokenizer", str(tokenizer)),
                *("--out", str(tmp_path / out), "--warmup", "0", *options),
            ]
        )

    return run


FAST = ("--dataset", "random", "--prompt-tokens", "12", "--output-tokens", "3")


def cells(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "records").iterdir())


def records(folder: Path, name: str) -> list[Sent]:
    return _lines_of(folder / "records" / f"{name}.jsonl")


def test_a_sweep(bench: Any, server: CannedServer, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    options = ("--rps", "50,100", "--seeds", "0,1", "--requests", "4", "--slo-ttft", "30")
    assert bench(*FAST, *options, "--json", str(copy)) == 0
    assert cells(tmp_path / "run") == [
        f"{rate}rps-seed{seed}.jsonl" for rate, seed in ((100, 0), (100, 1), (50, 0), (50, 1))
    ]
    sent = records(tmp_path / "run", "50rps-seed0")
    assert [len(one.record.token_at_s) for one in sent] == [3] * 4
    assert [one.record.prompt_tokens for one in sent] == [12] * 4
    body = server.bodies[1]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (3, 3, True)
    record = result.read(copy)
    assert record == result.read(tmp_path / "run" / "result.json")
    assert record.raw["is_complete"] is True
    assert len(record.figures["ttft_p50_at_50rps"].samples) == 2
    for name in ("slo_fraction", "exact_output_fraction"):
        assert record.figures[f"{name}_at_100rps"].samples == [1.0, 1.0]
    seconds = record.figures["output_tokens_per_s_at_50rps"].samples
    weighted = record.figures["weighted_tokens_per_s_at_50rps"].samples
    assert [b / a for a, b in zip(seconds, weighted, strict=True)] == pytest.approx(
        [6, 6], rel=1e-4
    )
    assert "/" not in json.dumps(record.options)


def test_the_same_seed_sends_the_same(bench: Any, server: CannedServer) -> None:
    for out in ("a", "b"):
        assert bench(*FAST, "--rps", "500", "--requests", "3", out=out) == 0
    # In any order: requests at once may overtake each other on their way.
    first, second = (
        sorted(bodies, key=lambda body: body["prompt"])
        for bodies in (server.bodies[:4], server.bodies[4:])
    )
    assert first == second


def test_failures_are_counted(bench: Any, server: CannedServer, tmp_path: Path) -> None:
    server.fails_from = 4
    options = ("--arrival", "closed", "--concurrency", "1", "--requests", "6")
    assert bench(*FAST, *options) == 0
    record = result.read(tmp_path / "run" / "result.json")
    [cell] = record.raw["cells"]
    assert (cell["requests"], cell["completed"], cell["failed"]) == (6, 3, 3)
    assert cell["errors"] == {"HTTP 500: it broke": 3}
    assert record.figures["failed_fraction_at_1_at_once"].samples == [0.5]


def test_a_server_that_only_fails(bench: Any, server: CannedServer, tmp_path: Path) -> None:
    server.fails_from = 1
    with pytest.raises(
        UserError, match=r"every request of 500rps-seed0 failed.*HTTP 500: it broke"
    ):
        bench(*FAST, "--rps", "500", "--requests", "3")
    assert cells(tmp_path / "run") == ["500rps-seed0.jsonl"]
    record = result.read(tmp_path / "run" / "result.json")
    assert (record.raw["is_complete"], record.figures) == (False, {})


def test_timeouts_are_counted(bench: Any, server: CannedServer, tmp_path: Path) -> None:
    server.hangs_from = 3
    options = ("--rps", "500", "--requests", "4", "--timeout", "1.5", "--slo-ttft", "30")
    assert bench(*FAST, *options) == 0
    [cell] = result.read(tmp_path / "run" / "result.json").raw["cells"]
    assert (cell["failed"], cell["timed_out"], cell["metrics"]["slo_fraction"]) == (2, 2, 0.5)


def test_interrupted_and_taken_up_again(bench: Any, server: CannedServer, tmp_path: Path) -> None:
    server.hangs_from = 5
    server.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
    options = (*FAST, "--rps", "500,800", "--requests", "4")
    with pytest.raises(UserError, match="interrupted: 1 of 2 cells are complete"):
        bench(*options)
    folder = tmp_path / "run"
    assert cells(folder) == ["500rps-seed0.jsonl", "800rps-seed0.part.jsonl"]
    kept = _lines_of(folder / "records" / "800rps-seed0.part.jsonl")
    assert {one.record.error for one in kept} == {"interrupted"}
    record = result.read(folder / "result.json")
    assert record.raw["is_complete"] is False
    assert "INCOMPLETE: 1 of 2 cells" in record.notes
    server.hangs_from = 1 << 30
    whole = (folder / "records" / "500rps-seed0.jsonl").read_bytes()
    assert bench(*options) == 0
    # Only the cell that was stopped is measured again.
    assert (folder / "records" / "500rps-seed0.jsonl").read_bytes() == whole
    anew = _lines_of(folder / "records" / "800rps-seed0.jsonl")
    assert {one.record.error for one in anew} == {None}
    assert result.read(folder / "result.json").raw["is_complete"] is True
    assert cells(folder) == ["500rps-seed0.jsonl", "800rps-seed0.jsonl"]
    with pytest.raises(UserError, match="holds a run with other options"):
        bench(*options, "--seeds", "3")


def test_prompts_that_the_context_cuts_are_counted(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--dataset", "random", "--prompt-tokens", "300", "--requests", "2")
    bench(*FAST, "--requests", "2", out="short")
    cut, whole = capsys.readouterr().out.split("records and result")[:2]
    assert "cut prompts  " in cut
    assert "cut prompts" not in whole


def test_the_warm_up_counts_for_nothing(bench: Any, tmp_path: Path) -> None:
    options = ("--rps", "10", "--requests", "6", "--warmup", "0.15", "--arrival", "trace")
    path = tmp_path / "trace.jsonl"
    rows = ({"t": n, "input_length": 5, "output_length": 2} for n in range(6))
    path.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    assert bench("--dataset", str(path), *options) == 0
    [cell] = result.read(tmp_path / "run" / "result.json").raw["cells"]
    assert (cell["warm_up_requests"], cell["requests"]) == (2, 4)
    sent = records(tmp_path / "run", "10rps-seed0")
    assert [one.is_warm_up for one in sent] == [True, True, False, False, False, False]
    due = [one.record.due_at_s for one in sent]
    assert due == pytest.approx([n / 10 for n in range(6)], abs=0.04)


def test_a_number_of_requests_is_enough(bench: Any, tmp_path: Path) -> None:
    assert bench(*FAST, "--requests", "8") == 0
    [cell] = result.read(tmp_path / "run" / "result.json").raw["cells"]
    assert (cell["warm_up_requests"], cell["requests"]) == (0, 8)


@pytest.mark.parametrize(
    ("options", "arrival", "warm_up_s"),
    [
        (("--requests", "8"), "closed", 0.0),
        (("--requests", "8", "--rps", "2"), "poisson", 0.0),
        (("--rps", "2"), "poisson", 10.0),
        (("--rps", "2", "--requests", "8", "--warmup", "1"), "poisson", 1.0),
    ],
)
def test_what_is_not_said_suits_the_rest(
    options: tuple[str, ...], arrival: str, warm_up_s: float
) -> None:
    given = parse(["--url", "http://127.0.0.1:1", *options])
    assert (given.arrival, given.warmup) == (arrival, warm_up_s)


def test_a_key_need_not_be_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANASERVE_API_KEY", "of the environment")
    assert parse([]).api_key == "of the environment"
    assert parse(["--api-key", KEY]).api_key == KEY


def test_a_cell_that_is_all_warm_up_is_none(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all 3 requests of 500rps-seed0 were sent in the warm-up"):
        bench(*FAST, "--rps", "500", "--requests", "3", "--warmup", "60")
    assert result.read(tmp_path / "run" / "result.json").raw["cells"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rps", "1", "--url", "http://127.0.0.1:1"), "no server answers at"),
        (("--rps", "1", "--api-key", "wrong"), "HTTP 401: give its --api-key"),
        (("--rps", "1", "--model", "other"), "serves canned, not other"),
        (("--rps", "1", "--dataset", "alpca"), "unknown dataset, and no file: alpca"),
        (("--arrival", "poisson"), "poisson arrivals need --rps"),
        (("--arrival", "closed", "--rps", "1"), "has no --rps"),
        (("--arrival", "closed"), "needs --requests"),
        (("--arrival", "trace", "--dataset", "random", "--rps", "9"), "has no arrival times"),
        (("--arrival", "often"), "unknown arrival"),
        (("--rps", "1", "--seeds", "1,1"), "each once"),
        (("--rps", "2,1,2"), "each once"),
        (("--rps", "1,1.0000001"), "each once"),
        (("--arrival", "closed", "--requests", "9", "--concurrency", "1.5"), "a whole number"),
        (("--dataset", "multi-turn", "--sessions", "0"), "--sessions: '0': give a whole number"),
        (("--dataset", "shared-prefix", "--prefixes", "0"), "--prefixes: '0': give a whole number"),
        (("--requests", "1", "--prefix-tokens", "-5"), "--prefix-tokens -5: give 0 or more"),
        (("--prompt-tokens", "-5"), "--prompt-tokens: '-5': give a whole number above 0"),
        (("--trace-block-tokens", "0"), "--trace-block-tokens: '0': give a whole number"),
        (("--rps", "1", "--duration", "nan"), "--duration: nan: give a number, 0 or more"),
        (("--rps", "1", "--warmup", "-1"), "--warmup: -1: give a number, 0 or more"),
        (("--rps", "1", "--range-fraction", "2"), "--range-fraction 2: give a share"),
    ],
)
def test_what_cannot_be(bench: Any, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        bench(*options)


def test_a_full_disk_is_an_error_of_the_disk(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CellFile, "add", fail)
    with pytest.raises(OSError, match="No space left"):
        bench(*FAST, "--requests", "2")


def test_a_server_that_refuses_the_first_request(bench: Any, server: CannedServer) -> None:
    server.fails_from = 0
    with pytest.raises(UserError, match="a first request failed: HTTP 500"):
        bench(*FAST, "--rps", "1")


@pytest.mark.parametrize("rate", ["0", "-1", "1,", "many", "inf"])
def test_rates_that_are_none(bench: Any, rate: str) -> None:
    with pytest.raises(UserError, match="give numbers above 0"):
        bench(f"--rps={rate}")
