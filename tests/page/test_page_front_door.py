"""The page's files, its key and its stream at the front door."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("vllm")

from banaserve.cli.serve.banner import page_line
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.contracts.trace_events import FirstToken
from banaserve.frontdoor.admin.app import AdminMiddleware
from banaserve.frontdoor.admin.live import CODE_S, PageAccess
from banaserve.frontdoor.page.files import page_files
from banaserve.frontdoor.page.page import PageMiddleware
from banaserve.frontdoor.page.records import PageInfo
from banaserve.frontdoor.page.replay import replay_app
from banaserve.mains.serve import _page
from banaserve.serving.tracing.request_log import HttpCall
from served_admin import KEY, Served
from test_ui_replay import replay_of
from waiting import until

UI = Path(__file__).parents[2] / "banaserve" / "frontdoor" / "page"
AUTH = {"authorization": f"Bearer {KEY}"}
MAX_BYTES = 150_000


class Stream:
    """One GET of the live stream, read event by event; ``leave`` is a browser that goes away."""

    def __init__(self, app: Any, headers: dict[str, str], path: str = "/admin/live") -> None:
        self.status = 0
        self.body = b""
        self.reads = asyncio.Event()
        self.reads.set()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message["headers"])
        else:
            self.body += message.get("body", b"")

    def events(self) -> list[tuple[str, Any]]:
        found = []
        for part in self.body.split(b"\r\n\r\n")[:-1]:
            name, data = part.decode().split("\r\n")
            found.append((name.removeprefix("event: "), msgspec.json.decode(data[6:])))
        return found

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, 60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served()
    app = await one.open(tmp_path)
    one.app = PageMiddleware(app, PageInfo("live", "tiny", ""))  # type: ignore[attr-defined]
    yield one
    await one.close()


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


async def test_the_page_needs_no_key_and_lets_nothing_else_in(served):
    async with client_of(served.app) as client:
        page = await client.get("/ui/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "'unsafe" not in policy
        assert "http" not in policy
        again = await client.get("/ui/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/", "/ui"):
            moved = await client.get(path)
            assert (moved.status_code, moved.headers["location"]) == (307, "ui/")
        info = (await client.get("/ui/page.json")).json()
        assert (info["mode"], info["title"]) == ("live", "tiny")
        for name in page_files():
            assert (await client.get(f"/ui/{name}")).status_code == 200
        assert (await client.post("/ui/", content=b"key")).status_code == 405


@pytest.mark.parametrize(
    "path", ["none.js", "../page.py", "%2e%2e/page.py", "vendor", "vendor/", "/index.html", "\0"]
)
async def test_no_other_file_is_served(served, path):
    asked = Stream(served.app, {}, f"/ui/{path}")
    await asyncio.wait_for(asked.task, 60)
    assert asked.status == 404
    assert b"content-security-policy" in asked.headers


def test_the_page_is_small_and_names_no_other_host():
    files = page_files()
    assert sum(len(one.body) for one in files.values()) < MAX_BYTES
    for name, file in files.items():
        if name.startswith("vendor/"):
            continue
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, name
        assert "https://" not in text, name
        for risky in ("innerHTML", "localStorage", "document.cookie", "eval("):
            assert risky not in text, f"{name}: {risky}"


def test_a_tab_stores_its_token_the_key_of_the_chat_box_and_nothing_else():
    naming = {name for name, file in page_files().items() if b"sessionStorage" in file.body}
    assert naming == {"access.js"}
    text = page_files()["access.js"].body.decode()
    stored = re.findall(r"\.setItem\([^)]*\)", text)
    assert stored == [".setItem(API_KEY, key)", ".setItem(NAME, token)"]
    assert text.count("setItem") == 2
    callers = {name for name, file in page_files().items() if b"keepApiKey" in file.body}
    assert callers == {"access.js", "chat.js"}
    assert text.count("sessionStorage") == 1, "used in one place"
    assert "const { token } = await answer.json();" in text, "what the server has made for it"


def test_what_is_carried_of_others_is_what_was_published():
    told = tomllib.loads((UI / "vendor.toml").read_text())["package"]
    named = {}
    for package in told:
        assert package["licence_file"] in package["sha256"]
        named |= package["sha256"]
    found = {
        path.relative_to(UI).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (UI / "static" / "vendor").iterdir()
    }
    assert found == named


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"cookie": f"key={KEY}"},
        {"authorization": ""},
    ],
)
async def test_without_the_key_there_is_no_stream(served, headers):
    stream = Stream(served.app, headers)
    await asyncio.wait_for(stream.task, 60)
    assert stream.status == 401
    assert b"no valid admin key" in stream.body
    assert served.page.viewers.num_viewers == 0


# ---- links and tokens


def bearer(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


async def token_for(client: httpx.AsyncClient, credential: str) -> str:
    """Empty where the server gives none."""
    given = await client.post("/admin/page-token", headers=bearer(credential))
    if not given.is_success:
        return ""
    assert given.headers["cache-control"] == "no-store"
    return str(given.json()["token"])


async def opens(client: httpx.AsyncClient, credential: str) -> bool:
    asked = await client.get("/admin/status", headers=bearer(credential))
    assert asked.status_code in (200, 401)
    return asked.status_code == 200


async def test_a_code_gets_one_token_and_opens_nothing_itself(served):
    async with client_of(served.app) as client:
        code = served.page.access.new_code()
        assert not await opens(client, code)
        token = await token_for(client, code)
        assert await opens(client, token)
        assert await token_for(client, code) == "", "once"
        stream = Stream(served.app, bearer(token))
        await until(lambda: bool(stream.events()))
        await stream.leave()
        for wrong in ("", "wrong", token, KEY[:-1], code[:-1]):
            assert await token_for(client, wrong) == "", wrong
        for headers in ({}, {"authorization": f"Basic {served.page.access.new_code()}"}):
            refused = await client.post("/admin/page-token", headers=headers)
            assert refused.status_code == 401


async def test_the_key_gets_codes_and_tokens_and_a_token_neither(served):
    async with client_of(served.app) as client:
        given = await client.post("/admin/page-code", headers=AUTH)
        assert given.json()["valid_s"] == CODE_S
        token = await token_for(client, given.json()["code"])
        assert await opens(client, await token_for(client, KEY))
        for path in ("page-code", "page-token"):
            refused = await client.post(f"/admin/{path}", headers=bearer(token))
            assert refused.status_code == 404
        for wrong in ("", "users", given.json()["code"]):
            refused = await client.post("/admin/page-code", headers=bearer(wrong))
            assert refused.status_code == 401


async def test_a_token_ends_when_its_tab_signs_out_and_with_its_server(served, tmp_path):
    async with client_of(served.app) as client:
        first, second = [await token_for(client, KEY) for _ in range(2)]
        gone = await client.delete("/admin/page-token", headers=bearer(first))
        assert gone.status_code == 204
        assert [await opens(client, one) for one in (first, second)] == [False, True]
    other = Served()
    next_server = await other.open(tmp_path)
    async with client_of(next_server) as client:
        assert not await opens(client, second)
        assert await opens(client, KEY)
    await other.close()


class GivenClock:
    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits")


@pytest.mark.parametrize(("after_s", "is_valid"), [(CODE_S - 1, True), (CODE_S, False)])
def test_a_code_is_valid_for_a_while(after_s, is_valid):
    clock = GivenClock()
    access = PageAccess(clock)
    code = access.new_code()
    clock.s += after_s
    assert access.redeem(code) is is_valid
    assert not access.redeem(code)


def test_so_many_codes_and_tokens_are_known():
    access = PageAccess(GivenClock())
    codes = [access.new_code() for _ in range(9)]
    assert [access.redeem(one) for one in codes] == [False] + [True] * 8
    tokens = [access.new_token() for _ in range(65)]
    assert len({*codes, *tokens}) == 9 + 65
    assert [access.opens(one) for one in tokens] == [False] + [True] * 64


async def test_a_move_is_seen_on_the_stream(served):
    stream = Stream(served.app, AUTH)
    await until(lambda: len(stream.events()) >= 1)
    assert stream.status == 200
    assert stream.headers[b"cache-control"] == b"no-store"
    name, first = stream.events()[0]
    assert name == "snapshot"
    assert [one["status"]["id"] for one in first["instances"]] == ["d0", "p0", "p1", "x0"]
    assert first["num_layers"] == 30
    async with client_of(served.app) as client:
        ask = {"kind": "layers", "from": "d0", "to": "p0", "layers": [10, 20]}
        await client.post("/admin/migrations", json=ask, headers=AUTH)
        await client.get("/admin/migrations/m1?wait_s=20", headers=AUTH)
    state = await served.page.read_state()
    (away,) = state.snapshot.instances[0].away
    assert (away.at, away.kind, away.words) == ("p0", "layers", "layers 10:20")
    assert [(one.id, one.state, one.target) for one in state.snapshot.moves] == [
        ("m1", "done", "p0")
    ]
    await stream.leave()
    assert served.page.viewers.num_viewers == 0


async def test_a_browser_that_reads_nothing_keeps_no_other_back(served):
    stuck, well = Stream(served.app, AUTH), Stream(served.app, AUTH)
    await until(lambda: bool(stuck.events() and well.events()))
    stuck.reads.clear()
    served.page.viewers._interval_s = 0.01
    await until(lambda: well.body.count(b"event: snapshot") > 20)
    assert stuck.body.count(b"event: snapshot") < 3
    stuck.reads.set()
    for one in (stuck, well):
        await one.leave()
    assert served.page.viewers.num_viewers == 0


async def test_too_many_pages_are_refused(served):
    served.page.viewers._max_viewers = 1
    first = Stream(served.app, AUTH)
    await until(lambda: bool(first.events()))
    second = Stream(served.app, AUTH)
    await asyncio.wait_for(second.task, 60)
    assert (second.status, b"too many pages" in second.body) == (503, True)
    await first.leave()


async def test_the_end_of_the_server_ends_the_stream(served):
    stream = Stream(served.app, AUTH)
    await until(lambda: bool(stream.events()))
    served.page.viewers.close()
    await asyncio.wait_for(stream.task, 60)
    assert stream.events()[-1] == ("end", {})


async def test_requests_are_on_the_page(served):
    now_s = served.requests._clock.now()
    with served.requests.following("chatcmpl-1", 12, HttpCall(now_s, 1.7e9)) as notes:
        notes.note(FirstToken("decode"))
        notes.tokens_so_far = lambda: 5
        state = await served.page.read_state()
        assert state.snapshot.figures.ttft_p50_s is not None
        assert [one.output_tokens for one in state.snapshot.requests] == [5], "those so far"
    assert [one.id for one in state.snapshot.requests] == ["chatcmpl-1"]
    ended = served.requests.lately(now_s)
    assert [one.end_s is not None for one in ended] == [True]
    assert served.requests.lately(now_s + 3600) == []


async def test_a_replay_answers_this_machine_alone():
    app = replay_app(replay_of(2), "decisions.jsonl")
    async with client_of(app) as client:
        assert (await client.get("/ui/page.json")).json()["mode"] == "replay"
        index = (await client.get("/replay/index.json")).json()
        moment = await client.get(f"/replay/moment.json?frame={len(index['at_s']) - 1}")
        assert moment.json()["snapshot"]["instances"][1]["away"][0]["at"] == "p0"
        for wrong in ("", "-1", "x", "99999", "9" * 5000, "\N{SUPERSCRIPT TWO}"):
            assert (await client.get(f"/replay/moment.json?frame={wrong}")).status_code == 404
        other = await client.get("/replay/index.json", headers={"host": "rebound.example"})
        assert other.status_code == 400


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("argv", "terminal", "told"),
    [
        ([], Terminal(), "http://a:1/ui/#code=c0de (opens once; `banaserve ui` gives another)"),
        ([], io.StringIO(), "http://a:1/ui (its key: /runs/1/admin.json)"),
        (["--admin-key", "mine"], io.StringIO(), "http://a:1/ui (its key: --admin-key)"),
    ],
)
def test_a_terminal_gets_a_link_and_a_log_does_not(argv, terminal, told):
    run: Any = SimpleNamespace(logs=Path("/runs/1"))
    assert page_line("http://a:1", parse_serve_argv(argv), run, terminal, "c0de") == told


def test_the_page_can_be_left_out():
    assert parse_serve_argv([]).ui
    left_out: Any = SimpleNamespace(config=parse_serve_argv(["--no-ui"]))
    nothing: Any = None
    assert _page(left_out, nothing, nothing, nothing) is None


async def test_a_server_without_a_page_says_so(served):
    app = AdminMiddleware(served.app, served.world.cluster.coordinator, KEY)
    async with client_of(app) as client:
        refused = await client.post("/admin/page-code", headers=AUTH)
    assert (refused.status_code, "--no-ui" in refused.text) == (400, True)
