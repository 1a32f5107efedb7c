"""Snapshot of a server for its page: moves, modules, store, latencies and rates. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from banaserve.base.types import ObservedRequest
from banaserve.contracts.control_api import DecisionRecord, InstanceStatus, MoveLine, ServerStatus
from banaserve.contracts.migration_api import (
    ExpertsModules,
    HeadsModules,
    Migration,
    UnitModules,
)
from banaserve.contracts.trace_events import RequestSummary
from banaserve.frontdoor.page import records
from banaserve.kvstore.stats import StoreStats

_ENDED_SHOWN = 8
_COPIED = ("precopy_bytes", "commit_bytes", "weight_bytes")

Mark = tuple[object, ...]


def snapshot_of(
    status: ServerStatus,
    shape: tuple[int, int],
    away: Mapping[str, list[records.ModulesAway]],
    migrations: Sequence[Migration],
    moving: Mapping[str, Sequence[UnitModules]],
    observed: Iterable[ObservedRequest],
    now_s: float,
    store: StoreStats | None,
    requests: list[RequestSummary],
    cpu_fraction: float | None = None,
) -> records.PageSnapshot:
    """Return everything that the page shows of one moment, except decisions.

    Args:
        shape: Numbers of layers and KV heads of the model.
        away: Modules that are away, by their host.
        moving: Modules of migrations under way, by the migration's id.
        observed: Requests for ``figures_of``; ``now_s`` is on their clock.
        requests: Last requests, to be listed.
    """
    by_id = {migration.id for migration in migrations}
    moves = [migration_progress(one, moving.get(one.id, ())) for one in migrations]
    moves += [_line_progress(line) for line in status.moves if line.id not in by_id]
    return records.PageSnapshot(
        at_s=status.at_s,
        num_layers=shape[0],
        num_kv_heads=shape[1],
        controller=status.controller,
        instances=[records.InstancePanel(one, away.get(one.id, [])) for one in status.instances],
        moves=_shown(moves),
        figures=figures_of(status.instances, observed, now_s, cpu_fraction),
        store=store_panel(store) if store is not None else None,
        requests=requests,
        routing=status.routing_policy,
    )


def _shown(moves: Sequence[records.MoveProgress]) -> list[records.MoveProgress]:
    """Return all moves under way, and the last ended moves."""
    ended = [one for one in moves if not is_open(one.state)]
    return [one for one in moves if is_open(one.state)] + ended[-_ENDED_SHOWN:]


def is_open(state: str) -> bool:
    """Return whether a move of this state is under way."""
    return state in ("waiting", "running", "draining", "starting", "going back")


def migration_progress(migration: Migration, moving: Sequence[UnitModules]) -> records.MoveProgress:
    """Return the progress of a migration, over all of its moves."""
    now = next((one for one in migration.moves if one.phase not in ("waiting", "done")), None)
    if now is None:
        now = migration.moves[-1] if migration.moves else None
    return records.MoveProgress(
        id=migration.id,
        kind=migration.kind,
        state=migration.state,
        what="; ".join(one.modules for one in migration.moves),
        source=migration.host,
        target=migration.to or "",
        phase=now.phase if now is not None else "",
        seconds=sum(sum(one.seconds.values()) for one in migration.moves),
        num_bytes=int(sum(one.facts.get(name, 0) for one in migration.moves for name in _COPIED)),
        total_bytes=_total_bytes(migration),
        predicted_bytes=migration.predicted_bytes,
        stall_s=sum(one.facts.get("stall_s", 0.0) for one in migration.moves),
        error=migration.error,
        spans=[span for modules in moving for span in spans_of(modules)],
    )


def _total_bytes(migration: Migration) -> int:
    """Return the bytes to copy; 0 until every move of the migration has begun to copy."""
    facts = [one.facts for one in migration.moves]
    if not all("planned_bytes" in one for one in facts):
        return 0
    return int(sum(one["planned_bytes"] + one.get("weight_bytes", 0) for one in facts))


def _line_progress(line: MoveLine) -> records.MoveProgress:
    return records.MoveProgress(
        line.id, "other", line.state, line.what, seconds=line.seconds, error=line.error
    )


def modules_away(modules: UnitModules, at: str, words: str) -> records.ModulesAway:
    """Return the record of a unit that is away."""
    return records.ModulesAway(str(modules.__struct_config__.tag), at, words, spans_of(modules))


def spans_of(modules: UnitModules) -> list[records.ShownLayers]:
    """Return the layers of a unit; adjacent layers with the same heads are one span."""
    if isinstance(modules, ExpertsModules):
        return [records.ShownLayers(layer, layer + 1) for layer, _ in sorted(modules.experts)]
    if not isinstance(modules, HeadsModules):
        return [records.ShownLayers(modules.start, modules.end)]
    spans: list[records.ShownLayers] = []
    for layer, heads in sorted(modules.heads):
        if spans and spans[-1].end_layer == layer and spans[-1].heads == list(heads):
            spans[-1] = records.ShownLayers(spans[-1].first_layer, layer + 1, list(heads))
        else:
            spans.append(records.ShownLayers(layer, layer + 1, list(heads)))
    return spans


def store_panel(stats: StoreStats) -> records.StorePanel:
    """Return the store's state for the page."""
    memory = records.StoreLevel(
        "memory",
        stats.used_bytes,
        stats.capacity_bytes,
        stats.used_slots,
        stats.hits,
        stats.evictions,
    )
    tiers = [
        records.StoreLevel(
            tier.stats.name,
            tier.stats.used_bytes,
            tier.stats.capacity_bytes,
            tier.stats.num_blocks,
            tier.promoted,
            tier.stats.evictions,
            "" if tier.stats.available else tier.stats.problem or "it does not answer",
        )
        for tier in stats.tiers
    ]
    return records.StorePanel(
        stats.found_blocks,
        stats.asked_blocks - stats.found_blocks,
        stats.num_leases,
        stats.lent_bytes,
        [memory, *tiers],
    )


