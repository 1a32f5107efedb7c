"""Prometheus metrics of the controller."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

DECISIONS = Counter(
    "banaserve_orchestrator_decisions",
    "Turns of the control loop: steps (some began), held (wanted, not begun), none",
    ["outcome"],
)
REJECTED = Counter(
    "banaserve_orchestrator_rejected", "Candidates that were not taken, by reason", ["reason"]
)
HELD = Counter(
    "banaserve_orchestrator_held", "Steps that were wanted and did not begin, by reason", ["reason"]
)
STEPS = Counter(
    "banaserve_orchestrator_steps", "Steps by kind and how they ended", ["kind", "ending"]
)
UNDER_WAY = Gauge("banaserve_orchestrator_steps_under_way", "Steps that have begun and not ended")
GAP = Gauge(
    "banaserve_orchestrator_gap", "Difference between the fullest and the emptiest instance"
)
LEFT_OUT = Gauge(
    "banaserve_orchestrator_left_out",
    "1 while no decision counts on the instance",
    ["instance_id"],
)
DECISION_S = Histogram(
    "banaserve_orchestrator_decision_seconds",
    "Time of one decision",
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
)
COST_ERROR = Gauge(
    "banaserve_orchestrator_cost_error_fraction",
    "Of the last step that was done: |predicted - real| / real of its time",
    ["kind"],
)
RESTARTS = Counter("banaserve_orchestrator_restarts", "Failures that the loop was restarted after")
RUNNING = Gauge(
    "banaserve_orchestrator_running", "1 while the loop runs and is not paused", ["mode"]
)
