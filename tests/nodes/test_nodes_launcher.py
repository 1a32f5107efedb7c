"""What the launcher of a server over several nodes says of the stores beside its instances."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.nodes.server.pool import PoolNode
from banaserve.serving.instances.instance import Instance
from node_doubles import launcher_of


def node(name: str, store: str) -> PoolNode:
    """A node whose store listens at ``store``; empty for one without."""
    client: Any = SimpleNamespace(name=name, is_ready=True)
    order: Any = SimpleNamespace(store=SimpleNamespace(listen=store) if store else None)
    facts: Any = SimpleNamespace()
    return PoolNode(client, 0, facts, order)


def beside(launcher: Any, source: str, target: str) -> str:
    """The store beside ``target``, as an instance ``source`` asks for it."""
    one, other = (SimpleNamespace(place=launcher.place_of(name)) for name in (source, target))
    return Instance.store_beside(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ("p0", "d1", "10.0.0.2:7100"),
        ("d1", "p0", "10.0.0.1:7100"),
        ("p0", "d0", ""),  # one machine, one store
        ("p0", "d2", ""),  # there is none to push to
        ("d2", "p0", ""),  # there is none that could push
        ("p0", "removed", ""),
        ("removed", "p0", ""),
    ],
)
def test_the_store_beside_another_instance_is_where_its_node_listens(
    source: str, target: str, wanted: str
) -> None:
    launcher = launcher_of()
    one, other = node("a", "10.0.0.1:7100"), node("b", "10.0.0.2:7100")
    launcher._place.update(p0=one, d0=one, d1=other, d2=node("c", ""))
    assert beside(launcher, source, target) == wanted


def test_it_is_asked_anew_where_an_instance_runs_elsewhere_by_now() -> None:
    launcher = launcher_of()
    here, there = node("a", "10.0.0.1:7100"), node("b", "10.0.0.2:7100")
    launcher._place.update(p0=here, d0=there)
    assert beside(launcher, "p0", "d0") == "10.0.0.2:7100"
    launcher.release("d0")
    assert beside(launcher, "p0", "d0") == ""
    launcher._place["d0"] = here
    assert beside(launcher, "p0", "d0") == ""
