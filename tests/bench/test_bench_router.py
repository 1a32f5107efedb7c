"""A file keeps what it has of one part when the other is measured again."""

from __future__ import annotations

from datetime import UTC, datetime

from banaserve_bench.results import result
from banaserve_bench.results.result import figure
from benchmarks.router.command import joined

AT = datetime(2026, 1, 1, tzinfo=UTC)


def record(note: str, **figures: float) -> result.Result:
    made = {name: figure([value], "unit") for name, value in figures.items()}
    return result.result(
        "router",
        seed=0,
        options={"only": note},
        started_at=AT,
        figures=made,
        notes=[note],
        raw={note: 1},
    )


def test_one_part_measured_again_leaves_the_other() -> None:
    proxy = record("of proxy", cpu_per_request_ratio=1.5, direct_p99_ms=3)
    first = joined(proxy, record("of decisions", decisions_per_s=1, tree_memory_fraction=0.5))
    both = joined(first, record("of decisions anew", decisions_per_s=2, tree_insertions_per_s=9))
    values = {name: one.median for name, one in both.figures.items()}
    assert values == {
        "decisions_per_s": 2,
        "tree_insertions_per_s": 9,
        "cpu_per_request_ratio": 1.5,
        "direct_p99_ms": 3,
    }
    assert both.notes == ["of decisions anew", "of proxy"]
    assert both.raw["parts"]["proxy"]["options"] == {"only": "of proxy"}
    assert both.raw["parts"]["decisions"]["notes"] == ["of decisions anew"]
    again = joined(both, record("of proxy anew", cpu_per_request_ratio=1))
    assert again.figures["decisions_per_s"].median == 2
    assert "direct_p99_ms" not in again.figures
    assert again.notes == ["of proxy anew", "of decisions anew"]
