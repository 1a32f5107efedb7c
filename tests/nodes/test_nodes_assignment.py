"""Which instances run on which node: room, mixture of roles, words of refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, Role
from banaserve.nodes.server.assignment import InstanceNeed, NodeAssignment, NodeFacts, assign, room

GIB = 1 << 30


def instances(prefill: int, decode: int) -> list[tuple[InstanceId, Role]]:
    return ServeConfig(prefill=prefill, decode=decode).instances()


def cpu_node(name: str, gib: int = 1000) -> NodeFacts:
    return NodeFacts(name, (), gib * GIB)


def names(one: NodeAssignment) -> list[str]:
    return [str(instance_id) for instance_id, _ in one.instances]


def test_prefill_and_decode_share_each_node() -> None:
    assigned = assign([cpu_node("a"), cpu_node("b")], instances(4, 4), InstanceNeed())
    assert [names(one) for one in assigned] == [
        ["p0", "p1", "d0", "d1"],
        ["p2", "p3", "d2", "d3"],
    ]


def test_one_of_each_on_two_nodes() -> None:
    assigned = assign([cpu_node("a"), cpu_node("b")], instances(1, 1), InstanceNeed())
    assert [names(one) for one in assigned] == [["p0"], ["d0"]]


def test_a_node_more_than_there_are_instances_stays_empty() -> None:
    assigned = assign([cpu_node(name) for name in "abc"], instances(1, 1), InstanceNeed())
    assert [names(one) for one in assigned] == [["p0"], ["d0"], []]


def test_tensor_parallelism_stays_within_a_node() -> None:
    nodes = [NodeFacts("a", ("0", "1", "2"), GIB), NodeFacts("b", ("4", "5"), GIB)]
    assigned = assign(nodes, instances(1, 1), InstanceNeed(num_gpus=2))
    assert [names(one) for one in assigned] == [["p0"], ["d0"]]
    with pytest.raises(
        UserError, match=r"3 instances, each of which needs 2 GPUs on one node: .* b has 2 GPUs"
    ):
        assign(nodes, instances(1, 2), InstanceNeed(num_gpus=2))


def test_a_store_takes_its_part_of_a_node() -> None:
    need = InstanceNeed(memory_bytes=3 * GIB, node_bytes=2 * GIB)
    assert room(cpu_node("a", 8), need) == 2
    assert room(cpu_node("a", 1), need) == 0
    with pytest.raises(UserError, match=r"2 GiB for a node's store: a has 4 GiB \(room for 0\)"):
        assign([cpu_node("a", 4)], instances(1, 1), need)


@given(
    rooms=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    each=st.integers(1, 3),
)
def test_every_instance_has_a_place_of_its_own_where_there_is_room(
    rooms: list[int], prefill: int, decode: int, each: int
) -> None:
    nodes = [
        NodeFacts(f"n{i}", tuple(str(gpu) for gpu in range(num * each)), GIB)
        for i, num in enumerate(rooms)
    ]
    wanted = instances(prefill, decode)
    if sum(rooms) < len(wanted):
        with pytest.raises(UserError, match="more nodes"):
            assign(nodes, wanted, InstanceNeed(num_gpus=each))
        return
    assigned = assign(nodes, wanted, InstanceNeed(num_gpus=each))
    assert [one.node for one in assigned] == [node.name for node in nodes]
    placed = [one for one in assigned for one in one.instances]
    assert sorted(placed) == sorted(wanted, key=str) or set(placed) == set(wanted)
    assert len(placed) == len(wanted)
    for one, node in zip(assigned, nodes, strict=True):
        assert each * len(one.instances) <= len(node.gpus)
    full = [len(one.instances) == num for one, num in zip(assigned, rooms, strict=True)]
    open_counts = [
        len(one.instances) for one, is_full in zip(assigned, full, strict=True) if not is_full
    ]
    assert not open_counts or max(open_counts) - min(open_counts) <= 1
    assert all(len(one.instances) <= min(open_counts, default=99) + 1 for one in assigned)


@given(prefill=st.integers(1, 16), decode=st.integers(1, 16), num=st.integers(1, 8))
def test_the_mixture_of_each_node_is_that_of_the_whole(prefill: int, decode: int, num: int) -> None:
    assigned = assign(
        [cpu_node(f"n{i}") for i in range(num)], instances(prefill, decode), InstanceNeed()
    )
    for one in assigned:
        has = sum(role is Role.PREFILL for _, role in one.instances)
        assert abs(has - len(one.instances) * prefill / (prefill + decode)) <= 1.0
