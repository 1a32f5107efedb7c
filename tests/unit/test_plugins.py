"""Policies and tiers of other packages, found by the metadata of an installed package."""

from __future__ import annotations

import http.server
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from banaserve.bench.loadgen.servers import free_port
from banaserve.cli import main as cli
from banaserve.cli.doctor.command import app as doctor
from banaserve.cli.plugins import REGISTRIES, rivalries, use_plugins
from banaserve.cli.serve.command import serve_command
from banaserve.controller.loop import ControllerOptions
from banaserve.controller.time_scaling import dilated
from banaserve.errors import NoInstanceError, PolicyError, UserError
from banaserve.kvstore.admin import fetch_stats
from banaserve.kvstore.daemon import process as daemon
from banaserve.kvstore.tiers.registry import TierSpec, distributed_spec, open_tier
from banaserve.orchestrator.migration import registry as migration
from banaserve.orchestrator.replicas import registry as replicas
from banaserve.orchestrator.replicas.fleet import Fleet
from banaserve.orchestrator.replicas.interface import ReplicaId, ReplicaView, Request
from banaserve.orchestrator.routing import registry as routing
from banaserve.plugins import Plugin, PluginGroup, load_plugins
from banaserve.sim.system import preset
from banaserve.types import ClusterView, InstanceId, InstanceView, RequestId, RequestView, Role
from installed_packages import MIGRATION, REPLICAS, ROUTING, TIER, install
from store_process import fork_store

ROUTING_GROUP, REPLICA_GROUP, MIGRATION_GROUP, TIER_GROUP = PluginGroup
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages can be installed to; what they register is forgotten afterwards."""
    for registry in REGISTRIES.values():
        registry.names()
        for kept in ("_found", "_offers", "_rivals", "refused"):
            monkeypatch.setattr(registry, kept, dict(getattr(registry, kept)))
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(EXAMPLES / "store_tier" / "dictionary_tier.py", folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if (folder / f"{name}.py").exists():
            del sys.modules[name]


def routing_plugin(site: Path, name: str = "by_id", package: str = "acme-routing") -> None:
    install(
        site, package, ROUTING, {f"{ROUTING_GROUP}:{name}": f"{package.replace('-', '_')}:ById"}
    )


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
    assert [plugin.problem for plugin in use_plugins(TIER_GROUP)] == [""]
    url = "heap://here?size=64MiB"
    assert distributed_spec(url) == TierSpec("heap", url)
    with pytest.raises(UserError, match="write heap://here"):
        distributed_spec("heap://here")
    with pytest.raises(UserError, match=r"known: heap, mooncake"):
        distributed_spec("heaps://here")


def test_the_store_serves_with_the_tier_of_another_package(site: Path, tmp_path: Path) -> None:
    install(site, "acme-tier", TIER, {f"{TIER_GROUP}:heap": "acme_tier:HeapTier"})
    path = tmp_path / "store.sock"
    process = fork_store(path, "1MiB", "--distributed", "heap://here?size=64MiB")
    try:
        (tier,) = fetch_stats(path).tiers
        assert (tier.stats.available, tier.stats.capacity_bytes) == (True, 64 * 2**20)
    finally:
        process.terminate()
        assert process.wait(20) == 0


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

from banaserve.orchestrator.routing.leg_by_leg import LegByLeg

class Half(LegByLeg):
    def choose_prefill(self, request, views, now_s): ...

class Needy:
    ...

from banaserve.orchestrator.replicas.policy import Policy, NoOptions as Nothing

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
    found = use_plugins(*PluginGroup)
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


TYPED = """
from dataclasses import dataclass
from banaserve.orchestrator.routing.leg_by_leg import LegByLeg

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
from banaserve.errors import NoInstanceError
from banaserve.types import Route

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


