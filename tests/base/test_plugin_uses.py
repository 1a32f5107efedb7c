"""Policies and tiers of other packages at work, with their own options and failures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from banaserve.base.errors import NoInstanceError, PolicyError, UserError
from banaserve.base.plugins.discovery import Plugin, PluginGroup
from banaserve.base.types import ClusterView, InstanceId, InstanceView, RequestId, RequestView, Role
from banaserve.cli.plugins import use_plugins
from banaserve.kvstore.tiers.registry import TIERS, distributed_tier
from banaserve.orchestrator.control.move_policies import registry as migration
from banaserve.orchestrator.control.routing import registry as routing
from banaserve.orchestrator.planner.loop.loop import ControllerOptions
from banaserve.orchestrator.planner.loop.time_scaling import dilated
from banaserve.sim.system import preset
from banaserve_route.policies import registry as replicas
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import ReplicaId, ReplicaView, Request
from installed_packages import (
    MIGRATION,
    REPLICAS,
    ROUTING,
    TIER,
    install,
    of_others,
    plugin_site,
    routing_plugin,
)

ROUTING_GROUP, REPLICA_GROUP, MIGRATION_GROUP, TIER_GROUP = PluginGroup


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages can be installed to; what they register is forgotten afterwards."""
    with plugin_site(tmp_path / "site", monkeypatch):
        yield tmp_path / "site"


def test_a_routing_policy_decides_with_its_own_options(site: Path) -> None:
    routing_plugin(site)
    assert use_plugins(ROUTING_GROUP) == [Plugin(ROUTING_GROUP, "by_id", "acme-routing 1.0")]
    views = [
        InstanceView(InstanceId(name), Role.COLOCATED, True, None, 0, 0, 1000.0)
        for name in ("c0", "c1", "c2")
    ]
    cluster = ClusterView(0.0, {view.id: view for view in views})
    policy = routing.make("by_id", place=1)
    request = RequestView(RequestId("1"), 100)
    assert [policy.route(request, cluster).decode for _ in range(3)] == ["c1", "c1", "c1"]
    with pytest.raises(UserError, match=r"unknown option of routing policy by_id: delta_l.*place"):
        routing.make("by_id", delta_l=1)
    with pytest.raises(UserError, match="place is -1: give 0 or more"):
        routing.make("by_id", place=-1)
    with pytest.raises(
        UserError, match="routing policy by_id: place takes a whole number: got 'far'"
    ):
        routing.make("by_id", place="far")
    assert preset("static", prefill=1, decode=1, routing="by_id", routing_options={"place": 2})


def test_a_replica_policy_decides_with_its_presets(site: Path) -> None:
    install(site, "acme-replicas", REPLICAS, {f"{REPLICA_GROUP}:by_id": "acme_replicas:ById"})
    assert [plugin.problem for plugin in use_plugins(REPLICA_GROUP)] == [""]
    assert replicas.presets("by_id") == ["first", "last"]
    chosen = []
    for options in ({}, {"preset": "last"}, {"from_end": 1}):
        fleet = Fleet(replicas.make("by_id", Random(0), **options))
        for name in ("a", "b"):
            fleet.add(ReplicaView(ReplicaId(name)))
        chosen.append(fleet.choose(Request(RequestId("1"), 1), 0.0).target)
    assert chosen == ["a", "b", "b"]
    with pytest.raises(UserError, match="unknown option of policy by_id: from_start"):
        replicas.make("by_id", Random(0), from_start=1)


def test_a_migration_policy_plans_and_its_seconds_are_stretched(site: Path) -> None:
    install(site, "acme-moves", MIGRATION, {f"{MIGRATION_GROUP}:lazy": "acme_moves:Lazy"})
    assert [plugin.problem for plugin in use_plugins(MIGRATION_GROUP)] == [""]
    options = dilated(ControllerOptions(policy="lazy", section={}), 3.0)
    assert options.section == {"patience_s": 30.0}
    plan = migration.make("lazy", **options.section).plan(ClusterView(0.0, {}))
    assert plan.reason == "waits 30 s"


def test_a_tier_is_opened_by_its_url(site: Path) -> None:
    install(site, "acme-tier", TIER, {f"{TIER_GROUP}:heap": "acme_tier:HeapTier"})
    assert [plugin.problem for plugin in of_others(TIER_GROUP)] == [""]
    url = "heap://here?size=64MiB"
    assert distributed_tier(url) is TIERS.get("heap")
    with pytest.raises(UserError, match="write heap://here"):
        distributed_tier("heap://here")
    with pytest.raises(UserError, match=r"known: heap, mooncake"):
        distributed_tier("heaps://here")


def guide(name: str, site: Path) -> list[str]:
    """Install the package of a guide; returns its further blocks of Python."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / name).read_text()
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    module, *rest = re.findall(r"```python\n(.*?)```", text, re.S)
    project = tomllib.loads(toml)["project"]
    entry_points = {
        f"{group}:{entry}": value
        for group, entries in project["entry-points"].items()
        for entry, value in entries.items()
    }
    install(site, project["name"], module, entry_points)
    return rest


def test_the_guide_s_routing_policy_works(site: Path) -> None:
    (example,) = guide("add-a-routing-policy.md", site)
    assert [plugin.problem for plugin in use_plugins(ROUTING_GROUP)] == [""]
    exec(example, {})
    assert routing.make("spare_memory", stale_after_s=5.0)


def test_the_guide_s_tier_works(site: Path) -> None:
    guide("add-a-store-tier.md", site)
    assert [plugin.problem for plugin in of_others(TIER_GROUP)] == [""]
    url = "heap://here?size=64MiB"
    tier = distributed_tier(url).from_url(url)
    assert (tier.name, tier.stats().capacity_bytes) == ("heap", 64 * 2**20)
    tier.close()


TYPED = """
from dataclasses import dataclass
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg

