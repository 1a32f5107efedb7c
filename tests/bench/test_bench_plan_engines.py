"""`bench plan` on engines: its cells and arrangements, verdicts and resumption; no engine runs."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.confirm.engines import EngineOutcome, small_words
from banaserve_bench.plan.search.candidates import colocated, split
from banaserve_bench.plan.search.gain import Answer
from banaserve_bench.plan.search.trial import Device
from banaserve_bench.results import result
from banaserve_bench.results.statistics import Interval
from benchmarks.plan.blind_cells import BlindCell, blind_cells, question
from benchmarks.plan.blind_records import BlindRecord, samples_of
from benchmarks.plan.command import main
from benchmarks.plan.cpu_arrangements import CpuArrangement, cpu_arrangements, foreseen_system
from benchmarks.plan.foreseen import FIGURES, GOODPUT, ForeseenSystem, kept
from benchmarks.plan.loads import even_lengths, saturation_per_s
from benchmarks.plan.paced import Start, advised_record, starts_of
from benchmarks.results_page import RESULTS, asked

PROFILE = load("smollm2-135m-cpu")
PREDICTED = dict.fromkeys(FIGURES, 1.0)
CELL = BlindCell("llama-3.1-8b-h100", 2, 800, 20, 0.4, 8.0, 3.0)


def served(name: str, goodput: float | None, late: float = 0.0) -> ForeseenSystem:
    one = ForeseenSystem(name, PREDICTED)
    if goodput is None:
        return one
    return one.served(EngineOutcome({**PREDICTED, GOODPUT: goodput}, late))


def record(
    told: Answer, colocated: float | None, split: float | None, late: float = 0.0
) -> BlindRecord:
    return BlindRecord(
        num_requests=100,
        rate_per_s=10.0,
        duration_s=10.0,
        limits=LatencyLimits(),
        dilation=2.0,
        told=told,
        gain=Interval(1.0, 1.2, 1.4),
        colocated=served("2 colocated", colocated),
        split=served("split 1:1", split, late),
    )


def test_the_cells_have_each_level_as_often_as_any_other_and_fit_their_engines() -> None:
    cells = blind_cells()
    assert len({one.name for one in cells}) == len(cells) == 24
    for part, often in ((slice(0, 1), 8), (slice(1, 2), 8), (slice(2, 4), 6), (slice(4, 5), 8)):
        assert set(Counter(one[part] for one in cells).values()) == {often}
    assert cells == blind_cells()
    for one in cells:
        longest = 1.2 * (one.prompt_tokens + one.output_tokens)
        assert longest <= load(one.profile).model.max_context_tokens


def test_a_question_asks_of_loads_at_a_share_of_saturation_and_of_multiples_of_idle_times() -> None:
    asked_of = question(CELL, 100.0)
    device = Device(load(CELL.profile))
    lengths = even_lengths(CELL.prompt_tokens, CELL.output_tokens)
    most = saturation_per_s(device, colocated(2, store=False), lengths)
    loads = [asked_of.loads.first, *asked_of.loads.others]
    assert len({tuple(rows) for rows in loads}) == 11
    duration_s = 150 / (0.4 * most)
    assert sum(map(len, loads)) / len(loads) == pytest.approx(150, rel=0.2)
    assert max(rows[-1].at_s for rows in loads) < duration_s < 100.0 / CELL.dilation
    short = question(CELL, 2.0)
    assert max(rows[-1].at_s for rows in short.loads.others) < 2.0 / CELL.dilation
    idle = load(CELL.profile)
    prefill, decode = idle.prefill, idle.decode_small
    ttft_s = prefill.fixed_s + 800 * prefill.token_s + 800**2 * prefill.pair_s
    tpot_s = decode.fixed_s + decode.request_s + 800 * decode.context_token_s
    assert asked_of.limits.ttft_s == pytest.approx(8 * ttft_s)
    assert asked_of.limits.tpot_s == pytest.approx(3 * tpot_s)


@pytest.mark.parametrize(
    ("told", "colocated", "split", "late", "words"),
    [
        (Answer.YES, 0.5, 0.6, 0.0, "right"),
        (Answer.YES, 0.8, 0.83, 0.0, "wrong"),
        (Answer.YES, 0.8, 0.84, 0.0, "right"),
        (Answer.NO, 0.8, 0.83, 0.0, "right"),
        (Answer.NO, 0.8, 0.84, 0.0, "wrong"),
        (Answer.NO, 0.0, 0.0, 0.0, "right"),
        (Answer.YES, 0.0, 0.01, 0.0, "right"),
        (Answer.CANNOT_TELL, 0.8, 0.9, 0.0, "can't tell"),
        (Answer.YES, 0.5, 0.6, 0.031, "void"),
        (Answer.YES, 0.5, 0.6, 0.03, "right"),
        (Answer.YES, 0.5, None, 0.0, "not run"),
    ],
)
def test_advice_is_judged_by_the_goodput_on_engines(
    told: Answer, colocated: float, split: float | None, late: float, words: str
) -> None:
    assert record(told, colocated, split, late).words == words


def test_figures_count_cells_and_leave_void_ones_out_of_errors() -> None:
    records = [
        record(Answer.YES, 0.5, 0.6),
        record(Answer.NO, 0.5, 0.6),
        record(Answer.YES, 0.6, 0.6),
        record(Answer.CANNOT_TELL, 0.6, 0.5),
        record(Answer.YES, 0.5, 0.6, late=0.5),
        record(Answer.YES, 0.5, None),
    ]
    found = {name: values for name, (values, _) in samples_of(records).items()}
    counts = {name: value for name, [value, *more] in found.items() if not more}
    assert counts == {
        "cells": 5,
        "void": 1,
        "pays": 2,
        "right": 1,
        "can't tell": 1,
        "wrong yes": 1,
        "wrong no": 1,
        "estimate right": 2,
    }
    assert found["goodput error"] == pytest.approx([50, 40, 50, 40, 40, 40, 40, 50])
    assert found["TTFT error"] == [0.0] * 8
    assert "TTFT error" not in samples_of(records[-1:])


def test_one_start_serves_all_loads_of_a_system_that_are_due() -> None:
    cells = [CELL, CELL._replace(fraction=0.6), CELL._replace(instances=3)]
    late, done, new = (
        record(Answer.YES, 0.5, 0.6, late=0.5),
        record(Answer.YES, 0.5, 0.6),
        record(Answer.YES, None, None),
    )
    known = {cells[0].name: late, cells[1].name: new, cells[2].name: done}
    pace = (CELL.profile, CELL.dilation)
    assert starts_of(cells, known) == {
        Start(*pace, "split 1:1"): [(cells[0], "split"), (cells[1], "split")],
        Start(*pace, "2 colocated"): [(cells[1], "colocated")],
    }


def test_advice_on_a_cell_is_kept_as_it_was_before_engines_ran() -> None:
    found = advised_record(CELL, question(CELL, 1.0), lambda words: None)
    assert found.told is Answer.NO
    assert found.colocated.name.startswith("2 colocated")
    assert found.split.name.startswith("split 1:1")
    assert found.colocated.is_due
    assert found.split.predicted[GOODPUT] > 0
    again = msgspec.json.decode(msgspec.json.encode(found), type=BlindRecord)
    assert again == found
    assert again.told is Answer.NO


def test_a_file_of_something_else_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    shutil.copy(RESULTS / "pacing.json", path)
    with pytest.raises(UserError, match=r"other\.json is no result of bench plan with part paced"):
        main(["--part", "paced", "--cells", "1", "--json", str(path)])
    with pytest.raises(UserError, match="--load-s 0: give more than 0"):
        main(["--part", "cpu", "--load-s", "0"])


def test_there_are_twelve_arrangements_of_six_systems_that_engines_of_this_machine_can_be() -> None:
    found = [*cpu_arrangements()]
    assert len({one.name for one in found}) == len(found) == 12
    systems = [one for one, _ in groupby(found, lambda one: one.candidate)]
    assert len(systems) == 6
    for one in systems:
        config = parse_serve_argv(["smollm2-135m", *small_words(one), "--port", "4321"])
        assert (config.threads_per_instance, config.pace) == (1, "")
        assert config.vllm_argv == ("--max-num-batched-tokens", str(one.step_tokens))


def test_engines_beside_busy_ones_are_slower_by_the_time_in_which_these_are_busy() -> None:
    device = Device(PROFILE)
    # An engine that decodes from 0 to the end, and one that is idle.
    rows = [Arrival(0.0, 16, 100)]
    systems = [colocated(1, store=False), colocated(2, store=False), split(1, 1, 2048)]
    for candidate, slower in zip(systems, (1.0, 1.25, 1.25), strict=True):
        one = CpuArrangement(candidate, 16, 100, 0.5)
        alone = foreseen_system(device, one, rows, 1.0).predicted
        beside = foreseen_system(device, one, rows, 1.5).predicted
        ratio = beside["tpot_mean_s"] / alone["tpot_mean_s"]
        assert ratio == pytest.approx(slower, abs=0.01)


def test_requests_of_an_arrangement_come_at_a_share_of_what_this_machine_can_do() -> None:
    one = next(cpu_arrangements())
    slow = replace(
        PROFILE,
        prefill=replace(
            PROFILE.prefill,
            **{
                name: 2 * getattr(PROFILE.prefill, name)
                for name in ("fixed_s", "token_s", "pair_s")
            },
        ),
    )
    usual, fewer = (len(one.rows(Device(profile), 200.0, 1.5)) for profile in (PROFILE, slow))
    assert 0.5 < fewer / usual < 0.9
    two = one._replace(candidate=colocated(2, store=False))
    alone, beside = (len(two.rows(Device(PROFILE), 400.0, factor)) for factor in (1.0, 2.0))
    assert beside / alone == pytest.approx(0.5, rel=0.15)
    assert kept(dict.fromkeys((*FIGURES, "other"), 1.0)) == PREDICTED


def test_the_page_of_results_tells_the_command_of_a_part() -> None:
    runs = result.read(RESULTS / "plan.json")
    part = msgspec.structs.replace(runs, options={"part": "paced", "cells": 24})
    assert [asked(one).command for one in (runs, part)] == [
        "make bench NAME=plan",
        "make bench NAME=plan ARGS='--part paced'",
    ]
