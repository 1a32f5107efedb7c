"""Between the policies' words and the coordinator's: actions, requests, what came of them."""

from __future__ import annotations

from banaserve.engine.vllm.migration.modules import Context, HeadSet, Modules, overlap
from banaserve.engine.vllm.moves.coordinator import Coordinator
from banaserve.engine.vllm.moves.words import Ask, Heads, Migration, MoveHeads, MoveLayers, Return
from banaserve.types import InstanceId, Module, MoveModule, ReturnModule, Step


def ask_of(action: MoveModule | ReturnModule) -> Ask:
    """Returns what the coordinator has to be asked for an action of a plan."""
    module = action.module
    heads: Heads = dict.fromkeys(range(module.first_layer, module.end_layer), module.heads)
    layers = (module.first_layer, module.end_layer)
    if isinstance(action, ReturnModule):
        return (
            Return(action.host, heads=heads) if module.heads else Return(action.host, layers=layers)
        )
    if module.heads:
        return MoveHeads(action.host, action.guest, heads)
    return MoveLayers(action.host, action.guest, layers)


def modules_of(modules: Modules) -> list[Module]:
    """Returns ``modules`` as policies know them: neighbouring layers with equal heads together.

    Of older blocks they know nothing: nobody but a person moves them.
    """
    if isinstance(modules, Context):
        return []
    if not isinstance(modules, HeadSet):
        return [Module(modules.start, modules.end)]
    found: list[Module] = []
    for layer in modules.layers:
        heads = tuple(sorted(modules.heads[layer]))
        last = found[-1] if found else None
        if last is not None and (last.end_layer, last.heads) == (layer, heads):
            found[-1] = Module(last.first_layer, layer + 1, heads)
        else:
            found.append(Module(layer, layer + 1, heads))
    return found


def foreign_step(migration: Migration, coordinator: Coordinator) -> Step:
    """Returns an open migration that no policy has begun as a step without influence.

    It keeps its instances out of other moves; what it changes is seen when it is there.
    """
    hosted = coordinator.hosts[InstanceId(migration.host)]
    moving = [m for modules in hosted.moving.get(migration.id, ()) for m in modules_of(modules)]
    module = moving[0] if moving else Module(0, 0)
    host = InstanceId(migration.host)
    if migration.to is not None:
        return Step(MoveModule(host, InstanceId(migration.to), module, 0), (), 0.0, 0.0, 0.0)
    guest = host
    for unit in hosted.units(coordinator.guests):
        if any(overlap(m, unit.modules) for m in hosted.moving.get(migration.id, ())):
            guest = InstanceId(unit.at)
    return Step(ReturnModule(host, guest, module, 0), (), 0.0, 0.0, 0.0)


def bytes_of(migration: Migration) -> int:
    """KV and weights that travelled."""
    names = ("precopy_bytes", "commit_bytes", "weight_bytes")
    return int(sum(move.facts.get(name, 0) for move in migration.moves for name in names))


def seconds_of(migration: Migration) -> float:
    """Time of all phases, without waiting for another migration of the host."""
    return float(sum(sum(move.seconds.values()) for move in migration.moves))


def stall_s_of(migration: Migration) -> float:
    return float(sum(move.facts.get("stall_s", 0.0) for move in migration.moves))
