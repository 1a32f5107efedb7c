"""The decisions part of the router benchmark measures what it says."""

from __future__ import annotations

from benchmarks.router import decisions


def test_every_policy_is_measured_and_the_headline_is_one_of_the_cases():
    figures = decisions.decisions(
        ("round_robin", "skywalker", "preble"), (8, 64), (1000, 8000), 1, 0, seconds=0.01
    )
    assert len(figures) == 1 + 3 * 2 * 2
    assert figures["decisions_per_s"] == figures["decisions_per_s_skywalker_64_8k"]
    assert all(min(samples) > 0 for samples, _ in figures.values())


def test_the_tree_is_at_its_bound_and_its_course_is_told(monkeypatch):
    monkeypatch.setattr(decisions, "_MEMORY_TREE_BYTES", 1 << 20)
    figures, raw = decisions.tree_memory(20_000, 0)
    course = raw["tree_memory"]
    assert [one["insertions"] for one in course] == [2000 * number for number in range(1, 11)]
    assert all((1 << 20) * 0.99 < one["charged_bytes"] <= 1 << 20 for one in course)
    assert figures["tree_insertions_per_s"][0][0] > 0
