"""Assignment of instances to nodes: a pure function of the nodes' resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, Role
from banaserve.kvstore.sizes import format_size

_NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Resources of a node for instances.

    Attributes:
        name: Display name, unique.
        gpus: Names of the node's GPUs, as in CUDA_VISIBLE_DEVICES; none on CPU.
        memory_bytes: Memory available for processes, in bytes.
        max_instances: Maximum number of instances that the node's lender allows; None for no limit.
    """

    name: str
    gpus: tuple[str, ...]
    memory_bytes: int
    max_instances: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceNeed:
    """Resources that one instance needs.

    Attributes:
        num_gpus: GPUs, all on one node: tensor parallelism never crosses nodes; 0 on CPU.
        memory_bytes: Memory of the machine, in bytes; 0 if the memory of the GPUs is what counts.
        node_bytes: Memory that each node needs besides its instances, for its store, in bytes.
    """

    num_gpus: int = 0
    memory_bytes: int = 0
    node_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """Instances that run on a node.

    Attributes:
        instances: Ids of the instances, each with its initial role.
    """

    node: str
    instances: tuple[tuple[InstanceId, Role], ...]


def room(node: NodeFacts, need: InstanceNeed) -> int:
    """Return the maximum number of instances that a node can have."""
    limit = _NO_LIMIT if node.max_instances is None else node.max_instances
    if need.num_gpus:
        return min(limit, len(node.gpus) // need.num_gpus)
    if not need.memory_bytes:
        return limit
    return min(limit, max(0, node.memory_bytes - need.node_bytes) // need.memory_bytes)


def assign(
    nodes: Sequence[NodeFacts], instances: Sequence[tuple[InstanceId, Role]], need: InstanceNeed
) -> list[NodeAssignment]:
    """Return the assignment of each node, in the order of the nodes; it may be empty.

    Instances are spread evenly, as far as there is room. Prefill and decode are mixed on each node
    in the proportion of the whole, so that most hand-overs stay within one node's store.

    Raises:
        UserError: The instances do not fit; the message says which resources are missing where.
    """
    counts = _counts(nodes, len(instances), need)
    roles = dict.fromkeys(role for _, role in instances)
    waiting = {role: [one for one in instances if one[1] is role] for role in roles}
    assigned, left = [], len(instances)
    for node, count in zip(nodes, counts, strict=True):
        mine: list[tuple[InstanceId, Role]] = []
        for role, number in _shares({r: len(w) for r, w in waiting.items()}, count, left).items():
            mine += waiting[role][:number]
            del waiting[role][:number]
        left -= count
        assigned.append(NodeAssignment(node.name, tuple(mine)))
    return assigned


def _counts(nodes: Sequence[NodeFacts], num_instances: int, need: InstanceNeed) -> list[int]:
    """Return the number of instances of each node, given to the emptiest node first."""
    rooms = [room(node, need) for node in nodes]
    if sum(rooms) < num_instances:
        raise UserError(_missing(nodes, rooms, num_instances, need))
    counts = [0] * len(nodes)
    for _ in range(num_instances):
        free = [i for i in range(len(nodes)) if counts[i] < rooms[i]]
        counts[min(free, key=lambda i: (counts[i], i))] += 1
    return counts


def _shares(waiting: dict[Role, int], count: int, left: int) -> dict[Role, int]:
    """Return how many of ``count`` places each role gets: in proportion, remainders last.

    Args:
        left: Number of instances without a place: the sum of ``waiting``.
    """
    if not left:
        return {}
    exact = {role: num * count / left for role, num in waiting.items()}
    shares = {role: int(share) for role, share in exact.items()}
    by_remainder = sorted(exact, key=lambda role: shares[role] - exact[role])
    for role in by_remainder[: count - sum(shares.values())]:
        shares[role] += 1
    return shares


def no_room(node: NodeFacts, need: InstanceNeed) -> str:
    """Return in words why a node can have no instance."""
    return f"it has {_has(node, need)}, and an instance needs {_each(need)}"


def _has(node: NodeFacts, need: InstanceNeed) -> str:
    its = f"{len(node.gpus)} GPUs" if need.num_gpus else format_size(node.memory_bytes)
    if node.max_instances is None:
        return its
    return f"{its} and {node.max_instances} CPUs, one for each,"


def _each(need: InstanceNeed) -> str:
    if need.num_gpus:
        return f"{need.num_gpus} GPUs on one node"
    each = f"{format_size(need.memory_bytes)} of memory"
    if need.node_bytes:
        each += f", beside {format_size(need.node_bytes)} for a node's store"
    return each


def _missing(
    nodes: Sequence[NodeFacts], rooms: Sequence[int], num_instances: int, need: InstanceNeed
) -> str:
    words = "; ".join(
        f"{node.name} has {_has(node, need)} (room for {one})"
        for node, one in zip(nodes, rooms, strict=True)
    )
    return (
        f"{num_instances} instances, each of which needs {_each(need)}: {words}: "
        "more nodes, fewer instances (--pd) or less for each"
    )
