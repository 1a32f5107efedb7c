"""The replay of real loads in small: a made-up trace and agents of the manifest's form."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import zstandard

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from benchmarks.routers import cells, command
from benchmarks.routers.cells import SYSTEMS, RouterCell
from benchmarks.routers.loads import LOADS, closed_loop, trees, unlimited

LOGNORMAL = {"mu": 5.0, "sigma": 0.5, "max": 2000}
MANIFEST = {
    "new_tokens_per_turn": LOGNORMAL,
    "generation_length": LOGNORMAL,
    "inter_turn_delay": {
        "agentic_fraction": 0.7,
        "agentic_delay": LOGNORMAL,
        "human_delay": LOGNORMAL,
    },
    "reset": {"base_probability": 0.05, "context_scaling": 1.5},
    "max_prompt_tokens": 20_000,
    "cache": {
        "layer1_tokens": 3200,
        "layer1_5_tokens": 1600,
        "layer2": LOGNORMAL,
        "layer1_5_groups": {"num_groups": 4, "zipf_alpha": 0.6},
    },
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = Random(3)
    rows = []
    for number in range(60):
        shared = number % 6
        ids = [shared, 100 + shared, 1000 + number]
        row = {"timestamp": 40 * number, "input_length": 1500, "output_length": 100}
        rows.append(json.dumps(row | {"hash_ids": ids, "noise": rng.random()}))
    for folder in ("traces", "agent"):
        (tmp_path / folder).mkdir()
    trace = zstandard.compress("\n".join(rows).encode())
    (tmp_path / "traces/mooncake_conversation.jsonl.zst").write_bytes(trace)
    manifest = json.dumps({"generation_params": MANIFEST})
    (tmp_path / "agent/coding_sessions_manifest.json").write_text(manifest)
    return tmp_path


def test_sessions_share_what_the_manifest_says_and_pause_between_turns(data: Path) -> None:
    sessions = list(LOADS["agents"](data, Random(1), 100))
    assert sum(len(list(session.calls())) for session in sessions) >= 100
    assert len({next(session.calls()).prompt[:1600] for session in sessions}) == 1
    assert all(isinstance(pause, float) and pause <= 10 for pause in sessions[0].steps[1::2])
    work_s, hits = unlimited(sessions, cells.SPEC)
    assert work_s > 0
    assert 0.5 < hits < 1


def test_a_client_climbs_one_tree_after_another_level_by_level(tmp_path: Path) -> None:
    rows = [{"question": "how many? " * number, "answer": "so many"} for number in (30, 60)]
    (tmp_path / "gsm8k").mkdir()
    packed = zstandard.compress("\n".join(map(json.dumps, rows)).encode())
    (tmp_path / "gsm8k/train.jsonl.zst").write_bytes(packed)
    for branches in (2, 4):
        program = closed_loop(trees(branches), tmp_path)(Random(1), "ann")
        steps = [step for step, _ in zip(program, range(5), strict=False)]
        assert [len(step) for step in steps] == [*(branches**k for k in range(1, 5)), branches]
        sessions = [{call.session for call in step} for step in steps]
        assert sessions == [{"ann/0"}] * 4 + [{"ann/1"}]
        above = {call.prompt + call.output for call in steps[0]}
        assert all(any(call.prompt.startswith(one) for one in above) for call in steps[1])


def test_every_system_answers_every_request_of_a_cell(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "CALLS", 40)
    done = {}
    for cell in (
        RouterCell("agents", "below", "one region", False),
        RouterCell("Mooncake", "above", "three regions", True),
    ):
        done[cell.name] = found = command.run(cell, data, 2)
        assert found["systems"].keys() == cell.systems.keys() >= SYSTEMS.keys()
        for row in found["systems"].values():
            figures = dict(zip(command.COLUMNS, row, strict=True))
            assert figures["num_open"] == 0
            assert 0 < figures["ttft_s"] < figures["latency_s"]
            assert figures["ttft_p90_s"] <= figures["ttft_p99_s"]
            assert figures["hits"] <= found["bound"] + 0.2
            assert figures["imbalance"] >= 1
    assert min(min(command.regrets(done, name, "latency_s")) for name in SYSTEMS) == 0
    assert command.figures(done)["route_regret_max"][0][0] < 0.5
    assert all(f"| {name} |" in command.table(done) for name in done)


def test_a_file_is_continued_with_the_same_seeds_only(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "CALLS", 20)
    file = tmp_path / "routers.json"
    argv = ["--data", str(data), "--seeds", "1", "--cells", "1", "--json", str(file)]
    for number in (1, 2):
        assert command.main(argv) == 0
        assert len(result.read(file).raw["outcomes"]) == number
    argv[3] = "2"
    with pytest.raises(UserError, match="no result of bench routers with seeds 2"):
        command.main(argv)