def mark_of(decision: DecisionRecord) -> Mark:
    """Return a mark of a decision's turns and results: it is sent again when the mark changes."""
    results = tuple(
        (step.held, step.result is not None, bool(step.result and step.result.changed))
        for step in decision.steps
    )
    return (decision.at_s, decision.turns, results)


WINDOW_S = 30.0
"""Window of the figures, in seconds: long enough for a p99 that does not jump with each request."""


def figures_of(
    instances: Sequence[InstanceStatus],
    requests: Iterable[ObservedRequest],
    now_s: float,
    cpu_fraction: float | None = None,
) -> records.Figures:
    """Return the figures of one moment.

    Args:
        requests: Requests under way, and requests that have ended within ``WINDOW_S``.
        now_s: Time on the clock of ``requests``, in seconds.
    """
    known = list(requests)
    since_s = now_s - WINDOW_S
    ttft_s = [
        one.first_s - one.arrival_s
        for one in known
        if one.first_s is not None and one.first_s >= since_s
    ]
    tpot_s = [value for one in known if (value := _tpot_s(one, since_s, now_s)) is not None]
    memory = [one.memory for one in instances if one.memory is not None]
    compute = [one.compute for one in instances if one.compute is not None]
    gpus = [one.gpu_busy_fraction for one in instances if one.gpu_busy_fraction is not None]
    return records.Figures(
        num_running=sum(one.num_running for one in instances),
        num_waiting=sum(one.num_waiting for one in instances),
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        tpot_p50_s=quantile(tpot_s, 0.5),
        tpot_p99_s=quantile(tpot_s, 0.99),
        tokens_per_s=sum(_tokens_within(one, since_s, now_s) for one in known) / WINDOW_S,
        requests_per_s=sum(one.arrival_s >= since_s for one in known) / WINDOW_S,
        kv_mean_fraction=_mean(memory),
        kv_max_fraction=max(memory, default=None),
        compute_mean_fraction=_mean(compute),
        gpu_fraction=_mean(gpus),
        cpu_fraction=cpu_fraction,
    )


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Return the smallest value that ``fraction`` of the values do not exceed; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tpot_s(one: ObservedRequest, since_s: float, now_s: float) -> float | None:
    """Return the time per token after the first; None if there is none, or no recent one."""
    if one.first_s is None or one.output_tokens < 2:
        return None
    until_s = now_s if one.end_s is None else one.end_s
    if until_s < since_s:
        return None
    return (until_s - one.first_s) / (one.output_tokens - 1)


def _tokens_within(one: ObservedRequest, since_s: float, now_s: float) -> float:
    """Return the output tokens since ``since_s``, assuming an even rate after the first token."""
    if one.first_s is None or not one.output_tokens:
        return 0.0
    until_s = now_s if one.end_s is None else one.end_s
    first = float(one.first_s >= since_s)
    if until_s <= one.first_s:
        return first * one.output_tokens
    lately_s = max(0.0, until_s - max(since_s, one.first_s))
    return first + (one.output_tokens - 1) * lately_s / (until_s - one.first_s)
