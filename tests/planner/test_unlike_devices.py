"""Instances on devices that are not alike: forecasts, roles, moves and routing by what each can."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    MoveModule,
    Role,
)
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.devices import device_of, relative_speed
from banaserve.orchestrator.control.move_policies import registry as migrations
from banaserve.orchestrator.control.move_policies.pairs import may_pair
from banaserve.orchestrator.control.projection.projection import project
from banaserve.orchestrator.planner.candidates.arrangement import Arrangement, assign, orders
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, summary
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from banaserve_bench.simulation.run import tallied

H100 = "llama-3.1-8b-h100"
LIMITS = (2.0, 0.03)


def device(folder: Path, name: str, **factors: float) -> str:
    """A file of the H100's profile with some values multiplied, by ``section_key``."""
    section, lines = "", []
    for line in (profiles.BUILT_IN / f"{H100}.toml").read_text().splitlines():
        key, is_value, value = line.partition(" = ")
        if line.startswith("["):
            section = line.strip("[]").partition(".")[0]
        elif is_value and (factor := factors.get(f"{section}_{key}")) is not None:
            number = float(value.replace("_", "")) * factor
            line = f"{key} = {int(number) if key == 'kv_tokens' else number}"
        lines.append(f'name = "{name}"' if key == "name" else line)
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines))
    return str(path)


def of_slow_memory(folder: Path) -> str:
    """Computes prompts about as fast, and reads weights and KV at a third of the speed."""
    return device(
        folder,
        "slow-memory",
        prefill_fixed_s=3.0,
        decode_fixed_s=3.0,
        decode_context_token_s=3.0,
        decode_request_s=3.0,
        memory_kv_tokens=0.5,
    )


def elastic(**options: object) -> System:
    section = {"profile": H100, "ttft_s": LIMITS[0], "tpot_s": LIMITS[1], **options}
    system = System(
        kind="banaserve",
        colocated=4,
        migration="elastic",
        history_s=300.0,
        control_s=1.0,
        migration_options=section,
    )
    limits = replace(system.control_limits, concurrent=1000, per_minute=1000)
    return replace(system, control_limits=limits)


