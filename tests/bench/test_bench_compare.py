"""The systems that are compared: ``serve`` has their options, and they mean what they say."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from banaserve.base import models
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.control.routing import registry
from banaserve_bench.compare import command
from banaserve_bench.compare import options as compare_options
from banaserve_bench.compare.result import (
    SystemRun,
    Workload,
    as_result,
    check_folder,
    complete_runs,
    folder_of,
    kept_path,
)
from banaserve_bench.compare.systems import REFERENCE, ServerSystem, chosen_systems, known_systems
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.report.plots import grids_of
from banaserve_bench.report.report import systems_of, warnings_of
from banaserve_bench.report.tables import serving_table
from banaserve_bench.results import result
from banaserve_bench.serving.cell import CellId, Sent
from banaserve_bench.serving.summary import Slo, Summary, summarize
from banaserve_bench.serving.timeline import InstanceTimeline
from banaserve_route.policies import registry as replica_policies


def config(system: ServerSystem) -> ServeConfig:
    parsed = parse_serve_argv(["smollm2-135m", *system.options])
    assert parsed.vllm_argv == ()
    assert parsed.routing_policy in registry.names()
    return parsed


@pytest.mark.parametrize("num_instances", [2, 4])
def test_every_system_has_the_same_engines(num_instances: int) -> None:
    for name, system in known_systems(num_instances).items():
        assert system.name == name
        parsed = config(system)
        assert (
            parsed.prefill + parsed.decode + parsed.colocated
        ) * system.num_servers == num_instances
        assert parsed.kv_store == (name not in _WITHOUT_STORE)
        assert parsed.migration == (name == "banaserve")
        assert parsed.orchestrator.mode == ("on" if name == "banaserve" else "off")


_WITHOUT_STORE = (
    "colocated-round-robin",
    "colocated-least-requests",
    "colocated-prefix-affinity",
    "banaserve-no-store",
)


def test_pairs_differ_in_one_thing() -> None:
    systems = known_systems(2)
    ours, still = config(systems["banaserve"]), config(systems["banaserve-no-migration"])
    assert (ours.routing_policy, ours.prefill) == (still.routing_policy, still.prefill)
    stored = set(systems["banaserve-colocated"].options)
    assert set(systems["banaserve-no-store"].options) - stored == {"--no-kv-store"}


def test_the_reference_is_one_plain_engine() -> None:
    parsed = config(REFERENCE)
    assert (parsed.colocated, parsed.kv_store) == (1, False)


def test_chosen() -> None:
    assert [one.name for one in chosen_systems([], 2)] == list(known_systems(2))
    given = chosen_systems(["static-pd", "mine=--colocated 3 --routing-option 'a=b c'"], 2)
    assert [one.name for one in given] == ["static-pd", "mine"]
    assert given[1].options == ("--colocated", "3", "--routing-option", "a=b c")
    with pytest.raises(UserError, match="did you mean static-pd"):
        chosen_systems(["static"], 2)
    with pytest.raises(UserError, match="--system mine='--pd: No closing quotation"):
        chosen_systems(["mine='--pd"], 2)
    with pytest.raises(UserError, match="each system once"):
        chosen_systems(["static-pd", "static-pd=--pd 1:1"], 2)


def test_what_is_complete_makes_a_result(tmp_path: Path) -> None:
    given = asked(tmp_path)
    systems = list(known_systems(2).values())[:2]
    workload = Workload("random", cast(Any, None), _PLAN)
    timeline = InstanceTimeline()
    timeline.add(0.0, page(p0=(2, "prefill"), d0=(1, "decode")))
    timeline.add(1.0, page(p0=(0, "decode"), d0=(5, "decode"), d1=(1, "decode")))
    run = SystemRun(
        [cell(1.0, seed) for seed in (0, 1)],
        2.5,
        checked=2,
        equal=1,
        memory_bytes=9,
        timeline=timeline,
    )
    path = kept_path(given, systems[1], workload)
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode(run))
    ran = complete_runs(given, systems, workload)
    assert ran == {systems[1].name: run}
    record = as_result(given, systems, workload, ran, {}, datetime(2026, 1, 1, tzinfo=UTC))
    assert record.notes[0] == f"INCOMPLETE: {systems[0].name} has not run"
    figures = record.figures
    name = systems[1].name
    assert figures[f"{name}.equal_answers"].samples == [0.5]
    assert figures[f"{name}.server_cpu_s"].samples == [2.5]
    assert len(figures[f"{name}.ttft_p50_at_1rps"].samples) == 2
    assert f"{name}: p0 became decode after 1 s (it was prefill)" in record.notes
    assert warnings_of(record)[0] == f"INCOMPLETE: {systems[0].name} has not run."
    cells = systems_of(record)
    assert serving_table(cells)[:2] == [["figure", "1 requests/s"], ["requests", "2"]]
    grids = grids_of(cells, record.raw["timelines"])
    drawn = {one.name: list(one.points) for one in grids[-1].plots[-1].series}
    assert drawn == {"d0": [(0, 1), (1, 5)], "d1": [(0, 0), (1, 1)], "p0": [(0, 2), (1, 0)]}


def test_what_is_complete_answers_no_other_question(tmp_path: Path) -> None:
    given = asked(tmp_path)
    workload = Workload("random", cast(Any, None), _PLAN)
    [mine] = chosen_systems(["mine=--colocated 2"], 2)
    check_folder(given, [mine], [workload])
    folder_of(given, mine, workload)
    result.write_whole(kept_path(given, mine, workload), b"{}")
    check_folder(given, [mine], [workload])
    more = argparse.Namespace(**{**vars(given), "requests": 64})
    with pytest.raises(UserError, match="holds a run with other options"):
        check_folder(more, [mine], [workload])
    [other] = chosen_systems(["mine=--colocated 4"], 2)
    with pytest.raises(UserError, match="mine/random holds a run with other options"):
        check_folder(given, [other], [workload])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seeds", "0,0"), "--seeds: give each once"),
        (("--rps", "1,1"), "each once"),
        (("--requests", "0"), "--requests: give 1 or more"),
        (("--requests", "2", "--duration", "3"), "give --requests or --duration"),
        (("--duration", "0"), "give more than 0 s"),
        (("--duration", "nan"), "give a number, 0 or more"),
        (("--instances", "1"), "--instances 1: give 2 or more"),
        (("--check", "-1"), "--check -1: give 0 or more"),
        (("--workload", "random@x"), "give rates as in random@1,2,4"),
        (("--workload", "random", "--workload", "random@1"), "--workload random: once"),
        (("--dilate", "2"), "give --pace PROFILE with it"),
        (("--pace", "opt-13b-a100"), "leave out --model"),
    ],
)
def test_no_cell_is_empty_or_asked_twice(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        command.main(["--out", str(tmp_path), "--model", "/nowhere", *options])


def test_prefixes_are_followed_by_a_balancer_over_plain_engines() -> None:
    system = known_systems(3)["colocated-prefix-affinity"]
    parsed = config(system)
    assert (parsed.colocated, parsed.kv_store, system.num_servers) == (1, False, 3)
    assert system.policy in replica_policies.names()
    assert "3 servers behind route --policy cache_aware" in system.told()


def test_a_start_of_a_server_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def interrupted(*_: Any) -> Iterator[None]:
        signal.raise_signal(signal.SIGINT)
        yield

    model = models.ResolvedModel("m", str(tmp_path), "m")
    monkeypatch.setattr(command, "_resolved", lambda given: model)
    monkeypatch.setattr(command.Words, "of", lambda folder: None)
    monkeypatch.setattr(command, "banaserve_server", interrupted)
    with pytest.raises(UserError, match="interrupted: what is complete is kept"):
        command.main(["--out", str(tmp_path), "--workload", "random"])


def test_no_more_answers_are_compared_than_there_are() -> None:
    assert compare_options.parse(["--requests", "3"], None).check == 3
    assert compare_options.parse([], None).check == 4


def test_a_file_is_kept_under_its_own_name(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x.jsonl", tmp_path / "b" / "x.jsonl"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"input_length": 3, "output_length": 2}\n')
    words = cast(Any, None)
    given = compare_options.parse(["--workload", str(paths[0]), "--out", str(tmp_path)], None)
    [one] = compare_options.workloads(given, compare_options.plans(given), words)
    assert one.name == "x.jsonl"
    assert kept_path(given, REFERENCE, one).is_relative_to(tmp_path / "systems")
    both = compare_options.parse([f"--workload={path}" for path in paths], None)
    with pytest.raises(UserError, match="two files of the same name"):
        compare_options.workloads(both, compare_options.plans(both), words)


_PLAN = compare_options.plans(compare_options.parse(["--workload", "random@1"], None))["random"]


def asked(out: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=out,
        model="m",
        pace=None,
        profile=None,
        dilate=1.0,
        instances=2,
        requests=1,
        duration=None,
        max_output_tokens=None,
        slo_ttft=None,
        slo_tpot=None,
        prompt_tokens=1,
        prefix_tokens=1,
        prefixes=1,
        sessions=1,
        output_tokens=2,
        seeds=(0, 1),
        warmup=0.0,
        check=2,
        serve_option=[],
    )


def page(**instances: tuple[int, str]) -> str:
    lines = []
    for name, (legs, role) in instances.items():
        lines.append(f'banaserve_requests_in_flight{{instance_id="{name}"}} {legs}')
        lines.append(f'banaserve_instance_ready{{instance_id="{name}",role="{role}"}} 1')
    return "\n".join(lines) + "\n"


def cell(load: float, seed: int) -> Summary:
    record = RequestRecord(
        id="r",
        due_at_s=0.0,
        sent_at_s=0.0,
        first_token_at_s=0.1,
        token_at_s=[0.1, 0.2],
        ended_at_s=0.2,
        completion_tokens=2,
    )
    sent = Sent(
        is_warm_up=False, source="", prompt_tokens=1, output_tokens=2, is_cut=False, record=record
    )
    return summarize(CellId(load, seed), [sent], Slo(), 0.0)


def test_prompts_that_a_server_does_not_count_have_the_weight_of_what_was_sent() -> None:
    assert cell(1.0, 0).metrics["weighted_tokens_per_s"] == pytest.approx((1 + 2 * 2) / 0.2)