def test_what_is_refused_is_in_the_server_s_log(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routing_plugin(site, package="zeal-routing")
    routing_plugin(site, package="acme-routing")
    argv = ["--model", str(tmp_path / "nowhere"), "--run-dir", str(tmp_path / "run")]
    argv += ["--routing-policy", "by_id", "--kv-store-size", "1MiB", "--port", str(free_port())]
    done = asked("serve", *argv)
    assert done.returncode == cli.EXIT_USER_ERROR
    (log,) = (tmp_path / "run").rglob("front.log")
    for line in (
        "plugin by_id of zeal-routing 1.0 (banaserve.routing_policies) is refused: ",
        "routing policy by_id: that of acme-routing 1.0 is used, that of zeal-routing 1.0 refused",
    ):
        assert line in log.read_text()
        assert line in done.stderr


def test_loading_again_changes_nothing(site: Path) -> None:
    routing_plugin(site)
    assert use_plugins(ROUTING_GROUP) == use_plugins(ROUTING_GROUP)
    assert routing.names().count("by_id") == 1


def asked(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "banaserve", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("group", "argv", "known"),
    [
        (ROUTING_GROUP, ["serve", "--routing-policy", "x"], "unknown routing policy: x (known: "),
        (REPLICA_GROUP, ["route", "--replica", "http://h:1", "--policy", "x"], "unknown policy: x"),
        (MIGRATION_GROUP, ["serve", "--orchestrator-policy", "x"], "unknown migration policy: x"),
        (TIER_GROUP, ["serve", "--kv-store-distributed", "x://h"], "unknown scheme of a distri"),
    ],
)
def test_asking_for_a_refused_one_says_why(
    site: Path,
    group: PluginGroup,
    argv: list[str],
    known: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(site, "acme", WRONG, {f"{group}:x": "acme:Needy"})
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"banaserve: plugin x of acme 1.0 ({group}) is refused: Needy lacks")
    assert known in error
    assert "; acme 1.0 offers it and was refused: Needy lacks" in error


def test_a_plugin_is_among_the_known_ones(site: Path) -> None:
    routing_plugin(site)
    with pytest.raises(UserError, match=r"known: by_id, least_requests, .*did you mean by_id\?"):
        serve_command(["--routing-policy", "by_ids"])
    done = asked("serve", "--help")
    assert "one of by_id, least_requests, load_aware, round_robin" in done.stdout


def test_simulate_runs_with_a_plugin(site: Path) -> None:
    install(site, "acme-moves", MIGRATION, {f"{MIGRATION_GROUP}:lazy": "acme_moves:Lazy"})
    argv = ["alpaca", "--rps", "5", "--duration", "5", "--system", "banaserve", "--json"]
    done = asked("simulate", *argv, "--policy", "lazy")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)["runs"][0]["systems"]["banaserve"]
    assert (outcome["finished_fraction"], outcome["num_moves"]) == (1.0, 0)


def test_the_doctor_lists_plugins(site: Path) -> None:
    routing_plugin(site)
    install(site, "acme", WRONG, {f"{TIER_GROUP}:x": "acme:Needy"})
    lines = CliRunner().invoke(doctor, []).stdout.splitlines()
    found = [line for line in lines if line.startswith("plugin")]
    assert len(found) == 2
    assert "by_id of acme-routing 1.0 (banaserve.routing_policies)" in found[0]
    assert "warning" in found[1]
    assert "x of acme 1.0 (banaserve.store_tiers): Needy lacks check" in found[1]


def test_the_daemon_logs_a_refused_tier(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "acme", WRONG, {f"{TIER_GROUP}:x": "acme:Needy"})
    argv = ["--socket", str(tmp_path / "s"), "--size", "1MiB", "--distributed", "x://h"]
    with caplog.at_level(logging.WARNING):
        assert daemon.main(argv) == daemon.USER_ERROR_EXIT_CODE
    assert ["is refused: Needy lacks" in record.message for record in caplog.records] == [True]
    assert "acme 1.0 offers it and was refused" in capsys.readouterr().err


@pytest.mark.parametrize("group", [ROUTING_GROUP, REPLICA_GROUP, MIGRATION_GROUP])
def test_our_own_policies_would_pass_as_plugins(group: PluginGroup) -> None:
    registry = REGISTRIES[group]
    for name in registry.names():
        registry.add_plugin(f"{name}_again", registry.get(name), "acme 1.0")
    assert len(registry.names()) >= 6


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
    assert [plugin.problem for plugin in use_plugins(TIER_GROUP)] == [""]
    tier = open_tier(distributed_spec("heap://here?size=64MiB"))
    assert (tier.name, tier.stats().capacity_bytes) == ("heap", 64 * 2**20)
    tier.close()


class _Named(http.server.BaseHTTPRequestHandler):
    """A replica that answers every request with its own port."""

    def do_GET(self) -> None:
        body = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("url", ["dictionary://", "dictionary://?size=none", "dictionary://?x=1"])
def test_a_url_of_the_example_s_tier_that_makes_no_sense_is_one_line(
    url: str, site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (EXAMPLES / "store_tier" / "dictionary_tier.py").read_text()
    scheme = {f"{TIER_GROUP}:dictionary": "dictionary_tier:DictionaryTier"}
    install(site, "dictionary-tier", source, scheme)
    assert cli.main(["kvstore", "--distributed", url]) == cli.EXIT_USER_ERROR
    out, error = capfd.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "size" in error


def test_a_request_goes_where_a_plugin_decides(site: Path) -> None:
    install(site, "acme-replicas", REPLICAS, {f"{REPLICA_GROUP}:by_id": "acme_replicas:ById"})
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Named) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ports = sorted((server.server_port for server in servers), key=str)
    command = [sys.executable, "-m", "banaserve", "route", "--policy", "by_id", "--preset", "last"]
    command += ["--port", str(port := free_port())]
    command += [word for one in ports for word in ("--replica", f"http://127.0.0.1:{one}")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        shown = list(iter(lambda: process.stdout.readline(), "  Ctrl-C ends it.\n"))
        assert "  banaserve routes by by_id of acme-replicas 1.0\n" in shown
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20) as reply:
                assert reply.read() == str(ports[-1]).encode()
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.shutdown()
            server.server_close()
