"""Policies and tiers of other packages that are refused, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from banaserve.base.plugins.discovery import PluginGroup, load_plugins
from banaserve.cli.plugins import REGISTRIES, rivalries, use_plugins
from banaserve.orchestrator.control.routing import registry as routing
from installed_packages import ROUTING, install, of_others, plugin_site, routing_plugin

ROUTING_GROUP, REPLICA_GROUP, MIGRATION_GROUP, TIER_GROUP = PluginGroup


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages can be installed to; what they register is forgotten afterwards."""
    with plugin_site(tmp_path / "site", monkeypatch):
        yield tmp_path / "site"


WRONG = """
class NotBuilt:
    Options = dict

class Options:
    pass

class NoOptions:
    def __init__(self, options, legs, start): ...
    def route(self, request, cluster): ...

from dataclasses import dataclass

@dataclass
class Required:
    place: int

class Unready(NoOptions):
    Options = Required

class NoRoute(Unready):
    route = None

class OtherRoute(Unready):
    def route(self, request): ...

class OtherInit(Unready):
    def __init__(self, options): ...

from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg

class Half(LegByLeg):
    def choose_prefill(self, request, views, now_s): ...

class Needy:
    ...

from banaserve_route.policies.policy import Policy, NoOptions as Nothing

class NoPresets(Policy):
    def pick(self, request, candidates, fleet): ...

class EmptyPresets(NoPresets):
    PRESETS = {"plain": Nothing}

class UnknownNeed(NoPresets):
    PRESETS = {"plain": Nothing()}
    needs = frozenset({"clairvoyance"})

class NoSharing(NoPresets):
    PRESETS = {"plain": Nothing()}
    needs = frozenset({"peer_prefixes"})

@dataclass
class Changing:
    place: int = 0

@dataclass(frozen=True)
class Fine:
    place: int = 0

class Loose(LegByLeg):
    Options = Changing
    def __init__(self, options, legs, start): ...
    def choose_prefill(self, request, views, now_s): ...
    def choose_decode(self, views, now_s): ...

class Good(Loose):
    Options = Fine

class OtherDecode(Good):
    def choose_decode(self, request, views, now_s): ...

class OtherPrefill(Good):
    def choose_prefill(self, views, now_s): ...

class OtherBoth(Good):
    def choose_both(self, views, now_s): ...

class Waits(Good):
    async def choose_both(self, request, views, now_s): ...

class LoosePresets(NoPresets):
    PRESETS = {"plain": Changing()}

class OtherPick(Policy):
    PRESETS = {"plain": Nothing()}
    def pick(self, request, candidates): ...

class WaitingPlan:
    Options = Fine
    def __init__(self, options): ...
    async def plan(self, cluster): ...

def factory(options, legs, start): ...

from dictionary_tier import DictionaryTier

class AsyncTier(DictionaryTier):
    async def poll(self): ...

class NoUrl(DictionaryTier):
    check_url = None

function = len
"""


