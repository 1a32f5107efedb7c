"""What policies see of instances on several machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import model_shapes
from banaserve.base.clock import WallClock
from banaserve.base.types import NO_WAYS, Distance, InstanceId, InstanceView, Role
from banaserve.engine.compat.config import kv_token_bytes
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.launch.launcher import InstancePlace

WAYS = {("a", "b"): Distance(1e-3, 1e9), ("b", "a"): Distance(2e-3, 2e9)}


class Instance:
    def __init__(self, name: str, node: str) -> None:
        self.id, self.place = InstanceId(name), InstancePlace(node)

    def distance_to(self, other: Instance) -> Distance | None:
        return WAYS.get((self.place.node, other.place.node))

    def view(self, far: Mapping[InstanceId, Distance | None] = NO_WAYS) -> InstanceView:
        return InstanceView(self.id, Role.PREFILL, True, None, 0, 0, 1.0, far=far)


def far(**nodes: str) -> dict[str, Mapping[InstanceId, Distance | None]]:
    instances: Any = [Instance(name, node) for name, node in nodes.items()]
    seen = Cluster(instances, WallClock(), ClusterTimeouts()).views()
    assert {name: one.id for name, one in seen.items()} == {name: name for name in nodes}
    return {str(name): one.far for name, one in seen.items()}


def test_each_instance_has_its_ways_to_those_on_other_machines() -> None:
    assert far(p0="a", d0="a", p1="b", d1="c") == {
        "p0": {"p1": WAYS["a", "b"], "d1": None},
        "d0": {"p1": WAYS["a", "b"], "d1": None},
        "p1": {"p0": WAYS["b", "a"], "d0": WAYS["b", "a"], "d1": None},
        "d1": {"p0": None, "d0": None, "p1": None},
    }


def test_on_one_machine_nothing_is_far() -> None:
    assert far(p0="", d0="") == {"p0": {}, "d0": {}}
    assert far() == {}


@pytest.mark.parametrize(
    ("use_mla", "workers", "wanted"),
    [(False, 1, 4 * 2 * 2 * 8 * 2), (False, 4, 4 * 4 * 2 * 2 * 8 * 2), (True, 4, 4 * 8 * 2)],
)
def test_a_token_has_kv_of_all_layers_over_all_workers(
    use_mla: bool, workers: int, wanted: int
) -> None:
    config: Any = model_shapes.configured(use_mla=use_mla, workers=workers)
    assert kv_token_bytes(config) == wanted
