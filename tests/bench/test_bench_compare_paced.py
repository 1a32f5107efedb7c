"""A comparison on paced engines, with simulator, paper and orchestrator beside it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from banaserve_bench.compare import options as compare_options
from banaserve_bench.compare.result import SystemRun, Workload, as_result
from banaserve_bench.compare.simulated import simulated_cells
from banaserve_bench.compare.systems import chosen_systems
from banaserve_bench.datasets.items import Item
from banaserve_bench.report.compare_tables import extra_tables
from banaserve_bench.report.report import facts_of, systems_of
from banaserve_bench.results import result
from banaserve_bench.results.result import ModelledTime
from banaserve_bench.serving.timeline import InstanceTimeline


def test_a_paced_comparison_has_the_simulator_beside_it(tmp_path: Path) -> None:
    given = compare_options.parse(
        [
            *("--pace", "opt-13b-a100", "--dilate", "4", "--instances", "4", "--out", "x"),
            *("--workload", "random@1,8", "--duration", "4", "--seeds", "0"),
            *("--prompt-tokens", "400", "--output-tokens", "20"),
        ],
        None,
    )
    [plan] = compare_options.plans(given).values()
    assert [plan.count(cell) for cell in plan.cells()] == [4, 32]
    workload = Workload("random", cast(Any, _Lengths(400, 20)), plan)
    systems = chosen_systems(["static-pd", "banaserve", "mine=--colocated 4"], 4)
    simulated = simulated_cells(given, systems, workload)
    assert list(simulated) == ["static-pd", "banaserve"]
    slow, fast = simulated["static-pd"]
    assert (slow.load_name, slow.completed, fast.completed) == ("1rps", 4, 32)
    assert fast.metrics["tpot_p50"] >= slow.metrics["tpot_p50"] > 0.02
    run = SystemRun(
        simulated["static-pd"],
        1.0,
        2,
        2,
        9,
        ModelledTime("opt-13b-a100", "a fit", 4.0, 200, 1, 0.0),
    )
    ours = SystemRun(simulated["banaserve"], 1.0, 2, 2, 9, run.modelled, decisions=[_DECISION])
    ran = {"static-pd": run, "banaserve": ours}
    record = as_result(given, systems, workload, ran, simulated, datetime(2026, 1, 1, tzinfo=UTC))
    result.write(record, tmp_path / "x.json")
    assert "banaserve.server_cpu_s" not in record.figures
    assert "static-pd.simulated.ttft_p50_at_8rps" in record.figures
    kept = result.read(tmp_path / "x.json")
    assert any("MODELLED" in fact for fact in facts_of(kept))
    assert any("0.5%, 0.5%" in fact for fact in facts_of(kept))
    more = extra_tables(kept.raw, systems_of(kept), systems_of(kept, "simulated"))
    ratios, errors, steps = (table for _, table in more)
    assert [row[:2] for row in ratios[1:]] == [["static-pd", "1rps"], ["static-pd", "8rps"]]
    assert {row[2] for row in errors[1:]} == {"1.00"}
    assert steps[1] == ["banaserve", "1.5", "p0 to decode", "0.10", "2.00", "0.30", "done"]


def test_time_in_steps_is_that_of_the_modelled_gpu() -> None:
    timeline = InstanceTimeline()
    for at_s, wall_s in ((0.0, 0.0), (1.0, 1.5), (2.0, 4.5)):
        lines = [
            "banaserve_paced_dilation 3",
            f'banaserve_paced_modelled_seconds_total{{instance_id="p0"}} {wall_s}',
            f'banaserve_busy_seconds_total{{instance_id="p0"}} {100 * wall_s}',
            f'banaserve_busy_seconds_total{{instance_id="d0"}} {at_s / 4}',
            'banaserve_busy_seconds_total{instance_id="idle"} 0',
        ]
        timeline.add(at_s, "\n".join(lines) + "\n")
    shares = timeline.utilisation()
    assert shares == {"p0": [(1.0, 0.5), (2.0, 1.0)], "d0": [(1.0, 0.25), (2.0, 0.25)]}


class _Lengths:
    """Requests of one length."""

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self._item = Item([], prompt_tokens, output_tokens, None, "x", False)

    def items(self, count: int, seed: str, place: int) -> list[Item]:
        return [self._item] * count


_DECISION = {
    "at_s": 1.5,
    "steps": [
        {
            "what": "p0 to decode",
            "cost_s": 0.1,
            "benefit_s": 2.0,
            "took_s": 0.3,
            "ending": "done",
            "reason": "",
        }
    ],
}
