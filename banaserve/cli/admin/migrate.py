"""``banaserve migrate``: move layers, heads, experts and older blocks between instances."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from banaserve.base.arguments import option
from banaserve.base.errors import UserError
from banaserve.cli.admin.operations import begin, follow
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.admin.placement import overlap_words, sharing_line
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_json
from banaserve.contracts import migration_api
from banaserve.kvstore.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class SourceOptions(JsonOptions):
    """Options of a move: whose modules move."""

    source: str = option("instance to which the modules belong", name="--from", metavar="INSTANCE")


@dataclass(frozen=True, kw_only=True)
class TargetOptions(SourceOptions):
    """Options of a move to another instance."""

    target: str = option("instance beside which they will run", name="--to", metavar="INSTANCE")


@dataclass(frozen=True, kw_only=True)
class SpanOptions(TargetOptions):
    """Options of a move of whole layers, or of their context."""

    span: str = option("range START:END, without END", name="--layers")


@dataclass(frozen=True, kw_only=True)
class LayerOptions(TargetOptions):
    """Options of a move of parts of layers."""

    layer: str = option("layers, such as 5, 5,6 or 5:8")


def layers(asked: SpanOptions) -> int:
    """Move a range of layers: weights and KV cache."""
    return _migrate(asked, migration_api.MoveLayers(asked.source, asked.target, _span(asked.span)))


def heads(asked: LayerOptions, heads: str = option("KV heads of each layer, such as 1,2")) -> int:
    """Move KV heads of some layers, with their query heads: KV cache only."""
    chosen = _of_layers(asked.layer, heads, "--heads")
    return _migrate(asked, migration_api.MoveHeads(asked.source, asked.target, chosen))


def context(asked: SpanOptions) -> int:
    """Move the currently full KV blocks of some layers; newer blocks stay."""
    return _migrate(asked, migration_api.MoveContext(asked.source, asked.target, _span(asked.span)))


def experts(
    asked: LayerOptions,
    experts: str | None = option("experts of each layer, such as 1,2; or give --load", None),
    load: float | None = option(
        "instead of --experts: those that do this share of each layer's work", None, float
    ),
    watch_s: float = option("with --load: time for which the routers' choices are counted", 10.0),
) -> int:
    """Move routed experts of some layers: weights only, the router stays."""
    if experts is not None and load is None:
        wanted = _of_layers(asked.layer, experts, "--experts")
    elif load is not None and experts is None:
        wanted = _experts_for(asked, load, watch_s)
    else:
        raise UserError("give either --experts, or --load for those that the routers choose most")
    return _migrate(asked, migration_api.MoveExperts(asked.source, asked.target, wanted))


def _experts_for(asked: LayerOptions, load: float, watch_s: float) -> dict[int, tuple[int, ...]]:
    """Watch an instance's routers, and choose the experts that do ``load`` of each layer's work."""
    client, source, layers = asked.client(), asked.source, _layers(asked.layer)
    if not 0 < load < 1:
        raise UserError(f"--load {load:g}: give a share between 0 and 1, such as 0.5")
    if watch_s <= 0:
        raise UserError(f"--watch {watch_s:g}: give seconds")
    client.expert_load(migration_api.ExpertLoadRequest(source))
    try:
        if not asked.as_json:
            words = f"watching the routers of {source} for {watch_s:g} s"
            print(words, file=sys.stderr, flush=True)
        time.sleep(watch_s)
    finally:
        counted = client.expert_load(migration_api.ExpertLoadRequest(source, counting=False)).chosen
    found: dict[int, tuple[int, ...]] = {}
    for layer in layers:
        chosen = counted.get(layer)
        if chosen is None:
            raise UserError(f"layer {layer} of {source} has no experts")
        found[layer] = experts_for(chosen, load)
        if not found[layer]:
            raise UserError(
                f"{source} has computed nothing in {watch_s:g} s: send it requests, watch it "
                "longer with --watch, or name --experts"
            )
    return found


def take_home(
    asked: SourceOptions,
    span: str | None = option("range START:END (all modules)", None, name="--layers"),
    layer: str | None = option("layers of --heads or --experts, such as 5:8", None),
    heads: str | None = option("KV heads, such as 1,2", None),
    experts: str | None = option("experts, such as 1,2", None),
) -> int:
    """Bring home the modules of an instance that are away."""
    if (layer is None) is not (heads is None and experts is None):
        raise UserError("--layer goes together with --heads or --experts")
    ask = migration_api.Return(
        asked.source,
        None if span is None else _span(span),
        None if layer is None or heads is None else _of_layers(layer, heads, "--heads"),
        None if layer is None or experts is None else _of_layers(layer, experts, "--experts"),
    )
    return _migrate(asked, ask)


def overlap(
    asked: JsonOptions,
    instance: str = option("instance whose layers are away", name="--of", metavar="INSTANCE"),
    parts: int = option("most micro-batches of a step; 1: it waits for the guests", kind=int),
) -> None:
    """Let an instance and the guests of its layers compute at once, until it is restarted."""
    found = asked.client().overlap(migration_api.OverlapRequest(instance, parts))
    _print(found, f"{instance} {overlap_words(found)}", asked.as_json)


def share(
    asked: JsonOptions,
    instance: str = option("instance whose device it is", name="--beside", metavar="INSTANCE"),
    fraction: float = option("fraction that guests beside it may take", kind=float),
) -> None:
    """Bound the share of an instance's device that guests may take, until the server ends."""
    found = asked.client().share(migration_api.ShareRequest(instance, fraction))
    _print(found, sharing_line(found), asked.as_json)