def rows(rate_per_s: float, prompt: int, output: int, duration_s: float):
    draws = random.Random(f"{rate_per_s} {prompt} {output}")
    at_s, found = 0.0, []
    while (at_s := at_s + draws.expovariate(rate_per_s)) < duration_s:
        found.append((at_s, draws.randint(prompt // 2, 3 * prompt // 2), draws.randint(1, output)))
    return found


def run(system: System, load: list[tuple[float, int, int]]):
    requests = [SimRequest(number, *row) for number, row in enumerate(load)]
    found = tallied(profiles.load(H100), system, requests)
    return summary(found, LatencyLimits(*LIMITS)), found.steps


# ---- the plan of roles


@pytest.mark.room
@pytest.mark.parametrize("slow", [("c0", "c1"), ("c2", "c3")])
def test_who_reads_memory_slowly_prefills_where_the_plan_knows_it(
    slow: tuple[str, str], tmp_path: Path
) -> None:
    """Under a policy that takes all for what most are, and under one that knows them."""
    load, devices = rows(8.0, 6000, 300, 60.0), dict.fromkeys(slow, of_slow_memory(tmp_path))
    blind, _ = run(replace(elastic(devices="one"), devices=devices), load)
    own, steps = run(replace(elastic(), devices=devices), load)
    assert own["num_finished"] == blind["num_finished"] == len(load)
    assert own["goodput_fraction"] > blind["goodput_fraction"] + 0.1
    assert own["goodput_fraction"] > 0.9
    switched = [(words.split()[1], words.split()[5]) for _, words in steps if "switch" in words]
    assert set(slow) <= {name for name, role in switched if role == "prefill"}
    assert not {name for name, role in switched if role == "decode"} & set(slow)


@pytest.mark.room
def test_where_all_are_alike_the_plan_is_the_same(tmp_path: Path) -> None:
    """Whether they are the cluster's own device, or all have a file of their own that says so."""
    load = rows(5.2, 12_000, 200, 40.0)
    plain, plain_steps = run(elastic(), load)
    same = device(tmp_path, "the-same")
    devices = {f"c{number}": same for number in range(4)}
    for system in (replace(elastic(), devices=devices), elastic(devices="one")):
        again, steps = run(system, load)
        assert [(at_s, words) for at_s, words in steps] == list(plain_steps)
        assert again == plain
    assert plain_steps


def view(name: str, kind: str = "", role: Role = Role.COLOCATED, **facts: float) -> InstanceView:
    own = replace(profiles.load(H100).facts, profile=kind, **facts)
    report = InstanceReport(0, 0, 0.0, 0.0, 0.0)
    return InstanceView(InstanceId(name), role, True, report, 0, 0, 1000.0, own, step_tokens=2048)


@pytest.mark.parametrize(
    ("wanted", "order", "changed"),
    [
        ((2, 2, 0), ("slow", ""), {"a": "prefill", "b": "prefill", "c": "decode", "d": "decode"}),
        ((2, 2, 0), ("", "slow"), {"a": "decode", "b": "decode", "c": "prefill", "d": "prefill"}),
        ((1, 0, 3), ("slow", ""), {"b": "prefill"}),
        ((1, 0, 3), ("", "slow"), {"d": "prefill"}),
        ((3, 1, 0), ("slow", ""), {"a": "prefill", "b": "prefill", "c": "prefill", "d": "decode"}),
        ((0, 0, 4), ("slow", ""), {}),
    ],
)
def test_kinds_of_devices_get_roles_in_an_order(
    wanted: tuple[int, int, int], order: tuple[str, ...], changed: dict[str, str]
) -> None:
    views = [view("a", "slow"), view("b", "slow"), view("c"), view("d")]
    found = assign(Arrangement(*wanted, 2048), views, order)
    assert {str(name): role.value for name, role in found.items()} == changed


def test_orders_of_devices() -> None:
    assert orders([view("a"), view("b")]) == ((),)
    assert orders([view("a", "x"), view("b", "x")]) == ((),)
    assert set(orders([view("a", "x"), view("b")])) == {("", "x"), ("x", "")}
    of_three = orders([view(name, name) for name in "abc"])
    assert len(set(of_three)) == 6
    of_five = orders([view(name, name) for name in "abcde"])
    assert {order[0] for order in of_five} == {order[-1] for order in of_five} == set("abcde")
    assert all(sorted(order) == list("abcde") for order in of_five)


# ---- what devices are


def test_devices_of_one_cluster_have_one_model(tmp_path: Path) -> None:
    usual = profiles.load(H100)
    with pytest.raises(UserError, match="profiles of two models"):
        device_of("opt-13b-a100", usual)
    with pytest.raises(UserError, match="unknown profile: h101"):
        device_of("h101", usual)
    other = device(tmp_path, "other-blocks", memory_block_tokens=2.0).replace("\n", "")
    text = Path(other).read_text().replace("block_tokens = 32.0", "block_tokens = 32")
    Path(other).write_text(text)
    with pytest.raises(UserError, match="blocks of 32 tokens"):
        device_of(other, usual)
    with pytest.raises(UserError, match="instance with a device of its own"):
        SimCluster(Timeline(), usual, replace(elastic(), devices={"c9": H100}))
    with pytest.raises(UserError, match="give own or one"):
        ElasticOptions(devices="none")


def test_an_instance_has_the_memory_and_the_speed_of_its_device(tmp_path: Path) -> None:
    usual = profiles.load(H100)
    slow, fast = of_slow_memory(tmp_path), device(tmp_path, "fast", prefill_token_s=0.5)
    system = System(kind="banaserve", prefill=1, decode=2, devices={"d1": slow, "p0": fast})
    (cell,) = SimCluster(Timeline(), usual, system).cells
    views = {str(name): one for name, one in cell.view().instances.items()}
    assert {name: one.kv_tokens for name, one in views.items()} == {
        "p0": 400_000,
        "d0": 400_000,
        "d1": 200_000,
    }
    facts = {name: one.facts for name, one in views.items()}
    assert (facts["d0"].profile, facts["d0"].speed) == ("", 1.0)
    assert (facts["d1"].profile, facts["p0"].profile) == (slow, fast)
    assert facts["d1"].speed < 0.6 < 1.0 < facts["p0"].speed
    assert relative_speed(usual, usual) == 1.0
    learnt = {name: one.report.step_coefficients for name, one in views.items()}
    assert learnt["d1"][3] == pytest.approx(3 * learnt["d0"][3])
    assert learnt["p0"][1] == pytest.approx(learnt["d0"][1] / 2)
    # A request that fits one of them only is one too large.
    cell.submit(SimRequest(1, 0.0, 250_000, 10))
    assert cell.num_refused == 1


# ---- moves of modules


def loaded(name: str, busy: float, **facts: float) -> InstanceView:
    own = replace(profiles.load(H100).facts, **facts)
    blocks = own.memory_bytes // (own.block_tokens * own.num_layers * own.layer_token_bytes) // 2
    report = InstanceReport(
        20, 0, busy, busy, 0.0, 1.0, 0.05, num_kv_blocks=blocks, step_tokens=64.0
    )
    return InstanceView(InstanceId(name), Role.DECODE, True, report, 20, 0, 1000.0, own)


def planned(*views: InstanceView, policy: str = "repaired") -> list[MoveModule]:
    cluster = ClusterView(100.0, {view.id: replace_report(view) for view in views})
    plan = migrations.make_named(policy, overlap_fraction=1.0).plan(cluster)
    return [step.action for step in plan.steps if isinstance(step.action, MoveModule)]


def replace_report(one: InstanceView) -> InstanceView:
    assert one.report is not None
    return replace(one, report=replace(one.report, at_s=100.0))


def test_modules_go_to_the_faster_of_two_that_are_as_idle() -> None:
    full = loaded("d0", 0.95)
    for slow, fast in (("d1", "d2"), ("d2", "d1")):
        moves = planned(full, loaded(slow, 0.05, speed=0.2), loaded(fast, 0.05))
        assert {str(move.guest) for move in moves} == {fast}


@pytest.mark.parametrize("speed", [0.5, 1.0, 3.0])
def test_only_how_fast_they_are_against_each_other_counts(speed: float) -> None:
    loads = (("d0", 0.95), ("d1", 0.05), ("d2", 0.2))
    alike = planned(*(loaded(name, busy, speed=speed) for name, busy in loads))
    assert alike == planned(*(loaded(name, busy) for name, busy in loads))
    assert alike


def test_a_slow_guest_makes_its_host_wait_and_is_loaded_longer(tmp_path: Path) -> None:
    """In the simulator: half the layers of a host beside one of half its speed."""
    everything = ("prefill_fixed_s", "prefill_token_s", "prefill_pair_s")
    everything += ("decode_fixed_s", "decode_context_token_s", "decode_request_s")
    half = device(tmp_path, "half", **dict.fromkeys(everything, 2.0))
    took_s = {}
    for kind, devices in (("alike", {}), ("slow", {"d1": half})):
        system = System(kind="banaserve", prefill=1, decode=2, devices=devices)
        (cell,) = SimCluster(Timeline(), profiles.load(H100), system).cells
        host, guest = cell.instances[InstanceId("d0")], cell.instances[InstanceId("d1")]
        host.busy_fraction = 0.5
        cell.placing.put([placement(host.facts)])
        took_s[kind] = (host.engine.costs.relief, guest.engine.costs.guest_share)
    assert took_s["alike"] == (0.0, pytest.approx(0.25))
    # A half of the step takes twice as long there.
    assert took_s["slow"] == (pytest.approx(-0.5), pytest.approx(0.5))


def placement(facts: InstanceFacts):
    from banaserve.base.types import Module, ModulePlacement

    half = Module(0, facts.num_layers // 2)
    return ModulePlacement(half, InstanceId("d0"), InstanceId("d1"), 1, 0.0, 1000)


def test_who_may_pair_is_a_matter_of_the_two() -> None:
    """Devices may differ in memory and speed, and models may not."""
    small = loaded("d1", 0.1, memory_bytes=30_000_000_000, speed=0.3, profile="small")
    other = loaded("d2", 0.1, num_layers=16)
    views = [loaded("d0", 0.9), small, other]
    found = project(ClusterView(0.0, {one.id: one for one in views}), views, 10.0)
    d0, d1, d2 = (found[InstanceId(name)] for name in ("d0", "d1", "d2"))
    assert may_pair(d0, d1, heads=False) is may_pair(d1, d0, heads=True) is None
    assert may_pair(d0, d2, heads=False) is not None


# ---- routing


def test_routing_by_predicted_times_sends_fewer_streams_to_a_slow_one(tmp_path: Path) -> None:
    load, devices = rows(12.0, 500, 300, 40.0), {"d1": of_slow_memory(tmp_path)}
    slo = {"ttft_s": LIMITS[0], "tpot_s": LIMITS[1]}
    usual, _ = run(System(kind="banaserve", prefill=1, decode=2, devices=devices), load)
    system = System(
        kind="banaserve",
        prefill=1,
        decode=2,
        devices=devices,
        routing="slo_aware",
        routing_options=slo,
    )
    own, _ = run(system, load)
    assert own["num_finished"] == usual["num_finished"] == len(load)
    assert own["tpot_mean_s"] < 0.9 * usual["tpot_mean_s"]