@pytest.mark.parametrize(
    ("entry", "value", "problem"),
    [
        (f"{ROUTING_GROUP}:x", "nowhere:Policy", "ModuleNotFoundError: No module named 'nowhere'"),
        (f"{ROUTING_GROUP}:x", "acme:Missing", "AttributeError: module 'acme' has no attribute"),
        (f"{ROUTING_GROUP}:x", "acme:!", "AttributeError: "),
        (f"{ROUTING_GROUP}:load_aware", "acme:Half", "the name is taken by banaserve"),
        (f"{ROUTING_GROUP}:x", "acme:function", "which is no class"),
        (f"{ROUTING_GROUP}:x", "acme:Needy", "Needy lacks route"),
        (f"{ROUTING_GROUP}:x", "acme:Half", "Half lacks choose_decode"),
        (
            f"{ROUTING_GROUP}:x",
            "acme:NoRoute",
            "NoRoute.route has to take (self, request, cluster)",
        ),
        (f"{ROUTING_GROUP}:x", "acme:OtherRoute", "has to take (self, request, cluster): too many"),
        (f"{ROUTING_GROUP}:x", "acme:OtherInit", "OtherInit has to take (options, legs, start)"),
        (f"{ROUTING_GROUP}:x", "acme:NoOptions", "NoOptions has no dataclass Options"),
        (f"{ROUTING_GROUP}:x", "acme:Unready", "needs a valid default for each option"),
        (f"{ROUTING_GROUP}:x", "acme:factory", "it refers to a function (factory), which is no"),
        (f"{ROUTING_GROUP}:x", "acme:Loose", "Loose.Options can be changed: write @dataclass(fr"),
        (
            f"{ROUTING_GROUP}:x",
            "acme:OtherDecode",
            "choose_decode has to take (self, views, now_s)",
        ),
        (f"{ROUTING_GROUP}:x", "acme:OtherPrefill", "has to take (self, request, views, now_s)"),
        (
            f"{ROUTING_GROUP}:x",
            "acme:OtherBoth",
            "OtherBoth.choose_both has to take (self, request",
        ),
        (f"{ROUTING_GROUP}:x", "acme:Waits", "Waits.choose_both is async: it has to be a plain"),
        (f"{REPLICA_GROUP}:x", "acme:OtherPick", "OtherPick.pick has to take (self, request, cand"),
        (f"{REPLICA_GROUP}:x", "acme:LoosePresets", "PRESETS['plain'] can be changed"),
        (f"{MIGRATION_GROUP}:x", "acme:WaitingPlan", "WaitingPlan.plan is async"),
        (f"{TIER_GROUP}:x", "acme:AsyncTier", "AsyncTier.poll is async"),
        (f"{REPLICA_GROUP}:random", "acme:NoPresets", "the name is taken by banaserve"),
        (f"{REPLICA_GROUP}:x", "acme:Needy", "Needy lacks choose, hold_safe, on_failed"),
        (f"{REPLICA_GROUP}:x", "acme:NoPresets", "NoPresets.PRESETS names no options"),
        (f"{REPLICA_GROUP}:x", "acme:EmptyPresets", "PRESETS['plain'] is no instance"),
        (f"{REPLICA_GROUP}:x", "acme:UnknownNeed", "unknown need of UnknownNeed: clairvoyance"),
        (f"{REPLICA_GROUP}:x", "acme:NoSharing", "has no share_prefixes()"),
        (f"{MIGRATION_GROUP}:still", "acme:Needy", "the name is taken by banaserve"),
        (f"{MIGRATION_GROUP}:x", "acme:Needy", "Needy lacks plan"),
        (f"{TIER_GROUP}:ssd", "acme:NoUrl", "the name is taken by banaserve"),
        (f"{TIER_GROUP}:x", "acme:Needy", "Needy lacks check, clear, close"),
        (f"{TIER_GROUP}:x", "acme:NoUrl", "NoUrl.check_url has to take (url)"),
        (f"{TIER_GROUP}:my_tier", "acme:NoUrl", "my_tier is no scheme of a URL"),
    ],
)
def test_what_is_wrong_is_named_and_the_rest_goes_on(
    site: Path, entry: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "acme", WRONG, {entry: value}, version="0.3")
    routing_plugin(site, package="zeal-routing")
    before = {group: REGISTRIES[group].names() for group in PluginGroup}
    found = of_others(*PluginGroup)
    group, name = entry.split(":")
    (refused,) = [plugin for plugin in found if plugin.problem]
    assert problem in refused.problem
    assert (refused.group, refused.name, refused.package) == (group, name, "acme 0.3")
    line = capsys.readouterr().err
    assert line == f"banaserve: plugin {name} of acme 0.3 ({group}) is refused: {refused.problem}\n"
    before[ROUTING_GROUP] = sorted([*before[ROUTING_GROUP], "by_id"])
    assert {group: REGISTRIES[group].names() for group in PluginGroup} == before


def test_a_module_that_raises_is_refused(site: Path) -> None:
    install(site, "acme", "1 / 0", {f"{ROUTING_GROUP}:x": "acme:X"})
    (plugin,) = load_plugins({ROUTING_GROUP: REGISTRIES[ROUTING_GROUP]})
    assert plugin.problem == "ZeroDivisionError: division by zero"


def test_a_module_that_ends_the_process_is_refused_and_the_rest_goes_on(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "acme", "import sys; sys.exit(3)", {f"{ROUTING_GROUP}:x": "acme:X"})
    routing_plugin(site, package="zeal-routing")
    good, refused = use_plugins(ROUTING_GROUP)
    assert (good.problem, refused.problem) == ("", "SystemExit: 3")
    assert capsys.readouterr().err.count("\n") == 1


def test_metadata_that_cannot_be_read_is_named(site: Path) -> None:
    info = install(site, "acme", ROUTING, {})
    (info / "entry_points.txt").write_text("[banaserve.routing_policies]\nby_id\n")
    routing_plugin(site, package="zeal-routing")
    broken, good = load_plugins({ROUTING_GROUP: REGISTRIES[ROUTING_GROUP]})
    assert (broken.name, broken.package) == ("entry_points.txt", "acme 1.0")
    assert broken.problem
    assert (good.package, good.problem) == ("zeal-routing 1.0", "")


def test_the_second_package_of_a_name_is_refused(site: Path) -> None:
    routing_plugin(site, package="zeal-routing")
    routing_plugin(site, package="acme-routing")
    first, second = use_plugins(ROUTING_GROUP)
    assert (first.package, first.problem) == ("acme-routing 1.0", "")
    assert second.package == "zeal-routing 1.0"
    assert second.problem == "the name is taken by acme-routing 1.0: it needs another one"
    assert rivalries((ROUTING_GROUP, "by_id"), (ROUTING_GROUP, "load_aware")) == [
        "routing policy by_id: that of acme-routing 1.0 is used, that of zeal-routing 1.0 refused"
    ]


def test_loading_again_changes_nothing(site: Path) -> None:
    routing_plugin(site)
    assert use_plugins(ROUTING_GROUP) == use_plugins(ROUTING_GROUP)
    assert routing.names().count("by_id") == 1


@pytest.mark.parametrize("group", [ROUTING_GROUP, REPLICA_GROUP, MIGRATION_GROUP])
def test_our_own_policies_would_pass_as_plugins(group: PluginGroup) -> None:
    registry = REGISTRIES[group]
    for name in registry.names():
        registry.add_plugin(f"{name}_again", registry.get(name), "acme 1.0")
    assert len(registry.names()) >= 6
