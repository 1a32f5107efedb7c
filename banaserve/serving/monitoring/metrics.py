"""Prometheus metrics of banaserve in addition to vLLM's: requests, store, migration, nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

REQUESTS = Counter("banaserve_requests", "Requests by the way they took and why", ["way", "reason"])
FIRST_TOKENS = Counter(
    "banaserve_first_tokens", "First tokens by the leg that sampled them", ["leg"]
)
RETRIES = Counter(
    "banaserve_leg_retries", "Legs tried again on another instance after a failure", ["leg"]
)
RESUMED = Counter(
    "banaserve_streams_resumed", "Streams that went on elsewhere with the output that they had"
)
MOVED = Counter(
    "banaserve_streams_moved", "Streams that went on elsewhere because their instance was drained"
)
REBALANCED = Counter(
    "banaserve_streams_rebalanced",
    "Streams that went on elsewhere because another instance had fewer requests",
)
BROKEN = Counter(
    "banaserve_streams_broken",
    "Streams that ended in an error after their instance died: prompts that arrive in pieces",
)
GIVEN_UP = Counter(
    "banaserve_requests_given_up", "Requests that instances died under, one after the other"
)
DEADLINES = Counter("banaserve_deadlines_exceeded", "Requests that ran out of their time budget")
IN_FLIGHT = Gauge(
    "banaserve_requests_in_flight", "Legs that an instance holds now", ["instance_id"]
)
UP = Gauge("banaserve_instance_ready", "1 while the instance serves", ["instance_id", "role"])
ROLLING_RESTARTS = Counter(
    "banaserve_rolling_restarts", "Rolling restarts by how they ended", ["outcome"]
)
RESTARTS = Counter("banaserve_instance_restarts", "Restarts after a death", ["instance_id"])
PARENT_RESTARTS = Counter(
    "banaserve_engine_parent_restarts", "Engine parents started in place of a lost one"
)
NODE_ROUND_TRIP = Gauge(
    "banaserve_node_round_trip_seconds",
    "Round trip of a small message between two nodes, as last measured",
    ["source", "target"],
)
NODE_BYTES = Gauge(
    "banaserve_node_bytes_per_second",
    "Bytes a second from one node to another in one TCP connection, as last measured",
    ["source", "target"],
)
WAITING_FOR_ROOM = Gauge(
    "banaserve_prompts_waiting_for_room",
    "Prompts that wait to be computed until decode has read what the store holds",
    ["instance_id"],
)
STEP_ERROR = Gauge(
    "banaserve_prediction_error_fraction",
    "Smoothed relative error of predictions made before their measurement: of an instance's steps "
    "(step), or of migrations (migration)",
    ["model", "instance_id"],
)
PREDICTED = Histogram(
    "banaserve_routing_prediction_ratio",
    "Predicted over measured time to first token (ttft) and time per output token (tpot) of "
    "requests whose routing policy predicts them (slo_aware), by their legs; 1 is right",
    ["time", "legs"],
    buckets=(0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
# Names and buckets follow OpenTelemetry's conventions for servers of generative AI:
# gen_ai.server.time_to_first_token and gen_ai.server.request.duration.
TTFT_S = Histogram(
    "banaserve_time_to_first_token_seconds",
    "From a request's arrival to its first token, streamed or not, over all of its legs",
    buckets=[
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0, 160.0),
    ],
)
LATENCY_S = Histogram(
    "banaserve_request_duration_seconds",
    "From a request's arrival to its end, over all of its legs, by how it ended: stop, length, "
    "other for vLLM's other reasons, closed by its client, or error",
    ["end"],
    buckets=[0.01 * 2**i for i in range(16)],
)
TRACE_SPANS = Counter(
    "banaserve_trace_spans",
    "OpenTelemetry spans by what came of them: sent, failed (the collector refused them or did not "
    "answer), dropped (no room while it was slow)",
    ["outcome"],
)
STORE_RESTARTS = Counter("banaserve_store_restarts", "Restarts of the store daemon")

_TRANSFERS = {
    name: Counter(f"banaserve_{name}", help_text, ["instance_id"])
    for name, help_text in {
        "scheduled_requests": "Requests that an instance has begun to compute",
        "prompt_tokens_computed": "Prompt tokens that an instance computed",
        "prompt_tokens_cached": "Prompt tokens that an instance had cached or fetched",
        "waited_for_room": "Prefill legs that waited: decode had not read what the store held",
        "room_wait_seconds": "Seconds that prefill legs waited for decode to read",
        "waited_for_prefix": "Legs that waited for a prefix that another leg was computing",
        "prefix_wait_seconds": "Seconds that legs waited for a prefix of another leg",
        "loaded_blocks": "KV blocks fetched from the store",
        "loaded_bytes": "Bytes fetched from the store",
        "saved_blocks": "KV blocks committed to the store",
        "saved_bytes": "Bytes saved to the store",
        "guest_saved_bytes": "Bytes that guests saved to the store themselves",
        "lost_blocks": "KV blocks leased and gone before they were fetched",
        "load_seconds": "Seconds spent fetching, in the background",
        "save_seconds": "Seconds spent saving, in the background",
        "load_wait_seconds": "Seconds the forward pass waited for a fetch",
        "save_wait_seconds": "Seconds the end of a step waited for saves and their commit",
        "busy_seconds": "Seconds spent in engine steps",
        "steps": "Engine steps that computed something",
        "promoted_blocks": "KV blocks read from a tier into the pool for a request",
        "promotion_wait_seconds": "Seconds that requests waited for blocks of a tier",
        "promotion_predicted_seconds": "Seconds that the store predicted for these waits",
        "tier_declined_blocks": "KV blocks left in a tier because computing them was cheaper",
        "declined_blocks": "KV blocks left in the pool because computing them was cheaper",
        "predicted_fetch_seconds": "Predicted seconds of fetches from the pool",
        "measured_fetch_seconds": "Seconds of the fetches that were predicted",
        "predicted_compute_seconds": "Predicted seconds of prefill steps without waiting",
        "measured_compute_seconds": "Seconds of the prefill steps that were predicted",
        "avoided_compute_seconds": "Predicted seconds of computing what was fetched instead",
    }.items()
}
_BY_KIND = {
    "decided": Counter(
        "banaserve_fetch_decisions",
        "Requests with a prefix in the pool: fetch (all of it is cheaper), cut (its first blocks, "
        "while the others are computed), compute (none, which is cheaper), unmeasured "
        "(fetched), probe (fetched to measure again)",
        ["instance_id", "kind"],
    ),
    "promotion": Counter(
        "banaserve_promotions",
        "Requests that waited for a tier: arrived, failed (computed from there on), late (given "
        "up), abandoned (the request ended or was passed over)",
        ["instance_id", "kind"],
    ),
}


def count_transfers(instance_id: str, amounts: Mapping[str, float]) -> None:
    """Add the counts of an instance's connector since its last report."""
    for name, amount in amounts.items():
        if (counter := _counter(instance_id, name)) is not None:
            counter.inc(amount)


@cache
def _counter(instance_id: str, name: str) -> Counter | None:
    """Return the counter reported as ``name``, or None; cached, since each step needs it."""
    family, _, kind = name.partition("_")
    if (counter := _TRANSFERS.get(name)) is not None:
        return counter.labels(instance_id)
    if (counter := _BY_KIND.get(family)) is not None:
        return counter.labels(instance_id, kind)
    return None


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
GUESTS = Gauge("banaserve_guests", "Guests beside an instance", ["instance_id"])
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


def forget(instance_id: str) -> None:
    """Drop the series of an instance that no longer exists."""
    _counter.cache_clear()
    for metric in (*globals().values(), *_TRANSFERS.values(), *_BY_KIND.values()):
        if isinstance(metric, MetricWrapperBase):
            with contextlib.suppress(ValueError):  # a metric without an instance's label
                metric.remove_by_labels({"instance_id": instance_id})
