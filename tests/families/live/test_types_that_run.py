"""The question in which type plain vLLM runs a model, on processors that this one stands in for.

Forced are torch's answers about the processor, by which vLLM chooses its kernels, and the limits
that torch and oneDNN know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import random_models
from fork_server import ForkServer
from processor_claims import VARIABLE
from reference import PlainVllmError, reference_tokens
from types_that_run import first_that_runs

pytestmark = pytest.mark.e2e

PROMPT = [list(range(100, 140))]
SAMPLING = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
# As servers of ours run models with latents, see ``rotate_latents_in_torch``.
CUSTOM_OPS = ("-rotary_embedding",)
AVX2 = {
    VARIABLE: "avx512=no,avx512_bf16=no,amx_tile=no",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
AVX512 = {
    VARIABLE: "avx512_bf16=no,amx_tile=no",
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
}
# Of AMX only what chooses attention: its kernels for latents run without tiles too, those of
# experts end the process where there are none.
LATENTS_AS_ON_AMX = {VARIABLE: "amx_tile=yes@platforms/cpu.py"}
REFUSAL = "expect weight to be bfloat16, float16, int8"


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], str]:
    """``make(family)``: a new model's folder, of which no other test's refusal is remembered."""
    return lambda family: random_models.make(family, tmp_path / family)


@pytest.fixture
def forced(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ForkServer]:
    """A fork server that has imported vLLM with the parameter's environment."""
    env: Mapping[str, str] = request.param
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    server = ForkServer(tmp_path / "forks")
    yield server
    server.close()


def asking(forks: ForkServer, model: str) -> Callable[[str], list[list[int]]]:
    """``run(dtype)``: tokens of one plain engine."""

    def run(dtype: str) -> list[list[int]]:
        return reference_tokens(
            forks, model, PROMPT, {"it": SAMPLING}, dtype=dtype, custom_ops=CUSTOM_OPS
        )["it"]

    return run


@pytest.mark.parametrize("forced", [LATENTS_AS_ON_AMX], indirect=True, ids=["AMX"])
def test_a_type_that_vllm_refuses_is_passed_over(
    forced: ForkServer, make: Callable[[str], str]
) -> None:
    asked = []

    def run(dtype: str) -> list[list[int]]:
        asked.append(dtype)
        return asking(forced, model)(dtype)

    model = make("deepseek_v2")
    dtype, tokens = first_that_runs(model, run)
    assert (dtype, asked) == ("bfloat16", ["float32", "bfloat16"])
    assert [len(answer) for answer in tokens] == [SAMPLING["max_tokens"]]
    # What vLLM has refused is remembered; where nothing is left, its words are the reason.
    with pytest.raises(pytest.skip.Exception, match=f"float32: RuntimeError: {REFUSAL}"):
        first_that_runs(model, run, ("float32",))
    assert asked == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("forced", "family"),
    [
        pytest.param(AVX2, "deepseek_v2", id="AVX2"),
        pytest.param(AVX2, "qwen3_moe", id="AVX2, heads", marks=pytest.mark.long),
        pytest.param(AVX512, "deepseek_v2", id="AVX-512", marks=pytest.mark.long),
    ],
    indirect=["forced"],
)
def test_the_first_type_runs_with_kernels_of_older_processors(
    forced: ForkServer, family: str, make: Callable[[str], str]
) -> None:
    model = make(family)
    dtype, tokens = first_that_runs(model, asking(forced, model))
    assert dtype == "float32"
    assert [len(answer) for answer in tokens] == [SAMPLING["max_tokens"]]


def test_what_is_wrong_with_a_test_is_no_refusal(
    fork_server: ForkServer, make: Callable[[str], str]
) -> None:
    model = make("llama")

    def run(dtype: str) -> object:
        return reference_tokens(fork_server, model, [[1] * 4000], {"it": SAMPLING}, dtype=dtype)

    with pytest.raises(AssertionError) as failed:
        first_that_runs(model, run)
    assert not isinstance(failed.value, PlainVllmError)