def _print(found: Any, line: str, as_json: bool) -> None:
    print_json(found, None) if as_json else print(line)


def _migrate(asked: JsonOptions, ask: migration_api.MigrationRequest) -> int:
    """Begin a migration, show its progress, and return 2 unless it was completed."""
    migrations = asked.client().migrations
    return follow(
        asked,
        migrations,
        begin(migrations, ask),
        progress=_progress,
        done=_summary,
        failure=lambda one: f"migration {one.id} {one.state}: {one.error or 'by hand'}",
    )


def _progress(migration: migration_api.Migration) -> str:
    return f"{migration.id}: " + "; ".join(
        f"{move.modules} to {move.to or 'home'}: {move.phase}"
        for move in migration.moves
        if move.phase != "waiting" or migration.state == "waiting"
    )


def _summary(migration: migration_api.Migration) -> str:
    lines = []
    for move in migration.moves:
        facts = move.facts
        copied_bytes = int(facts.get("precopy_bytes", 0) + facts.get("commit_bytes", 0))
        weight_bytes = int(facts.get("weight_bytes", 0))
        line = f"{move.modules} run {'beside ' + move.to if move.to else 'at home'} after "
        line += f"{sum(move.seconds.values()):.1f} s: "
        if copied_bytes or not weight_bytes:
            line += f"{format_size(copied_bytes)} of KV copied, "
        if weight_bytes:
            line += f"{format_size(weight_bytes)} of weights loaded, "
        line += f"stall {1e3 * facts.get('stall_s', 0.0):.1f} ms"
        if facts.get("freed_bytes"):
            line += f", {format_size(int(facts['freed_bytes']))} freed"
        lines.append(line)
    if change := migration.blocks_gained:
        lines.append(f"the pool has {'gained' if change > 0 else 'lost'} {abs(change)} KV blocks")
    return "\n".join(lines + migration.notes)


def _span(text: str) -> tuple[int, int]:
    """Return the span of ``START:END``, or of a single layer.

    Raises:
        UserError: ``text`` has another form.
    """
    start, colon, end = text.partition(":")
    if start.strip().isdigit() and (end.strip().isdigit() or not colon):
        return int(start), int(end) if colon else int(start) + 1
    raise UserError(f"{text}: write layers as START:END, such as 10:20")


def _of_layers(layer: str, chosen: str, option: str) -> dict[int, tuple[int, ...]]:
    """Return the same heads or experts for each of some layers."""
    return dict.fromkeys(_layers(layer), tuple(_numbers(chosen, option)))


def _layers(text: str) -> list[int]:
    layers: list[int] = []
    for part in text.split(","):
        layers += range(*_span(part))
    if not layers:
        raise UserError(f"--layer {text}: names no layer")
    return layers


def _numbers(text: str, option: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise UserError(f"{option} {text}: write numbers with commas between, such as 1,2")
    return [int(word) for word in words]


def experts_for(chosen: Sequence[int], share: float) -> tuple[int, ...]:
    """Return the experts whose part of all choices is close to ``share``, ascending.

    The work of an expert depends on how often the model's router chooses it: half of the experts
    need not be half of the work. Experts are ordered from most to least chosen. From each place in
    this order, two sets are considered: the experts that together just reach the share, and those
    that fit into it, with and without one more. The set nearest to the share is taken; among
    equals, that with fewer experts.

    Args:
        chosen: Number of choices of each expert.
        share: Wanted share of all choices, in (0, 1].

    Returns:
        At least one expert; none if nothing was chosen.
    """
    wanted = share * sum(chosen)
    by_load = sorted(
        (expert for expert, count in enumerate(chosen) if count),
        key=lambda expert: (-chosen[expert], expert),
    )
    if not by_load:
        return ()
    candidates = [one for n in range(len(by_load)) for one in _from(by_load[n:], chosen, wanted)]
    distances = ((abs(sum(chosen[e] for e in one) - wanted), len(one)) for one in candidates)
    nearest = min(zip(distances, candidates, strict=True))
    return tuple(sorted(nearest[1]))


def _from(by_load: Sequence[int], chosen: Sequence[int], wanted: float) -> Iterator[list[int]]:
    """Yield the candidate sets of these experts, none of them empty."""
    reaching: list[int] = []
    fitting: list[int] = []
    num_reaching = num_fitting = 0
    for expert in by_load:
        if num_reaching < wanted:
            reaching.append(expert)
            num_reaching += chosen[expert]
        if num_fitting + chosen[expert] <= wanted:
            fitting.append(expert)
            num_fitting += chosen[expert]
    yield reaching
    if fitting:
        yield fitting
        left = [expert for expert in by_load if expert not in set(fitting)]
        yield [*fitting, *left[-1:]]


app = App(
    None,
    "Move layers, heads, experts and older KV blocks between instances of a running server.",
    layers=layers,
    heads=heads,
    context=context,
    experts=experts,
    **{"return": take_home},
    overlap=overlap,
    share=share,
)
