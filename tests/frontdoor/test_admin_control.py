"""Status, decisions, pause and roles: over the admin API and as commands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

pytest.importorskip("vllm")

from admin_server import AdminServer
from banaserve.base.errors import UserError
from banaserve.base.types import BackPressure, InstanceId, Role
from banaserve.cli.admin.decisions import lines_of
from banaserve.cli.main import main
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.contracts.control_api import (
    DecisionRecord,
    Felt,
    Numbers,
    Rejection,
    StepRecord,
    WantedStep,
)
from banaserve.contracts.instances import DrainState
from banaserve.contracts.restart_api import RestartRequest
from banaserve.frontdoor.admin.app import AdminMiddleware
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.kvstore.sizes import format_size
from banaserve.orchestrator.planner.loop.decision_format import pressure_words
from served_admin import KEY, Served
from waiting import until

AUTH = {"Authorization": f"Bearer {KEY}"}
NUMBERS = Numbers("decode", 0.25, 0.9, 0.5, 0.5, 0.04, 12.0, 4, 2, 0, 300, 0, 0.1, [])
DECISION = DecisionRecord(
    number=0,
    at_s=1.7e9,
    mode="on",
    policy="repaired",
    gap=0.8,
    is_balancing=True,
    reason="no candidate is worth it",
    instances={"d0": NUMBERS},
    left_out={"p1": "its report is stale"},
    back_pressure=pressure_words(BackPressure(2, 900, 1.5, 3, 4, 4096)),
    steps=[
        WantedStep(
            "move layers 10:20 from d0 to p0",
            "layers",
            1.5,
            3.0,
            60.0,
            {"d0": Felt(0.0, 0.0, 150, 0.001)},
            result=StepRecord(
                "done", "", 2.5, 5 << 20, 0.004, 150, False, {"d0": Felt(0.1, -0.4, 150, 0.002)}
            ),
        ),
        WantedStep("switch p1 from prefill to decode", "role", 1.0, 1.5, 60.0, {}, held="paused"),
    ],
    rejected=[Rejection("move heads", "no room", 0.5), Rejection("move layers", "no room")],
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Any]:
    one = Served()
    transport = httpx.ASGITransport(app=await one.open(tmp_path))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://door", headers=AUTH
    ) as client:
        one.client = client  # type: ignore[attr-defined]
        yield one
    await one.close()


async def test_a_server_on_one_screen(served):
    await served.client.post(
        "/admin/migrations", json={"kind": "layers", "from": "d0", "to": "p0", "layers": [10, 20]}
    )
    await served.client.get("/admin/migrations/m1?wait_s=20")
    await until(lambda: bool(served.world.instances["d0"].placements))
    found = (await served.client.get("/admin/status")).json()
    by_id = {one["id"]: one for one in found["instances"]}
    assert by_id["d0"]["away"] == ["layers 10:20 at p0"]
    assert (by_id["d0"]["kv_blocks"], by_id["d0"]["kv_blocks_gained"]) == (450, 150)
    assert by_id["p0"]["guests"] == ["layers 10:20 of d0"]
    assert by_id["p0"]["left_out"] == "its report is stale"
    assert [(move["id"], move["state"]) for move in found["moves"]] == [("m1", "done")]
    assert (found["routing_policy"], found["routing_package"]) == ("round_robin", "")
    assert (found["controller"]["mode"], found["controller"]["policy"]) == ("on", "repaired")


async def test_decisions_are_told_and_limited(served):
    for reason in ("one", "two", "three"):
        served.controller.log.add(
            DecisionRecord(0, 1.7e9, "on", "repaired", 0.1, False, reason, {}, {}, [], [])
        )
    told = (await served.client.get("/admin/decisions")).json()
    assert [(one["number"], one["reason"]) for one in told] == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
    ]
    last = (await served.client.get("/admin/decisions?last=1")).json()
    assert [one["reason"] for one in last] == ["three"]
    for wrong in ("-1", "x", "1.5", "", "\N{SUPERSCRIPT TWO}", "9" * 5000):
        assert (await served.client.get(f"/admin/decisions?last={wrong}")).status_code == 400


async def test_pause_and_resume(served):
    for paused, state in ((True, "paused"), (False, "running")):
        told = await served.client.post("/admin/orchestrator", json={"paused": paused})
        assert told.json()["state"] == state
        assert (await served.client.get("/admin/orchestrator")).json()["state"] == state
    for wrong in ({}, {"paused": 1}, {"paused": True, "x": 1}):
        assert (await served.client.post("/admin/orchestrator", json=wrong)).status_code == 400


async def test_an_orchestrator_that_is_off_is_neither_paused_nor_resumed(served, monkeypatch):
    status = msgspec.structs.replace(served.controller.status(), mode="off")
    monkeypatch.setattr(served.controller, "status", lambda: status)
    for paused in (True, False):
        refused = await served.client.post("/admin/orchestrator", json={"paused": paused})
        assert (refused.status_code, "is off" in refused.json()["error"]["message"]) == (409, True)


async def test_a_drain_over_the_api(served):
    p0, p1 = (served.world.instances[InstanceId(name)] for name in ("p0", "p1"))
    p1.inflight_requests = 3
    begun = await served.client.post("/admin/drains/p1")
    assert (begun.status_code, begun.json()) == (
        202,
        {"instance": "p1", "is_held": True, "num_left": 0},
    )
    assert not served.world.executor.view().instances[p1.id].ready
    assert (await served.client.post("/admin/drains/p1")).status_code == 202
    refused = await served.client.post("/admin/roles", json={"instance": "p1", "role": "decode"})
    assert "banaserve drain p1 --undo" in refused.json()["error"]["message"]
    last = await served.client.post("/admin/drains/p0")
    assert (last.status_code, p0.service.is_drained) == (409, False)
    assert "only one that serves prefill" in last.json()["error"]["message"]
    listed = (await served.client.get("/admin/status")).json()["instances"]
    assert {one["id"]: one["state"] for one in listed}["p1"] == "drained"
    engine, p1.llm = p1.llm, None
    listed = (await served.client.get("/admin/status")).json()["instances"]
    assert {one["id"]: one["state"] for one in listed}["p1"] == "down"
    p1.llm, p1.inflight_requests = engine, 1
    shown = await served.client.get("/admin/drains/p1?wait_s=0.05")
    assert shown.json()["num_left"] == 1
    assert (await served.client.delete("/admin/drains/p1")).json()["is_held"] is False
    assert served.world.executor.view().instances[p1.id].ready
    again = await served.client.delete("/admin/drains/p1")
    assert (again.status_code, again.json()["error"]["message"]) == (
        409,
        "instance p1 was not drained: nothing to undo",
    )
    assert (await served.client.post("/admin/drains/p9")).status_code == 400


async def test_a_scaling_over_the_api(served):
    p0, p1 = (served.world.instances[InstanceId(name)] for name in ("p0", "p1"))
    p0.inflight_requests = p1.inflight_requests = 1
    p1.keeps_streams = True
    begun = await served.client.post("/admin/scalings", json={"prefill": 1, "decode": 3})
    assert (begun.status_code, begun.json()["id"]) == (202, "s1")
    await until(lambda: served.scaler.get("s1").leaving == "p1")
    shown = (await served.client.get("/admin/scalings/s1?wait_s=0.05")).json()
    assert (shown["state"], shown["added"], shown["num_left"]) == ("draining", ["d1"], 1)
    found = (await served.client.get("/admin/status")).json()
    assert [move["what"] for move in found["moves"]] == ["to 1:3: p1: 1 requests left"]
    assert [one["id"] for one in found["instances"]] == ["d0", "p0", "p1", "x0", "d1"]
    second = await served.client.post("/admin/scalings", json={"prefill": 2})
    assert (second.status_code, second.json()["error"]["message"][:32]) == (
        409,
        "scaling s1 to 1:3 is under way: ",
    )
    undone = await served.client.delete("/admin/drains/p1")
    assert (undone.status_code, undone.json()["error"]["message"]) == (
        409,
        "instance p1 is being removed",
    )
    p1.inflight_requests = 0
    ended = (await served.client.get("/admin/scalings/s1?wait_s=20")).json()
    assert (ended["state"], ended["removed"], ended["reason"]) == ("done", ["p1"], "")
    listed = (await served.client.get("/admin/status")).json()["instances"]
    assert [one["id"] for one in listed] == ["d0", "p0", "x0", "d1"]
    assert (await served.client.delete("/admin/scalings/s1")).status_code == 409
    assert (await served.client.get("/admin/scalings/s2")).status_code == 404
    assert (await served.client.post("/admin/scalings", json={"prefil": 2})).status_code == 400
    assert len((await served.client.get("/admin/scalings")).json()) == 1


async def test_nodes_over_the_api(served):
    p1 = served.world.instances[InstanceId("p1")]
    p1.inflight_requests, p1.keeps_streams = 1, True
    begun = await served.client.post("/admin/node-changes", json={"action": "add", "node": "c"})
    assert (begun.status_code, begun.json()["state"]) == (202, "joining")
    assert (await served.client.get("/admin/node-changes/n1?wait_s=20")).json()["state"] == "done"
    shown = (await served.client.get("/admin/nodes")).json()
    assert [(one["name"], one["instances"]) for one in shown] == [
        ("a", ["d0", "p0"]),
        ("b", ["p1", "x0"]),
        ("c", []),
    ]
    ask = {"action": "remove", "node": "b"}
    assert (await served.client.post("/admin/node-changes", json=ask)).status_code == 202
    await until(lambda: served.scaler.get("s1").leaving == "p1")
    found = (await served.client.get("/admin/status")).json()
    assert {one["name"]: one["state"] for one in found["nodes"]}["b"] == "leaving"
    words = {move["id"]: (move["what"], move["state"]) for move in found["moves"]}
    assert words["n2"] == ("remove node b: its instances leave (s1)", "leaving")
    assert words["s1"] == ("to no instance on node b: p1: 1 requests left", "draining")
    assert (await served.client.delete("/admin/node-changes/n2")).status_code == 202
    ended = (await served.client.get("/admin/node-changes/n2?wait_s=20")).json()
    assert ended["state"] == "aborted"
    placed = (await served.client.get("/admin/placement")).json()["nodes"]
    assert {one["name"]: one["state"] for one in placed} == dict.fromkeys("abc", "ready")
    none = await served.client.post("/admin/node-changes", json={**ask, "node": "z"})
    assert (none.status_code, none.json()["error"]["message"]) == (400, "there is no node z")
    wrong = await served.client.post("/admin/node-changes", json={**ask, "action": "drop"})
    assert wrong.status_code == 400
    assert (await served.client.delete("/admin/node-changes/n1")).status_code == 409
    assert (await served.client.get("/admin/node-changes/n9")).status_code == 404


async def test_a_rolling_restart_over_the_api(served):
    client, restarts = served.client, served.restarts
    body = {"model": "new", "vllm_options": ["--max-num-seqs", "8"], "timeout_s": 9}
    begun = await client.post("/admin/restarts", json=body)
    assert (begun.status_code, begun.json()["id"]) == (202, "s1")
    assert restarts.asked == [RestartRequest("new", ["--max-num-seqs", "8"], 9.0)]
    status = (await client.get("/admin/status")).json()
    assert {one["id"]: one["state"] for one in status["instances"]}["p1"] == "restarting"
    (line,) = [move for move in status["moves"] if move["id"] == "s1"]
    assert line["what"] == "rolling restart: 0 of 2 engines replaced; p1 draining, 2 left"
    for path in ("/admin/restarts/s1", "/admin/restarts/s1?wait_s=0.01"):
        assert (await client.get(path)).json()["engines"][0]["num_left"] == 2
    assert [one["id"] for one in (await client.get("/admin/restarts")).json()] == ["s1"]
    assert (await client.delete("/admin/restarts/s1")).json()["state"] == "aborted"
    assert (await client.get("/admin/restarts/s2")).status_code == 404
    assert (await client.delete("/admin/restarts/s2")).status_code == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "bad"}, "no engine could serve it"),
        ({"modell": "new"}, "modell"),
        ({"vllm_options": ["x"] * 65}, "64"),
        ({"vllm_options": ["x" * 2049]}, "2048"),
    ],
)
async def test_a_rolling_restart_that_is_refused(served, body, said):
    refused = await served.client.post("/admin/restarts", json=body)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
    assert served.restarts.asked == []


async def test_one_that_switches_its_role_is_not_drained(served):
    p1 = served.world.instances[InstanceId("p1")]
    p1.inflight_requests = 1
    await served.client.post("/admin/roles", json={"instance": "p1", "role": "decode"})
    refused = await served.client.post("/admin/drains/p1")
    assert (refused.status_code, p1.service.is_drained) == (409, False)
    assert "is switching its role" in refused.json()["error"]["message"]


async def test_a_role_over_the_api(served):
    p1 = served.world.instances["p1"]
    p1.inflight_requests = 1
    begun = await served.client.post("/admin/roles", json={"instance": "p1", "role": "decode"})
    assert (begun.status_code, begun.json()["state"]) == (202, "draining")
    states = {
        i["id"]: i["state"] for i in (await served.client.get("/admin/status")).json()["instances"]
    }
    assert (states["p1"], states["p0"]) == ("draining", "ready")
    p1.inflight_requests = 0
    ended = await served.client.get("/admin/roles/r1?wait_s=20")
    assert (ended.json()["state"], p1.role) == ("done", Role.DECODE)
    assert len((await served.client.get("/admin/roles")).json()) == 1
    assert (await served.client.delete("/admin/roles/r1")).status_code == 409
    assert (await served.client.delete("/admin/roles/r9")).status_code == 404
    assert (await served.client.get("/admin/roles/r9")).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"instance": "p9", "role": "decode"}, 400, "unknown instance: p9"),
        ({"instance": "p1", "role": "either"}, 400, "unknown role: either"),
        (
            {"instance": "p1", "role": "both", "max_num_batched_tokens": -1},
            400,
            "max_num_batched_tokens=-1: give 0 or more",
        ),
        ({"instance": "p1", "role": "prefill"}, 409, "for prefill already"),
        ({"instance": "p1", "role": "decode", "timeout_s": 0}, 400, "more than 0"),
        ({"instance": "p1"}, 400, "missing required field `role`"),
    ],
)
async def test_roles_that_are_refused_in_one_line(served, body, status, words):
    answer = await served.client.post("/admin/roles", json=body)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, words in message, "\n" in message) == (status, True, False)


async def test_every_path_needs_the_key(served):
    for path in ("status", "decisions", "orchestrator", "roles"):
        refused = await served.client.get(f"/admin/{path}", headers={"Authorization": "Bearer no"})
        assert refused.status_code == 401


# ---- commands


class Server(AdminServer):
    """The admin API of a cluster with an orchestrator."""

    served: Served

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(self._door)

    @asynccontextmanager
    async def _door(self) -> AsyncIterator[AdminMiddleware]:
        self.served = Served()
        yield await self.served.open(self._folder)
        await self.served.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    yield one
    one.stop()


def test_the_commands_say_that_prefill_waits_for_decode(server, capsys):
    one = server.served.world.instances["p0"]
    idle = one.view().report
    pressed = replace(idle, back_pressure=BackPressure(2, 900, 1.5, 3, 4, 4096))
    view = one.view
    one.view = lambda: replace(view(), report=pressed)
    words = "prefill waits: the store holds 3 of 4 blocks (12 KiB) for hand-overs; 2 prompts wait"
    main(["status", "--url", server.url, "--admin-key", KEY])
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if words in line] == [said[2]]
    one.view = view
    main(["status", "--url", server.url, "--admin-key", KEY])
    assert words not in capsys.readouterr().out


def test_the_commands(server, capsys, monkeypatch):
    def banaserve(*argv: str) -> tuple[int, str, str]:
        code = main([*argv, "--url", server.url, "--admin-key", KEY])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = banaserve("status")
    assert (code, out.splitlines()[0]) == (0, "orchestrator on, running: repaired every 3600 s")
    assert out.splitlines()[1] == "routing round_robin"
    assert "d0        decode   ready" in out
    assert len(json.loads(banaserve("status", "--json")[1])["instances"]) == 4
    assert banaserve("decisions")[1] == "the orchestrator has decided nothing so far\n"
    server.served.controller.log.add(DECISION)
    assert "begins: move layers 10:20 from d0 to p0" in banaserve("decisions")[1]
    assert json.loads(banaserve("decisions", "--json", "--last", "1")[1])[0]["gap"] == 0.8
    code, _, err = banaserve("decisions", "--last", "0")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "paused" in banaserve("orchestrator", "pause")[1]
    assert "running" in banaserve("orchestrator", "resume")[1]
    code, out, _ = banaserve("role", "p1", "decode")
    assert (code, out.startswith("p1 is for decode after")) == (0, True)
    code, _, err = banaserve("role", "p0", "decode")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "only one that serves prefill" in err
    server.served.world.instances["d0"].inflight_requests = 2
    code, _, err = banaserve("role", "d0", "prefill", "--timeout", "0.01")
    assert (code, "2 requests are left after 0.01 s" in err) == (2, True)
    server.served.world.instances["d0"].inflight_requests = 0
    monkeypatch.setattr(AdminClient, "drain", lambda _, name: DrainState(name, True, 2))
    released = DrainState("d0", False, 0)  # by somebody else
    monkeypatch.setattr(AdminClient, "show_drain", lambda *_, **__: released)
    code, out, err = banaserve("drain", "d0")
    assert (code, out, "released meanwhile" in err) == (2, "", True)
    code, out, _ = banaserve("scale", "--pd", "2:3")
    assert (code, out.startswith("added p2 after")) == (0, True)
    code, out, _ = banaserve("scale", "--pd", "2:3", "--json")
    assert (code, json.loads(out)["state"]) == (0, "done")
    code, out, _ = banaserve("scale", "--pd", "1:2", "--no-wait")
    assert (code, out) == (0, "s3: draining; `banaserve status` shows how far it is\n")
    code, _, err = banaserve("scale", "--pd", "1,2")
    assert (code, len(err.splitlines()), "such as 1:1" in err) == (2, 1, True)


def test_the_commands_of_nodes(server, capsys):
    def banaserve(*argv: str) -> tuple[int, str, str]:
        code = main(["nodes", *argv, "--url", server.url, "--admin-key", KEY])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = banaserve("list")
    assert (code, out.split()[0], len(out.splitlines())) == (0, "NODE", 3)
    server.served.machines.unusable["z:1"] = "node z:1: it has another cluster key"
    code, out, err = banaserve("add", "z:1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith("node z:1: it has another cluster key")
    code, out, err = banaserve("add", "c:1")
    assert (code, out.startswith("node c:1 has joined after")) == (0, True)
    assert {one["name"] for one in json.loads(banaserve("list", "--json")[1])} == {"a", "b", "c:1"}
    code, out, _ = banaserve("remove", "b", "--json")
    assert (code, json.loads(out)["state"]) == (0, "done")
    code, _, err = banaserve("remove", "b")
    assert (code, len(err.splitlines()), "there is no node b" in err) == (2, 1, True)
    code, _, err = banaserve("remove", "a", "--shrink", "--timeout", "0")
    assert (code, len(err.splitlines()), "--timeout 0: must be" in err) == (2, 1, True)
    code, out, _ = banaserve("remove", "a", "--no-wait")
    assert (code, out) == (0, "n4: leaving; `banaserve status` shows how far it is\n")


def test_a_decision_in_words():
    text = "\n".join(lines_of(DECISION, candidates=False))
    for words in [
        "gap 0.80, balancing; no further step: no candidate is worth it",
        "saw d0 (decode): compute 25%, memory 90%, 4 running, 2 waiting, step 40 ms, 300 blocks",
        "    prefill waits: the store holds 3 of 4 blocks (12 KiB) for hand-overs; "
        "2 prompts wait, the longest for 1.5 s",
        "left out p1: its report is stale",
        "(predicted: 1.50 s for 3.00 s)",
        "predicted d0: compute +0.0%, +150 blocks, step +1.0 ms",
        f"done after 2.50 s, {format_size(5 << 20)}, stall 4.0 ms, +150 blocks",
        "seen d0: compute +10.0%, memory -40.0%, +150 blocks, step +2.0 ms",
        "wants: switch p1",
        "not begun: paused",
        "not taken: 2 because no room",
    ]:
        assert words in text, (words, text)
    assert "not taken: move heads: no room (0.5)" in "\n".join(lines_of(DECISION, candidates=True))


# ---- options of serve


def test_serve_options():
    chosen = parse_serve_argv([]).orchestrator
    assert (chosen.mode, chosen.policy) == ("dry-run", "repaired")
    assert parse_serve_argv(["--colocated", "1", "--no-kv-store"]).orchestrator.mode == "off"
    argv = ["--orchestrator", "on", "--orchestrator-option", "delta-up=0.3"]
    argv += ["--orchestrator-policy", "published", "--decision-log", "x.jsonl"]
    chosen = parse_serve_argv(argv).orchestrator
    assert (chosen.mode, chosen.policy, chosen.options) == ("on", "published", (("delta_up", 0.3),))
    for argv, words in [
        (["--orchestrator", "maybe"], "invalid choice"),
        (["--orchestrator-interval", "0"], "above 0"),
        (["--orchestrator-option", "x"], "KEY=VALUE"),
        (["--colocated", "1", "--no-kv-store", "--orchestrator", "on"], "needs the store"),
    ]:
        with pytest.raises(UserError, match=words):
            parse_serve_argv(argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--orchestrator-policy", "clever"], "unknown migration policy: clever"),
        (["--orchestrator-option", "delta_upp=1"], "did you mean delta_up?"),
        (["--orchestrator-option", "delta_up=9"], "delta_up is 9"),
        (["--orchestrator-concurrent", "0"], "give 1 or more"),
        (["--decision-log", "/proc/no/such.jsonl"], "--decision-log /proc/no/such.jsonl"),
    ],
)
def test_wrong_options_stop_before_anything_is_loaded(capsys, argv, words):
    assert main(["serve", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
