"""Counters of a balancer as Prometheus would read them."""

from __future__ import annotations

from banaserve_route.balancer.balancer import Balancer


def counted(balancer: Balancer, name: str, **labels: str) -> float:
    """Value of ``banaserve_route_NAME`` with these labels; 0 where nothing has been counted."""
    for family in balancer.metrics.collect():
        for sample in family.samples:
            if sample.name == f"banaserve_route_{name}_total" and sample.labels == labels:
                return sample.value
    return 0.0
