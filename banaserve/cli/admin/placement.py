"""``banaserve placement``: which instance runs which layers and heads."""

from __future__ import annotations

from collections.abc import Iterator

from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.admin.status import node_rows, with_nodes
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.contracts.migration_api import (
    ClusterPlacement,
    GuestSharing,
    InstancePlacement,
    Overlapping,
)
from banaserve.kvstore.sizes import format_size

_HEADING = ("INSTANCE", "ROLE", "RUNS", "BESIDE", "BYTES", "EPOCH", "BLOCKS")


def placement(asked: JsonOptions) -> None:
    """Show which instance runs which layers and heads of a running server."""
    found = asked.client().placement()
    if asked.as_json:
        print_json(found)
        return
    print_rows(rows(found), {"down": "red"})
    if found.nodes:
        print_rows(node_rows(found.nodes), {"away": "red", "leaving": "yellow"})
    for guest in found.guests:
        processes = "process " if len(guest.pids) == 1 else "processes "
        processes += ", ".join(map(str, guest.pids))
        print(
            f"guest {guest.guest_id} ({processes}) takes {format_size(guest.num_bytes)} "
            f"and {guest.busy_fraction:.0%} of a core beside {guest.target}"
            + (f"; KV and activations pass by {guest.way}" if guest.way else "")
        )
    for instance in found.instances:
        if instance.units and instance.overlap is not None:
            print(f"{instance.id} {overlap_words(instance.overlap)}")
        if instance.sharing is not None and instance.sharing.num_guests:
            print(sharing_line(instance.sharing))


def overlap_words(found: Overlapping) -> str:
    """Return words on whether an instance and the guests of its layers compute at once."""
    if found.max_microbatches == 1:
        return "waits for its guests"
    if found.blocker:
        return f"waits for its guests, though it may cut steps: {found.blocker}"
    words = f"cuts steps into up to {found.max_microbatches} parts"
    if found.steps_cut:
        words += f": {found.steps_cut} of {found.steps_cut + found.steps_waited} so far, "
        words += f"their times predicted within {found.prediction_error:.0%}"
    return words


def sharing_line(found: GuestSharing) -> str:
    """Return a line on guests' allowed and used share of an instance's device, and their cost."""
    line = f"guests beside {found.instance} take at most {found.fraction:.0%} of its device"
    if not found.num_guests:
        return line
    line += f": {found.num_guests} took {found.busy_fraction:.0%} lately, its steps take "
    line += f"{found.predicted_slow_down:.2f} times as long"
    if found.measured_slow_down is not None:
        line += f" by that, {found.measured_slow_down:.2f} times as measured"
    return line


def rows(found: ClusterPlacement) -> list[tuple[str, ...]]:
    """Return a heading, and for each instance rows of its modules at home and away."""
    by_instance = [(instance.node, list(_rows(instance))) for instance in found.instances]
    nodes = [node for node, its in by_instance for _ in its]
    return with_nodes([_HEADING, *(row for _, its in by_instance for row in its)], nodes)


def _rows(instance: InstancePlacement) -> Iterator[tuple[str, ...]]:
    if instance.migration_blocker:
        yield instance.id, instance.role, instance.migration_blocker, "", "", "", ""
        return
    blocks = str(instance.num_blocks)
    if instance.blocks_gained:
        blocks += f" ({instance.blocks_gained:+d})"
    yield (
        instance.id,
        instance.role,
        _at_home(instance),
        instance.id,
        f"{format_size(instance.kv_bytes)} KV",
        str(instance.epoch),
        blocks,
    )
    for unit in instance.units:
        size = format_size(unit.num_bytes)
        yield "", "", unit.words, unit.at, size, str(unit.epoch), ""


def _at_home(instance: InstancePlacement) -> str:
    away = {layer for unit in instance.units for layer in unit.whole_layers}
    spans: list[list[int]] = []
    for layer in range(instance.num_layers):
        if layer in away:
            continue
        if spans and spans[-1][1] == layer:
            spans[-1][1] += 1
        else:
            spans.append([layer, layer + 1])
    return "layers " + " ".join(f"{start}:{end}" for start, end in spans)


app = App(placement)