@dataclass(frozen=True)
class Options:
    rest: int = 0
    share: float = 0.5
    strict: bool = False
    tag: str = ""
    limit: float | None = None
    other: tuple = ()

    def __post_init__(self):
        if self.rest == 13:
            raise LookupError("thirteen")

class Typed(LegByLeg):
    Options = Options

    def __init__(self, options, legs, start=0):
        super().__init__(legs, start)
        self.options = options
        if options.rest == 14:
            raise LookupError("fourteen")

    def choose_prefill(self, request, views, now_s):
        return self.choose_decode(views, now_s)

    def choose_decode(self, views, now_s):
        return views[0]
"""


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"rest": "x"}, "routing policy typed: rest takes a whole number: got 'x'"),
        ({"rest": 1.5}, "routing policy typed: rest takes a whole number: got 1.5"),
        ({"rest": True}, "routing policy typed: rest takes a whole number: got True"),
        ({"share": "abc"}, "routing policy typed: share takes a number: got 'abc'"),
        ({"limit": "abc"}, "routing policy typed: limit takes a number: got 'abc'"),
        ({"strict": 1}, "routing policy typed: strict takes true or false: got 1"),
        ({"tag": True}, "routing policy typed: tag takes text: got True"),
        ({"rest": 13}, "options of routing policy typed of acme 1.0: LookupError: thirteen"),
        ({"rest": 14}, "routing policy typed of acme 1.0: LookupError: fourteen"),
    ],
)
def test_a_value_of_another_type_is_refused(
    site: Path, section: dict[str, object], problem: str
) -> None:
    install(site, "acme", TYPED, {f"{ROUTING_GROUP}:typed": "acme:Typed"})
    assert [plugin.problem for plugin in use_plugins(ROUTING_GROUP)] == [""]
    with pytest.raises(UserError) as refused:
        routing.make("typed", **section)
    assert str(refused.value) == problem


def test_values_are_of_their_fields_types(site: Path) -> None:
    install(site, "acme", TYPED, {f"{ROUTING_GROUP}:typed": "acme:Typed"})
    use_plugins(ROUTING_GROUP)
    section: dict[str, object] = {"share": 1, "strict": "true", "tag": 5, "limit": None}
    options = routing.make("typed", **section, other=(1,)).options  # type: ignore[attr-defined]
    assert (options.share, options.strict, options.tag, options.limit) == (1, True, "5", None)


FAILING = """
import sys
from dataclasses import dataclass
from banaserve.base.errors import NoInstanceError
from banaserve.base.types import Route

@dataclass(frozen=True)
class Options:
    how: str = "boom"

class Failing:
    Options = Options

    def __init__(self, options, legs, start=0):
        self.how = options.how

    def route(self, request, cluster):
        if self.how == "boom":
            raise ValueError("boom")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "nobody":
            raise NoInstanceError("nobody is ready")
        view = cluster.instances["c0"]
        return {
            "id": "c0",
            "unknown": Route(None, "c9", "r"),
            "view": Route(None, view, "r"),
        }[self.how]
"""


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("boom", "ValueError: boom"),
        ("exit", "SystemExit: 3"),
        ("id", "route returned a str, which is no Route"),
        ("unknown", "there is no instance 'c9'"),
        ("view", "its Route has a InstanceView where an instance's id belongs"),
    ],
)
def test_a_policy_that_fails_is_named(site: Path, how: str, problem: str) -> None:
    install(site, "acme", FAILING, {f"{ROUTING_GROUP}:failing": "acme:Failing"})
    use_plugins(ROUTING_GROUP)
    view = InstanceView(InstanceId("c0"), Role.COLOCATED, True, None, 0, 0, 1000.0)
    cluster = ClusterView(0.0, {view.id: view})
    request = RequestView(RequestId("1"), 100)
    with pytest.raises(PolicyError) as failed:
        routing.make_named("failing", how=how).route(request, cluster)
    assert str(failed.value) == f"routing policy failing of acme 1.0: {problem}"
    with pytest.raises(NoInstanceError, match=r"^nobody is ready$"):
        routing.make_named("failing", how="nobody").route(request, cluster)
    assert routing.make_named("failing").label == "failing (acme 1.0)"


def test_a_choice_that_is_no_view_is_named(site: Path) -> None:
    source = ROUTING.replace("return by_id[", "return by_id[0].id or by_id[")
    install(site, "acme", source, {f"{ROUTING_GROUP}:by_id": "acme:ById"})
    use_plugins(ROUTING_GROUP)
    view = InstanceView(InstanceId("c0"), Role.COLOCATED, True, None, 0, 0, 1000.0)
    with pytest.raises(PolicyError, match="TypeError: choose_both returned a value of type str"):
        routing.make_named("by_id").route(
            RequestView(RequestId("1"), 100), ClusterView(0.0, {view.id: view})
        )


def test_a_migration_policy_that_fails_is_named(site: Path) -> None:
    source = MIGRATION.replace("return MigrationPlan(", "raise ValueError(")
    source = source.replace("reason=", "")
    install(site, "acme", source, {f"{MIGRATION_GROUP}:lazy": "acme:Lazy"})
    use_plugins(MIGRATION_GROUP)
    with pytest.raises(
        PolicyError, match=r"^migration policy lazy of acme 1\.0: ValueError: waits"
    ):
        migration.make_named("lazy").plan(ClusterView(0.0, {}))
