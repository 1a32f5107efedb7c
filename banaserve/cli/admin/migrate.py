"""``banaserve migrate``: move layers, heads, experts and older blocks between instances."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import msgspec
import typer

from banaserve.api.admin_client import AdminClient
from banaserve.cli.admin.following import followed
from banaserve.cli.admin.options import ServerOptions, with_server_options
from banaserve.cli.admin.placement import overlap_words, sharing_line
from banaserve.cli.console import print_error
from banaserve.engine.vllm.migration.api import (
    ExpertLoadRequest,
    Migration,
    MigrationRequest,
    MoveContext,
    MoveExperts,
    MoveHeads,
    MoveLayers,
    OverlapRequest,
    Return,
    ShareRequest,
)
from banaserve.errors import UserError
from banaserve.kvstore.sizes import format_size
from banaserve.orchestrator.migration.expert_choice import experts_for

app = typer.Typer(
    name="migrate",
    help="Move layers, heads, experts and older KV blocks between instances of a running server.",
    add_completion=False,
    no_args_is_help=True,
)
FromOption = Annotated[str, typer.Option("--from", help="The instance that they belong to.")]
ToOption = Annotated[str, typer.Option("--to", help="The instance beside which they will run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON when it has ended.")]
_EXIT_FAILED = 2


@app.command()
@with_server_options
def layers(
    server: ServerOptions,
    source: FromOption,
    target: ToOption,
    span: Annotated[str, typer.Option("--layers", help="START:END, END not included.")],
    as_json: JsonOption = False,
) -> None:
    """Move a range of layers: weights and KV cache."""
    ask = MoveLayers(source, target, _span(span))
    _migrate(server.client(), ask, as_json)


@app.command()
@with_server_options
def heads(
    server: ServerOptions,
    source: FromOption,
    target: ToOption,
    layer: Annotated[str, typer.Option("--layer", help="A layer, or several: 5,6 or 5:8.")],
    chosen: Annotated[str, typer.Option("--heads", help="KV heads of each, such as 1,2.")],
    as_json: JsonOption = False,
) -> None:
    """Move KV heads of some layers, with their query heads: KV cache only."""
    ask = MoveHeads(source, target, _of_layers(layer, chosen, "--heads"))
    _migrate(server.client(), ask, as_json)


@app.command()
@with_server_options
def context(
    server: ServerOptions,
    source: FromOption,
    target: ToOption,
    span: Annotated[str, typer.Option("--layers", help="START:END, END not included.")],
    as_json: JsonOption = False,
) -> None:
    """Move the currently full KV blocks of some layers; newer blocks stay."""
    ask = MoveContext(source, target, _span(span))
    _migrate(server.client(), ask, as_json)


@app.command()
@with_server_options
def experts(
    server: ServerOptions,
    source: FromOption,
    target: ToOption,
    layer: Annotated[str, typer.Option("--layer", help="A layer, or several: 5,6 or 5:8.")],
    chosen: Annotated[
        str | None, typer.Option("--experts", help="Of each, such as 1,2; or give --load.")
    ] = None,
    load: Annotated[
        float | None,
        typer.Option("--load", help="Share of each layer's work, by what its router chooses."),
    ] = None,
    watch_s: Annotated[
        float, typer.Option("--watch", help="Seconds for which the routers are watched.")
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Move routed experts of some layers: weights only, the router stays."""
    if (chosen is None) is (load is None):
        raise UserError("give --experts, or --load to let what routers choose decide")
    client = server.client()
    if chosen is not None:
        wanted = _of_layers(layer, chosen, "--experts")
    else:
        assert load is not None
        wanted = _experts_for(client, source, _layers(layer), load, watch_s, quiet=as_json)
    _migrate(client, MoveExperts(source, target, wanted), as_json)


def _experts_for(
    client: AdminClient,
    source: str,
    layers: list[int],
    load: float,
    watch_s: float,
    *,
    quiet: bool,
) -> dict[int, tuple[int, ...]]:
    """Watch an instance's routers, and choose the experts that do ``load`` of each layer's work."""
    if not 0 < load < 1:
        raise UserError(f"--load {load:g}: give a share between 0 and 1, such as 0.5")
    if watch_s <= 0:
        raise UserError(f"--watch {watch_s:g}: give seconds")
    client.expert_load(ExpertLoadRequest(source))
    try:
        if not quiet:
            words = f"watching the routers of {source} for {watch_s:g} s"
            print(words, file=sys.stderr, flush=True)
        time.sleep(watch_s)
    finally:
        counted = client.expert_load(ExpertLoadRequest(source, counting=False)).chosen
    found = {}
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


