"""Prometheus metrics of live migration."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

MIGRATIONS = Counter(
    "banaserve_migrations", "Migrations by kind and how they ended", ["kind", "outcome"]
)
BYTES = Counter(
    "banaserve_migration_bytes",
    "Bytes copied while the engine served (precopy) and between two steps (commit), of committed "
    "moves; weights loaded from a checkpoint (weights)",
    ["kind", "stage"],
)
PHASE_S = Histogram(
    "banaserve_migration_phase_seconds",
    "Time of each phase of a move",
    ["phase"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
)
STALL_S = Histogram(
    "banaserve_migration_stall_seconds",
    "How long a commit kept the engine from stepping",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
)
STEPS_LOST = Counter(
    "banaserve_migration_lost_steps",
    "Steps thrown away because a guest was lost",
    ["instance_id"],
)
GUESTS_LOST = Counter(
    "banaserve_guests_lost", "Guests that died or stalled while they served", ["instance_id"]
)
GUESTS = Gauge("banaserve_guests", "Guests' processes beside an instance", ["instance_id"])
GUEST_BYTES = Gauge("banaserve_guest_bytes", "Memory of guests beside an instance", ["instance_id"])
GUEST_BUSY = Gauge(
    "banaserve_guest_busy_fraction", "CPU time of guests beside an instance", ["instance_id"]
)
GUEST_SHARE = Gauge(
    "banaserve_guest_share_fraction",
    "Of an instance's device, that guests beside it may take",
    ["instance_id"],
)
SLOW_DOWN = Gauge(
    "banaserve_guest_slow_down",
    "How many times as long an instance computes beside guests: predicted from the time that they "
    "take, measured as the kernel counts what its threads wait for processors",
    ["instance_id", "kind"],
)
UNITS_AWAY = Gauge(
    "banaserve_units_away", "Units of an instance that run elsewhere", ["instance_id"]
)
EPOCH = Gauge("banaserve_placement_epoch", "Grows with each change of placement", ["instance_id"])
