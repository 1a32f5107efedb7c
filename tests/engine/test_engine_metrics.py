"""What an instance counts reaches its Prometheus series."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

pytest.importorskip("vllm")

from banaserve.serving.monitoring import metrics


@pytest.mark.parametrize(
    ("counted", "series", "labels"),
    [
        ("loaded_blocks", "banaserve_loaded_blocks_total", {}),
        ("predicted_fetch_seconds", "banaserve_predicted_fetch_seconds_total", {}),
        ("measured_compute_seconds", "banaserve_measured_compute_seconds_total", {}),
        ("promotion_wait_seconds", "banaserve_promotion_wait_seconds_total", {}),
        ("promotion_late", "banaserve_promotions_total", {"kind": "late"}),
        ("decided_cut", "banaserve_fetch_decisions_total", {"kind": "cut"}),
        ("declined_blocks", "banaserve_declined_blocks_total", {}),
        ("decided_compute", "banaserve_fetch_decisions_total", {"kind": "compute"}),
    ],
)
def test_counts_add_up(counted: str, series: str, labels: dict[str, str]) -> None:
    instance = f"test-{counted}"
    metrics.count_transfers(instance, {counted: 2.0})
    metrics.count_transfers(instance, {counted: 0.5})
    assert REGISTRY.get_sample_value(series, {"instance_id": instance, **labels}) == 2.5


def test_what_nobody_knows_is_left_out() -> None:
    metrics.count_transfers("test-unknown", {"frobnicated": 1.0})
    assert REGISTRY.get_sample_value("banaserve_frobnicated_total", {}) is None