@app.command(name="return")
@with_server_options
def take_home(
    server: ServerOptions,
    source: FromOption,
    span: Annotated[
        str | None, typer.Option("--layers", help="START:END; everything without it.")
    ] = None,
    layer: Annotated[str | None, typer.Option("--layer", help="Of --heads or --experts.")] = None,
    chosen: Annotated[str | None, typer.Option("--heads", help="KV heads, such as 1,2.")] = None,
    experts: Annotated[str | None, typer.Option("--experts", help="Experts, likewise.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring home the modules of an instance that are away."""
    if (layer is None) is not (chosen is None and experts is None):
        raise UserError("--layer goes together with --heads or --experts")
    ask = Return(
        source,
        _span(span) if span is not None else None,
        _of_layers(layer, chosen, "--heads") if layer is not None and chosen is not None else None,
        _of_layers(layer, experts, "--experts") if layer and experts is not None else None,
    )
    _migrate(server.client(), ask, as_json)


@app.command()
@with_server_options
def overlap(
    server: ServerOptions,
    instance: Annotated[str, typer.Option("--of", help="The instance whose layers are away.")],
    parts: Annotated[
        int, typer.Option("--parts", help="Micro-batches of a step, at most; 1: it waits.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Let an instance and the guests of its layers compute at once, until it is restarted."""
    found = server.client().overlap(OverlapRequest(instance, parts))
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
        return
    print(f"{instance} {overlap_words(found)}")


@app.command()
@with_server_options
def share(
    server: ServerOptions,
    instance: Annotated[str, typer.Option("--beside", help="The instance whose device it is.")],
    fraction: Annotated[float, typer.Option("--fraction", help="That guests beside it may take.")],
    as_json: JsonOption = False,
) -> None:
    """Bound the share of an instance's device that guests may take, until the server ends."""
    found = server.client().share(ShareRequest(instance, fraction))
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
        return
    print(sharing_line(found))


def _migrate(client: AdminClient, ask: MigrationRequest, as_json: bool) -> None:
    """Begin a migration, show its progress, and exit with 2 unless it was completed."""
    migration = client.migrations.begin(ask)
    migration = followed(client.migrations, migration, _progress, is_silent=as_json)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(migration), indent=2))
    elif migration.state == "done":
        for line in _summary(migration):
            typer.echo(line)
    if migration.state != "done":
        print_error(f"migration {migration.id} {migration.state}: {migration.error or 'nothing'}")
        raise typer.Exit(_EXIT_FAILED)


def _progress(migration: Migration) -> str:
    return f"{migration.id}: " + "; ".join(
        f"{move.modules} to {move.to or 'home'}: {move.phase}"
        for move in migration.moves
        if move.phase != "waiting" or migration.state == "waiting"
    )


def _summary(migration: Migration) -> list[str]:
    lines = []
    for move in migration.moves:
        facts = move.facts
        copied_bytes = int(facts.get("precopy_bytes", 0) + facts.get("commit_bytes", 0))
        total_s = sum(move.seconds.values())
        line = f"{move.modules} run {'beside ' + move.to if move.to else 'at home'} after "
        weight_bytes = int(facts.get("weight_bytes", 0))
        line += f"{total_s:.1f} s: "
        if copied_bytes or not weight_bytes:
            line += f"{format_size(copied_bytes)} of KV copied, "
        if weight_bytes:
            line += f"{format_size(weight_bytes)} of weights loaded, "
        line += f"stall {1e3 * facts.get('stall_s', 0.0):.1f} ms"
        if facts.get("freed_bytes"):
            line += f", {format_size(int(facts['freed_bytes']))} freed"
        lines.append(line)
    change = migration.blocks_gained
    if change:
        lines.append(f"the pool has {'gained' if change > 0 else 'lost'} {abs(change)} KV blocks")
    return lines + migration.notes


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
