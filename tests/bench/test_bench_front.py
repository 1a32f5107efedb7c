"""What the front door's benchmark makes of its passes."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.front import _LONG, _SHORT, FrontSample, _figures, costs_us


def one(requests: int, chunks: int, cpu_s: float, ttft_s: float = 0.1) -> FrontSample:
    return FrontSample(requests, chunks, chunks, cpu_s, [ttft_s] * requests, [0.01, 0.02])


def spent(requests: int, tokens: int, request_us: float, chunk_us: float) -> FrontSample:
    chunks = requests * tokens
    return one(requests, chunks, (requests * request_us + chunks * chunk_us) / 1e6)


def test_requests_and_chunks_are_told_apart() -> None:
    passes = [spent(8, 4, 900, 40), spent(8, 48, 900, 40)]
    assert costs_us(passes) == pytest.approx((900, 40))
    with pytest.raises(ValueError, match="passes of one kind"):
        costs_us([passes[0], passes[0]])


def test_ratios_pair_the_passes_of_a_run() -> None:
    samples = {}
    for run, slow in ((0, 1.0), (1, 3.0)):
        for tokens in (_SHORT, _LONG):
            for name, factor in (("vllm", 1.0), ("colocated", 1.25), ("pd", 2.0)):
                sample = spent(8, tokens, 800 * slow * factor, 40 * slow * factor)
                samples.setdefault((name, 1, tokens), []).append(sample)
            assert len(samples["pd", 1, tokens]) == run + 1
    given = argparse.Namespace(runs=2, streams=(1,), prompt_tokens=64)
    memory = {"vllm": 10, "colocated": 20, "pd": 30}
    found = _figures(given, 2, samples, memory)
    figures = {name: values for name, (values, _) in found.items()}
    assert figures["front_cpu_ratio"] == pytest.approx([1.25, 1.25])
    assert figures["front_cpu_ratio_pd"] == pytest.approx([2, 2])
    assert figures["vllm_1_request_cpu"] == pytest.approx([800, 2400])
    assert figures["pd_1_chunk_cpu"] == pytest.approx([80, 240])
    assert figures["pd_1_added_ttft_p99"] == pytest.approx([0, 0])
    assert figures["colocated_memory"] == [20]
