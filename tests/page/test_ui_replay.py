"""Decision logs as moments of the page, and logs that are none."""

from __future__ import annotations

import json

import msgspec
import pytest

import made_log
from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.contracts.control_api import DECISION_LOG_VERSION
from banaserve.frontdoor.page.replay import Replay, read_decisions
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog

BEGAN_S = made_log.BEGAN_S


def replay_of(num_instances: int, count: int = 12) -> Replay:
    made = made_log.decisions(num_instances, count)
    return Replay(read_decisions(made_log.lines(made), "log"))


@pytest.mark.parametrize(("num_instances", "num_frames"), [(1, 12), (2, 16), (64, 16)])
def test_a_log_has_a_moment_for_each_decision_and_each_end(num_instances, num_frames):
    replay = replay_of(num_instances)
    assert replay.num_frames == num_frames
    index = replay.index()
    assert index.at_s == sorted(index.at_s)
    assert {len(one) for one in index.series.values()} == {num_frames}
    for frame in range(num_frames):
        moment = replay.moment(frame)
        assert moment.snapshot.at_s == index.at_s[frame]
        assert len(moment.snapshot.instances) == num_instances
        assert moment.snapshot.figures.num_running == index.series["num_running"][frame]
    for wrong in (-1, num_frames):
        with pytest.raises(IndexError):
            replay.moment(wrong)


def test_a_moment_knows_nothing_of_later_ones():
    replay = replay_of(2)
    began, ended = replay.moment(0), replay.moment(1)
    assert [(one.state, one.source, one.target) for one in began.snapshot.moves] == [
        ("running", "d0", "p0")
    ]
    assert began.decisions[0].steps[0].result is None
    assert [one.state for one in ended.snapshot.moves] == ["done"]
    result = ended.decisions[0].steps[0].result
    assert result is not None
    assert (result.ending, result.changed) == ("done", {})
    late = replay.moment(replay.num_frames - 1)
    assert late.decisions[0].steps[0].result.changed["d0"].kv_blocks == 118  # type: ignore[union-attr]
    assert [len(one.away) for one in late.snapshot.instances] == [0, 4]
    away = late.snapshot.instances[1].away[0]
    assert (away.kind, away.words, away.at) == ("layers", "layers 0:4", "p0")
    assert late.snapshot.instances[0].status.guests[0] == "layers 0:4 of d0"


def test_a_log_of_two_servers_is_one_after_the_other():
    first = made_log.decisions(2, 3)
    second = [
        msgspec.structs.replace(one, at_s=one.at_s + 100, steps=[])
        for one in made_log.decisions(2, 2)
    ]
    found = read_decisions([*made_log.lines(first), *made_log.lines(second)], "log")
    assert [one.number for one in found] == [1, 2, 3, 4, 5]
    assert [one.at_s - BEGAN_S for one in found] == [2, 4, 6, 102, 104]


LINE = msgspec.json.encode(made_log.decisions(1, 1)[0])


def changed(**given: object) -> bytes:
    return json.dumps({**json.loads(LINE), **given}).encode()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no decisions"),
        ([b"", b"  "], "holds no decisions"),
        ([LINE, b"{"], "line 2: not a decision"),
        ([b"[1]"], "line 1: not a decision"),
        ([b"\xff"], "line 1: not a decision"),
        ([b'{"number": 1}'], "a log without a version"),
        ([changed(version=DECISION_LOG_VERSION + 1)], f"version {DECISION_LOG_VERSION + 1}, while"),
        ([changed(version="1")], "line 1: not a decision"),
        ([changed(steps=3)], "line 1: not a decision"),
        ([changed(num_layers=10**9)], "more than a page can draw"),
        ([changed(num_layers=-1)], "more than a page can draw"),
    ],
)
def test_what_is_no_log_is_said_in_one_line(lines, said):
    with pytest.raises(UserError) as refused:
        read_decisions(lines, "log.jsonl")
    assert said in str(refused.value)
    assert "log.jsonl" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    path = tmp_path / "decisions.jsonl"
    assert main(["ui", "--replay", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_bytes(LINE + b"\n")
    assert main(["ui", "--replay", str(path), "--port", "70000"]) == 2
    assert "--port 70000" in capsys.readouterr().err


def test_what_the_loop_writes_is_what_is_read(tmp_path):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    for one in made_log.decisions(2, 3):
        log.add(one)
    found = read_decisions(path.read_bytes().splitlines(), str(path))
    assert found == made_log.decisions(2, 3)


def test_a_simulation_can_be_replayed(tmp_path):
    path = tmp_path / "decisions.jsonl"
    asked = ["simulate", "decode-flood", "--system", "banaserve", "--decision-log", str(path)]
    assert main([*asked, "--json"]) == 0
    replay = Replay(read_decisions(path.read_bytes().splitlines(), str(path)))
    assert "simulated" in replay.time
    switched = [one.what for one in replay.index().marks]
    assert any(one.startswith("done: switch ") for one in switched)
    moment = replay.moment(replay.num_frames - 1)
    assert moment.snapshot.num_layers == 40
    roles = {one.status.role for one in moment.snapshot.instances}
    assert roles == {"prefill", "decode"}


def test_a_log_of_a_simulation_is_of_one_system(tmp_path, capsys):
    path = tmp_path / "decisions.jsonl"
    asked = ["simulate", "decode-flood", "--system", "static", "--decision-log", str(path)]
    assert main(asked) == 2
    assert "--system" in capsys.readouterr().err
    assert not path.exists()
