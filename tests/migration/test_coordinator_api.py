"""The admin API over HTTP, and the commands that talk to it, over instances without engines."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

import migration_doubles as doubles
from admin_server import AdminServer
from banaserve.base.access.tenants import TenantKey
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import AdminAccess, find_admin, open_run_dir, write_admin
from banaserve.cli.main import main
from banaserve.contracts.migration_api import MoveLayers
from banaserve.frontdoor import admin_client
from banaserve.frontdoor.admin.app import AdminMiddleware
from banaserve.frontdoor.admin_client import AdminClient, OperationClient
from banaserve.frontdoor.middleware.api_keys import KeyMiddleware

KEY = "the-admin-key"
AUTH = {"Authorization": f"Bearer {KEY}"}
LAYERS = {"kind": "layers", "from": "d0", "to": "p0", "layers": [10, 20]}


async def users_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"users"})


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    cluster = doubles.Cluster(tmp_path)
    app = AdminMiddleware(
        KeyMiddleware(users_app, [TenantKey(key="users-key")]), cluster.coordinator, KEY
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        yield client
    await cluster.close()


async def test_each_key_opens_its_own_part(door):
    users = {"Authorization": "Bearer users-key"}
    for path in ("/admin", "/admin/placement", "/admin/migrations", "/admin/x"):
        assert (await door.get(path)).status_code == 401
        assert (await door.get(path, headers=users)).status_code == 401
    assert (await door.get("/admin/placement", headers=AUTH)).status_code == 200
    assert (await door.get("/admin/placement", headers={"Authorization": KEY})).status_code == 401
    assert (await door.get("/v1/models", headers=AUTH)).status_code == 401
    assert (await door.get("/v1/models", headers=users)).text == "users"
    assert (await door.get("/administration", headers=users)).text == "users"
    odd = {"Authorization": b"Bearer \xff\xfe"}
    assert (await door.get("/admin/placement", headers=odd)).status_code == 401


async def test_a_migration_from_request_to_end(door):
    begun = await door.post("/admin/migrations", json=LAYERS, headers=AUTH)
    assert (begun.status_code, begun.json()["id"]) == (202, "m1")
    shown = await door.get("/admin/migrations/m1?wait_s=20", headers=AUTH)
    assert (shown.json()["state"], shown.json()["blocks_gained"]) == ("done", 150)
    placed = (await door.get("/admin/placement", headers=AUTH)).json()
    (d0,) = [one for one in placed["instances"] if one["id"] == "d0"]
    assert d0["units"][0]["modules"] == {"type": "layers", "start": 10, "end": 20}
    assert d0["units"][0]["at"] == "p0"
    listed = await door.get("/admin/migrations", headers=AUTH)
    assert [one["id"] for one in listed.json()] == ["m1"]
    heads = {"kind": "heads", "from": "d0", "to": "p0", "heads": {"5": [1, 2]}}
    assert (await door.post("/admin/migrations", json=heads, headers=AUTH)).status_code == 202


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (LAYERS | {"to": "d0"}, 409, "same instance"),
        (LAYERS | {"to": "p7"}, 400, "unknown instance: p7"),
        (LAYERS | {"layers": [20, 10]}, 409, "empty"),
        (LAYERS | {"layers": [1, 2, 3]}, 400, "length 2"),
        (LAYERS | {"kind": "everything"}, 400, "Invalid value"),
        (LAYERS | {"also": 1}, 400, "unknown field `also`"),
        ({"kind": "heads", "from": "d0", "to": "p0", "heads": {"five": [1]}}, 400, "int"),
        ([], 400, "Expected `object`"),
    ],
)
async def test_bad_requests_are_refused_in_one_line(door, body, status, words):
    answer = await door.post("/admin/migrations", json=body, headers=AUTH)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, "\n" in message) == (status, False)
    assert words in message


async def test_bodies_that_are_no_json_or_too_large(door):
    broken = await door.post("/admin/migrations", content=b"{", headers=AUTH)
    assert broken.status_code == 400
    large = await door.post("/admin/migrations", content=b" " * (2 << 20), headers=AUTH)
    assert large.status_code == 413


async def test_unknown_migrations_and_waits(door):
    assert (await door.get("/admin/migrations/m9", headers=AUTH)).status_code == 404
    assert (await door.delete("/admin/migrations/m9", headers=AUTH)).status_code == 404
    await door.post("/admin/migrations", json=LAYERS, headers=AUTH)
    for wait in ("-1", "x", "31", "nan"):
        path = f"/admin/migrations/m1?wait_s={wait}"
        assert (await door.get(path, headers=AUTH)).status_code == 400
    await door.get("/admin/migrations/m1?wait_s=20", headers=AUTH)
    ended = await door.delete("/admin/migrations/m1", headers=AUTH)
    assert (ended.status_code, "is done" in ended.text) == (409, True)


async def test_overlap_is_set_and_shown_with_the_placement(door):
    ask = {"instance": "d0", "max_microbatches": 8}
    said = await door.post("/admin/overlap", json=ask, headers=AUTH)
    assert (said.status_code, said.json()["max_microbatches"], said.json()["blocker"]) == (
        200,
        8,
        "",
    )
    for body in (b"{", b"[]", b'{"instance": "d0"}', b'{"instance": "d0", "parts": 2}'):
        assert (await door.post("/admin/overlap", content=body, headers=AUTH)).status_code == 400
    placed = (await door.get("/admin/placement", headers=AUTH)).json()
    by_id = {one["id"]: one for one in placed["instances"]}
    blockers = [by_id[name]["migration_blocker"] for name in ("x0", "d0")]
    assert blockers == ["MLA cannot be moved", ""]
    assert by_id["d0"]["overlap"]["max_microbatches"] == 8


# ---- the note in the run directory


def test_the_note_is_the_users_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with open_run_dir(folder) as run:
        with pytest.raises(UserError, match="no banaserve serves in"):
            find_admin(folder)
        os.umask(0)
        write_admin(run.logs, AdminAccess("http://127.0.0.1:1", "secret"))
        assert (folder / "admin.json").stat().st_mode & 0o777 == 0o600
        assert find_admin(folder) == AdminAccess("http://127.0.0.1:1", "secret")
    assert not (folder / "admin.json").exists()
    write_admin(folder, AdminAccess("http://127.0.0.1:1", "of a run that was killed"))
    with pytest.raises(UserError, match="no banaserve serves in"):
        find_admin(folder)


def test_the_only_run_is_found_and_several_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no banaserve of yours serves"):
        find_admin(None)
    with open_run_dir(None) as run:
        write_admin(run.logs, AdminAccess("http://127.0.0.1:1", "k"))
        assert find_admin(None).key == "k"
        other = run.logs.with_name("20990101-000000-1")
        other.mkdir()
        (other / "run.json").write_text(json.dumps({"pid": os.getpid()}))
        write_admin(other, AdminAccess("http://127.0.0.1:2", "k"))
        assert find_admin(None).key == "k", "the other has ended, whoever has its process id"
        with open_run_dir(other):
            write_admin(other, AdminAccess("http://127.0.0.1:2", "k"))
            with pytest.raises(UserError, match=r"several run: choose one with --port \("):
                find_admin(None)


# ---- commands


class Server(AdminServer):
    """The admin API of a cluster."""

    cluster: doubles.Cluster

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(self._door)

    @asynccontextmanager
    async def _door(self) -> AsyncIterator[AdminMiddleware]:
        self.cluster = doubles.Cluster(self._folder)
        yield AdminMiddleware(users_app, self.cluster.coordinator, KEY)
        await self.cluster.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("admin"))
    yield made
    made.stop()


@pytest.fixture
def banaserve(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("BANASERVE_ADMIN_KEY", KEY)
    return lambda *argv: main([*argv, "--url", server.url])


def test_migrate_and_placement(banaserve, capsys):
    assert banaserve("placement") == 0
    capsys.readouterr()
    assert banaserve("migrate", "layers", "--from=d0", "--to=p0", "--layers=10:20") == 0
    said = capsys.readouterr()
    assert "layers 10:20 run beside p0 after" in said.out
    assert "the pool has gained 150 KV blocks" in said.out
    assert "m1: layers 10:20 to p0: done" in said.err
    heads = ("migrate", "heads", "--from", "d0", "--to", "p0", "--layer", "5:7", "--heads", "1,2")
    assert banaserve(*heads) == 0
    capsys.readouterr()
    older = ("migrate", "context", "--from", "d0", "--to", "p0", "--layers", "22:24")
    assert banaserve(*older) == 0
    said = capsys.readouterr().out
    assert "older blocks of layers 22:24 run beside p0 after" in said
    assert "frees bytes, but no block of the pool" in said
    assert banaserve("placement") == 0
    shown = capsys.readouterr().out
    assert "layers 0:10 20:30" in shown
    assert "heads 5/1,2 6/1,2" in shown
    assert "older blocks of layers 22:24" in shown
    assert "x0        decode  MLA cannot be moved" in shown
    assert "d0 waits for its guests" in shown
    assert "guests beside p0 take at most 100% of its device: 1 took" in shown
    assert banaserve("placement", "--json") == 0
    assert json.loads(capsys.readouterr().out)["migrations"][0]["state"] == "done"
    assert banaserve("migrate", "return", "--from", "d0", "--layers", "10:20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["blocks_gained"] < 0
    assert banaserve("migrate", "return", "--from", "d0") == 0


EXPERTS = ("experts", "--from", "d0", "--to", "p0", "--layer", "5")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("layers", "--from", "d0", "--to", "d0", "--layers", "1:2"), "same instance"),
        (("layers", "--from", "d0", "--to", "p0", "--layers", "x"), "START:END"),
        (("heads", "--from", "d0", "--to", "p0", "--layer", "5", "--heads", "a"), "commas"),
        (("heads", "--from", "d0", "--to", "p0", "--layer", "6:5", "--heads", "1"), "no layer"),
        (("context", "--from", "d0", "--to", "p0", "--layers", "9:9"), "within 0:30"),
        (("return", "--from", "p1"), "nothing is away"),
        (("return", "--from", "d0", "--experts", "1"), "goes together"),
        (("experts", "--from", "d0", "--to", "p0", "--layer", "5"), "give either --experts"),
        ((*EXPERTS, "--experts", "1", "--load", "0.5"), "give either --experts"),
        ((*EXPERTS, "--load", "1.5"), "between 0 and 1"),
        ((*EXPERTS, "--load", "0.5", "--watch", "0"), "give seconds"),
        ((*EXPERTS, "--load", "0.5"), "this model has no experts"),
        ((*EXPERTS, "--experts", "1"), "this model has no experts"),
        (("return", "--from", "d0", "--heads", "1"), "goes together"),
        (("layers", "--from", "d0"), "see banaserve migrate layers --help"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_2(banaserve, capsys, argv, words):
    assert banaserve("migrate", *argv) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err


def test_overlap_is_switched_while_an_instance_serves(banaserve, server, capsys):
    switch = ("migrate", "overlap", "--of", "d0", "--parts")
    assert banaserve(*switch, "8") == 0
    assert capsys.readouterr().out == "d0 cuts steps into up to 8 parts\n"
    server.cluster.engine.overlap["blocker"] = "its tokens look at later ones"
    assert banaserve(*switch, "8") == 0
    assert "waits for its guests, though it may cut steps: its tokens" in capsys.readouterr().out
    server.cluster.engine.overlap["blocker"] = ""
    assert banaserve(*switch, "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["max_microbatches"] == 1
    assert server.cluster.engine.calls.count("overlap") == 3
    server.cluster.engine.faults = {"overlap": "a step has 1 to 64 parts, not 65"}
    assert banaserve(*switch, "65") == 2
    assert "1 to 64 parts" in capsys.readouterr().err
    server.cluster.engine.faults = {}
    assert banaserve("migrate", "overlap", "--of", "nobody", "--parts", "2") == 2
    assert "nobody" in capsys.readouterr().err


def test_what_guests_may_take_is_bounded_while_they_serve(banaserve, server, capsys):
    bound = ("migrate", "share", "--beside", "p1", "--fraction")
    assert banaserve(*bound, "0.4") == 0
    assert capsys.readouterr().out == "guests beside p1 take at most 40% of its device\n"
    assert banaserve(*bound, "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fraction"] == 1.0
    assert banaserve(*bound, "0.01") == 2
    assert "0.05 to 1 of a device, not 0.01" in capsys.readouterr().err
    assert banaserve("migrate", "share", "--beside", "nobody", "--fraction", "0.5") == 2
    assert "nobody" in capsys.readouterr().err


def test_a_migration_that_fails_is_exit_code_2(banaserve, server, capsys):
    server.cluster.engine.faults = {"preparing": "the guest refuses"}
    assert banaserve("migrate", "layers", "--from", "d0", "--to", "p0", "--layers", "1:2") == 2
    assert "failed: the guest refuses" in capsys.readouterr().err
    server.cluster.engine.faults = {}


def test_ctrl_c_aborts_the_move(banaserve, server, capsys, monkeypatch):
    server.cluster.engine.held = {"preparing"}
    show = OperationClient.show

    def interrupted(client: Any, migration_id: str, wait_s: float = 0.0) -> Any:
        monkeypatch.setattr(OperationClient, "show", show)
        raise KeyboardInterrupt

    monkeypatch.setattr(OperationClient, "show", interrupted)
    assert banaserve("migrate", "layers", "--from", "d0", "--to", "p0", "--layers", "1:2") == 2
    assert "aborted" in capsys.readouterr().err
    assert server.cluster.engine.units == {}
    server.cluster.engine.held = set()


def test_servers_that_cannot_be_reached(server, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("BANASERVE_ADMIN_KEY", raising=False)
    assert main(["placement", "--url", server.url]) == 2
    assert "give its --admin-key" in capsys.readouterr().err
    assert main(["placement", "--url", server.url, "--admin-key", "wrong"]) == 2
    assert "refuses the admin key" in capsys.readouterr().err
    assert main(["placement", "--url", "http://127.0.0.1:9", "--admin-key", "k"]) == 2
    assert "no banaserve answers at" in capsys.readouterr().err
    assert main(["placement", "--url", "http://[::1", "--admin-key", "k"]) == 2
    assert "no banaserve answers at" in capsys.readouterr().err
    assert main(["placement", "--run-dir", str(tmp_path)]) == 2
    assert "no banaserve serves in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 500 Gone\r\nContent-Length: 9\r\n\r\n{",
        b"",
    ],
)
def test_what_answers_no_http_or_breaks_off_is_one_line(capsys, answer):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=answers)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        code = main(["placement", "--url", url, "--admin-key", "k"])
        thread.join(30)
    said = capsys.readouterr().err
    assert (code, len(said.splitlines()), "Traceback" in said) == (2, 1, False)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://[::1]:8000", True),
        ("http://localhost:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://localhost.example.org", False),
        ("http://192.0.2.1:8000", False),
        ("http://[::1", False),
        ("nonsense", False),
    ],
)
def test_what_is_this_machine(url, is_here):
    assert admin_client._is_here(url) is is_here


def test_no_proxy_is_given_the_key_of_this_machine(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert AdminClient(server.url, KEY).placement().instances


def test_the_client_waits_for_the_end(server):
    client = AdminClient(server.url, KEY)
    migration = client.run(MoveLayers("p0", "d0", (3, 5)))
    assert migration.state == "done"


# ---- options of serve


def test_serve_options(monkeypatch):
    from banaserve.cli.serve.command_line import parse_serve_argv

    monkeypatch.delenv("BANASERVE_ADMIN_KEY", raising=False)
    config = parse_serve_argv(["--migration", "off", "--admin-key", "a", "--api-key", "b"])
    assert (config.migration, config.admin_key) == (False, "a")
    config = parse_serve_argv(["--migration", "on", "--migration-kv-growth", "3"])
    assert (config.migration, config.migration_kv_growth, config.admin_key) == (True, 3.0, "")
    asked = {word: parse_serve_argv(["--migration", word]) for word in ("auto", "on", "off")}
    assert {w: (c.migration, c.must_migrate) for w, c in asked.items()} == {
        "auto": (True, False),
        "on": (True, True),
        "off": (False, False),
    }
    assert parse_serve_argv([]) == asked["auto"]
    monkeypatch.setenv("BANASERVE_ADMIN_KEY", "from the environment")
    assert parse_serve_argv([]).admin_key == "from the environment"
    for argv, words in [
        (["--admin-key", "same", "--api-key", "same"], "a key of its own"),
        (["--migration-kv-growth", "0.5"], "at least 1"),
        (["--migration-stall", "0"], "above 0"),
        (["--migration-overlap", "0"], "--migration-overlap 0"),
        (["--migration-overlap", "65"], "to 64 parts"),
        (["--migration", "maybe"], "invalid choice"),
    ]:
        with pytest.raises(UserError, match=words):
            parse_serve_argv(argv)
