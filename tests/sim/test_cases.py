"""Every scenario case reaches its goal; wrong cases and profiles start nothing."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile
from banaserve.orchestrator.control.costs.steps import StepCosts, run_s
from banaserve_bench.simulation import case
from banaserve_bench.simulation.run import judged, simulate
from banaserve_bench.simulation.workload import Lengths, LoadPhase, drawn
from depth import chosen_seed

pytestmark = pytest.mark.deep

NAMES = [
    "bursts",
    "death-in-migration",
    "decode-flood",
    "long-context-wave",
    "oscillating-load",
    "prefill-flood",
    "slow-instance",
]


def run_case(one: case.Case, seed: int | None = None) -> dict[str, Any]:
    """Every system of a case, one after the other, and its goals."""
    used = one.seed if seed is None else seed
    systems = {
        name: simulate(one.profile, system, one.requests(used), one.limits, one.events)
        for name, system in one.systems.items()
    }
    return judged(one, used, systems)


def test_the_cases_that_come_with_the_package() -> None:
    assert case.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_case_reaches_its_goal(name: str) -> None:
    result = run_case(case.read(name))
    assert result["is_reached"], result["goals"]
    assert result["time"].startswith("simulated")
    assert all(r["time"].startswith("simulated") for r in result["systems"].values())
    assert json.loads(json.dumps(result)) == result


def test_another_seed_is_another_run() -> None:
    bursts = case.read("bursts")
    first, again, other = (run_case(bursts, seed) for seed in (1, 1, 2))
    assert first == again
    assert first["systems"] != other["systems"]


def changed(tmp_path: Path, old: str, new: str, name: str = "prefill-flood") -> str:
    text = (case.BUILT_IN / f"{name}.toml").read_text()
    assert old in text
    path = tmp_path / "case.toml"
    path.write_text(text.replace(old, new, 1))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seed = 1", "sed = 1", "did you mean seed"),
        ("seed = 1", "", "seed is missing"),
        ("seed = 1", "seed = 1.5", "seed is 1.5"),
        ("seed = 1", "seed = 1\nrepeat = 0", "repeat is 0"),
        ("seed = 1", "seed = ", "is not TOML"),
        ('profile = "opt-13b-a100"', 'profile = "opt-13b"', "did you mean opt-13b-a100"),
        ("rate_per_s = 24", "rate_per_s = -1", "phase[0]: rate_per_s is -1"),
        ("rate_per_s = 24", "rate = 24", "did you mean rate_per_s"),
        ("rate_per_s = 24", "", "missing required field `rate_per_s`"),
        ("rate_per_s = 24", 'rate_per_s = "24"', "phase[0]: Expected `float`, got `str`"),
        ('kind = "fixed", mean = 16', 'kind = "fix", mean = 16', "phase[0].output"),
        ('kind = "fixed", mean = 16', 'kind = "fixed"', "mean is 0"),
        ('kind = "fixed", mean = 16', 'kind = "fixed", mean = 1e300', "mean is 1e+300"),
        ('kind = "fixed", mean = 16', 'kind = "uniform", high = 1.5', "Expected `int`"),
        ("ttft_s = 2.0", "ttft_s = 0", "limits: ttft_s is 0"),
        ("[systems.static]", "[systems.statik]", "did you mean static"),
        ("decode = 2", "decode = -2", "systems.static: decode is -2"),
        ("decode = 2", "decode = 2\nlimits = 3", "systems.static.limits is no section"),
        ("decode = 2", 'decode = 2\ncontrol_s = "2"', "systems.static: '<=' not supported"),
        ('metric = "goodput_fraction"', 'metric = "goodput"', "did you mean goodput_fraction"),
        ("at_least = 0.9", "", "give one of at_least and at_most"),
        ('relative_to = "static"', 'relative_to = "colocated"', "which is no system here"),
    ],
)
def test_a_wrong_case_names_the_file_and_the_key(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    with pytest.raises(UserError) as failure:
        case.read(changed(tmp_path, old, new))
    assert words in str(failure.value)
    assert ("unknown profile" if old.startswith("profile") else "case.toml") in str(failure.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('instance = "d0"', 'instance = "d9"', "unknown instance"),
        ('instance = "d0"', "", "names an instance"),
        ('kind = "slow"', 'kind = "slw"', "did you mean slow"),
        ("factor = 3", "factor = 0", "factor is 0"),
        ("factor = 3", "factor = 3\nback_after_s = -1", "back_after_s is -1"),
        ("factor = 3", 'factor = 3\nback_after_s = "1"', "event[0]: Expected `float | null`"),
    ],
)
def test_a_wrong_event_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(UserError) as failure:
        case.read(changed(tmp_path, old, new, "slow-instance"))
    assert words in str(failure.value)


def test_the_profiles_that_come_with_the_package() -> None:
    assert profile.names() == [
        "llama-13b-a100",
        "llama-3.1-70b-h100-tp4",
        "llama-3.1-8b-h100",
        "opt-13b-a100",
        "smollm2-135m-cpu",
    ]
    opt = profile.load("opt-13b-a100")
    assert opt.model.token_bytes == 819_200
    assert opt.model.layer_weight_bytes == 629_278_720
    assert opt.facts.memory_bytes == (
        25_171_148_800 + 2 * opt.model.fixed_weights + 66_144 * 819_200
    )


def test_the_llama_estimate_follows_its_derivation() -> None:
    opt, llama = profile.load("opt-13b-a100"), profile.load("llama-13b-a100")
    ratio = llama.model.layer_weights / opt.model.layer_weights
    assert ratio == pytest.approx(1.0082, abs=1e-4)
    assert llama.prefill.token_s == pytest.approx(opt.prefill.token_s * ratio, rel=1e-4)
    weights_s = 25.4e9 / 2e12
    assert llama.decode_small.fixed_s == pytest.approx(
        opt.decode_small.fixed_s + weights_s * (ratio - 1), abs=1e-5
    )
    assert llama.decode_small.context_token_s == opt.decode_small.context_token_s


def test_the_estimate_of_four_devices_follows_its_derivation() -> None:
    told, model = (
        profile.load("llama-3.1-70b-h100-tp4"),
        profile.load("llama-3.1-70b-h100-tp4").model,
    )
    flops, reads = 4 * 0.48 * 989e12, 4 * 0.75 * 3.35e12
    layers, head = 80 * model.layer_weights, model.fixed_weights / 2
    assert model.layer_weights == 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert model.fixed_weights == 2 * 128256 * 8192
    reduced_s = 160 * 16_384 * 1.5 / 350e9
    assert told.prefill.token_s == pytest.approx(2 * layers / flops + reduced_s, rel=0.01)
    assert told.prefill.pair_s == pytest.approx(2 * 8192 * 80 / (4 * 0.40 * 989e12), rel=0.01)
    fixed_s = 2 * (layers + head) / reads + 0.5e-3 + 160 * 9e-6
    assert told.decode_small.fixed_s == pytest.approx(fixed_s, rel=0.01)
    assert told.decode_small.context_token_s == pytest.approx(
        told.model.token_bytes / reads, rel=0.01
    )
    request_s = 2 * (layers + head) / flops + 160 * 0.13e-6
    assert told.decode_small.request_s == pytest.approx(request_s, rel=0.01)
    room = 4 * (0.9 * 80e9 - 3.5e9) - 2 * (layers + model.fixed_weights)
    assert told.memory.kv_tokens == pytest.approx(room / told.model.token_bytes, rel=0.01)


def test_the_profile_of_this_engine_gives_the_runs_that_it_was_made_of() -> None:
    costs = StepCosts(profile.load("smollm2-135m-cpu"))
    long_s = costs.mixed_s(2048, 2048**2, 0, 0)[0]
    long_s += costs.mixed_s(1952, 1952 * (1952 + 2 * 2048), 0, 0)[0]
    assert long_s == pytest.approx(36.6, rel=0.1)
    assert costs.mixed_s(768, 768**2, 0, 0)[0] == pytest.approx(3.80, rel=0.1)
    for batch, run_took_s in ((1, 3.55), (8, 5.65), (32, 11.07)):
        first_s, growth_s, _ = costs.decode_run(batch, 16 * batch)
        took_s = costs.mixed_s(16 * batch, 16**2 * batch, 0, 0)[0] + run_s(first_s, growth_s, 31)
        assert took_s == pytest.approx(run_took_s, rel=0.1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kv_tokens = 66_144", "kv_tokens = 0", "memory.kv_tokens is 0"),
        ("kv_tokens = 66_144", "kv_tokens = 6.5", "give a whole number"),
        ("kv_tokens = 66_144", "kv_token = 66_144", "did you mean kv_tokens"),
        ("token_s = 0.10191e-3", "token_s = nan", "prefill.token_s is nan"),
        ("token_s = 0.10191e-3", 'token_s = "fast"', "prefill.token_s is 'fast'"),
        ("token_s = 0.10191e-3", "", "prefill.token_s is missing"),
        ("num_kv_heads = 40", "num_kv_heads = 7", "[model]"),
        ("[link]", "[lnik]", "did you mean link"),
        ("[decode.small]", "[decode.tiny]", "decode."),
    ],
)
def test_a_wrong_profile_names_the_file_and_the_key(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    text = (profile.BUILT_IN / "opt-13b-a100.toml").read_text()
    assert old in text
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as failure:
        profile.load(str(path))
    assert words in str(failure.value)


def test_drawn_arrivals_have_their_rate_and_their_bursts() -> None:
    lengths = Lengths(kind="lognormal", mean=200, high=10_000)
    gaps = {}
    for variation in (1.0, 3.0):
        phase = LoadPhase(
            duration_s=500, rate_per_s=10, prompt=lengths, output=lengths, variation=variation
        )
        times = [request.arrival_s for request in drawn([phase], 3)]
        assert times == sorted(times)
        assert len(times) == pytest.approx(5000, rel=0.1)
        between = [b - a for a, b in pairwise(times)]
        mean = sum(between) / len(between)
        variance = sum((gap - mean) ** 2 for gap in between) / len(between)
        gaps[variation] = variance**0.5 / mean
    assert gaps[1.0] == pytest.approx(1.0, rel=0.1)
    assert gaps[3.0] == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize(
    ("lengths", "low", "high", "mean"),
    [
        (Lengths(kind="fixed", mean=16), 16, 16, 16),
        (Lengths(kind="uniform", low=5, high=40), 5, 40, 22.5),
        (Lengths(kind="lognormal", mean=200, high=100_000), 1, 100_000, 200),
    ],
)
def test_lengths(lengths: Lengths, low: int, high: int, mean: float) -> None:
    draws = random.Random(chosen_seed(1))
    values = [lengths.draw(draws) for _ in range(4000)]
    assert low <= min(values)
    assert max(values) <= high
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)
