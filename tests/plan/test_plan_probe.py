"""`banaserve plan probe` on servers whose step times are known, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.orchestrator.control.costs.profile import (
    DecodeSection,
    ErrorSection,
    PrefillSection,
    Profile,
    load,
)
from banaserve.sim.timeline import Timeline
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.plan.probe.fit import StepFit, fitted
from banaserve_bench.plan.probe.judging import HeldOutErrors, held_out_errors, stated_error
from banaserve_bench.plan.probe.measuring import ProbeSamples, ServerProbe, measured
from banaserve_bench.plan.probe.profile_file import profile_text
from banaserve_bench.plan.probe.schedule import BatchProbe, ProbeLimits, PromptProbe, plan_of
from depth import chosen_seed
from modelled_server import LoopClock, ModelledServer
from virtual_time import run_virtual

LIKE = load("llama-3.1-8b-h100")
GPU = StepFit(PrefillSection(8e-3, 30e-6, 1.2e-9), DecodeSection(7e-3, 6e-8, 40e-6))
CPU = StepFit(PrefillSection(0.05, 2e-3, 6e-7), DecodeSection(0.05, 5e-6, 2e-3))
LIMITS = ProbeLimits(context_tokens=32_768, kv_tokens=400_000, step_tokens=2048)
Act = Callable[[ModelledServer, float], None]


def _nothing(server: ModelledServer, share: float) -> None: ...


def probed(
    tmp_path: Path,
    fit: StepFit,
    *,
    noise: float = 0.0,
    duration_s: float = 120.0,
    act: Act = _nothing,
) -> tuple[ProbeSamples, ModelledServer, float]:
    """Return samples of a modelled server, the server, and how long it took in virtual time.

    Args:
        act: Function that changes the server before each probe.
    """
    seed = chosen_seed(11)

    async def main() -> tuple[ProbeSamples, ModelledServer, float]:
        loop, path = asyncio.get_running_loop(), tmp_path / "socket"
        server = ModelledServer(fit, seed, noise)

        async def connect(
            factory: Callable[[], asyncio.Protocol], *_: object, **__: object
        ) -> object:
            return await loop.create_unix_connection(factory, str(path))

        async def num_requests() -> int:
            return server.num_requests

        loop.create_connection = connect  # type: ignore[method-assign,assignment]
        runner, steps = await server.start(path), asyncio.create_task(server.run())
        async with OpenAiClient(
            "http://modelled", "m", return_token_ids=True, read_late=True, clock=LoopClock()
        ) as client:
            probe = ServerProbe(client, num_requests, seed)
            try:
                found = await measured(
                    probe, LIMITS, duration_s, lambda share, _: act(server, share)
                )
            finally:
                steps.cancel()
                await runner.cleanup()
        return found, server, loop.time()

    return run_virtual(Timeline(), main())


class ScatteringClient(OpenAiClient):
    """Client of a busy machine: requests of the first ``scattered`` batches of two hardly meet."""

    def __init__(self, scattered: int) -> None:
        super().__init__("http://none", "m")
        self.scattered = scattered
        self.num_sent = 0

    async def send(self, call: CompletionCall, due_at_s: float | None = None) -> RequestRecord:
        batch, place = divmod(self.num_sent, 2)
        self.num_sent += 1
        late_s = 0.9 if place and batch < self.scattered else 0.0
        at_s = [late_s + 0.1 * number for number in range(10)]
        return RequestRecord(
            id=call.id,
            sent_at_s=0.0,
            token_at_s=at_s,
            prompt_tokens=16,
            completion_tokens=10,
            status=200,
        )


def test_a_batch_that_a_busy_machine_scatters_is_sent_again() -> None:
    async def batch(client: ScatteringClient) -> tuple[float, float]:
        return await ServerProbe(client, lambda: asyncio.sleep(0), 1).batch(2, 16, 10)

    client = ScatteringClient(2)
    context, step_s = asyncio.run(batch(client))
    assert client.num_sent == 6
    assert (context, step_s) == (pytest.approx(21), pytest.approx(0.1))
    with pytest.raises(UserError, match=r"only 0 steps .* this machine is under other load"):
        asyncio.run(batch(ScatteringClient(3)))


def judged(samples: ProbeSamples) -> tuple[StepFit, list[HeldOutErrors], Profile]:
    fit = StepFit.of(samples.prompt_steps(LIMITS, fitted=True), samples.batch_steps(fitted=True))
    profile = replace(LIKE, prefill=fit.prefill, decode_small=fit.decode)
    return fit, held_out_errors(samples, fit, profile, LIMITS), profile


@pytest.mark.parametrize("known", [GPU, CPU], ids=["gpu", "cpu"])
def test_the_coefficients_of_a_server_are_found_again(tmp_path: Path, known: StepFit) -> None:
    samples, server, took_s = probed(tmp_path, known)
    assert took_s <= 120
    assert len(samples.loads) > 2
    fit, errors, _ = judged(samples)
    for found, real in ((fit.prefill, known.prefill), (fit.decode, known.decode)):
        for name in ("fixed_s", "token_s", "pair_s", "context_token_s", "request_s"):
            if hasattr(real, name):
                assert getattr(found, name) == pytest.approx(getattr(real, name), rel=0.02), name
    # A mixed request also waits for the end of a step, which is the same in the simulator.
    assert {(one.kind, one.figure) for one in errors} == {
        ("prefill", "ttft"),
        ("decode", "tpot"),
        ("mixed", "ttft"),
        ("mixed", "tpot"),
        ("mixed", "latency"),
    }
    assert all(one.mean < 0.02 for one in errors), errors
    assert stated_error(errors).ttft == max(1e-4, *(o.mean for o in errors if o.figure == "ttft"))
    # No prompt begins as another one does, so none is in a prefix cache.
    assert len({tuple(prompt[:4]) for prompt in server.prompts}) == len(server.prompts)


def test_noise_shows_in_the_error_and_little_in_the_coefficients(tmp_path: Path) -> None:
    samples, _, _ = probed(tmp_path, CPU, noise=0.05)
    fit, errors, _ = judged(samples.calm())
    assert fit.prefill.token_s == pytest.approx(CPU.prefill.token_s, rel=0.15)
    assert fit.decode.request_s == pytest.approx(CPU.decode.request_s, rel=0.15)
    assert 0.001 < stated_error(errors).ttft < 0.2


def test_a_round_that_something_slows_is_left_out(tmp_path: Path) -> None:
    shares: list[float] = []

    def disturb(server: ModelledServer, share: float) -> None:
        shares.append(share)
        # A first look, then some twenty probes a round: this is most of the second one.
        server.slowdown = 3.0 if 22 < len(shares) < 40 else 1.0

    samples, _, _ = probed(tmp_path, GPU, act=disturb)
    calm = samples.calm()
    assert len(calm.loads) == len(samples.loads) - 1
    _, errors, _ = judged(calm)
    assert all(one.mean < 0.03 for one in errors)
    assert all(a <= b for a, b in pairwise(shares))


def test_other_load_that_comes_and_goes_is_told(tmp_path: Path) -> None:
    def disturb(server: ModelledServer, share: float) -> None:
        server.slowdown = 1.0 + 6 * share

    samples, _, _ = probed(tmp_path, GPU, act=disturb)
    with pytest.raises(UserError, match=r"equal probes differ by \d+%: the server, or its machine"):
        samples.calm()


def test_a_server_that_becomes_slow_is_given_up_in_time(tmp_path: Path) -> None:
    def slow(server: ModelledServer, share: float) -> None:
        server.slowdown = 30.0 if share > 0.1 else 1.0

    with pytest.raises(UserError, match=r"slower than its first answers: give more than 60 s"):
        probed(tmp_path, CPU, act=slow, duration_s=60.0)
    slowest = replace(CPU.prefill, fixed_s=3.0)
    with pytest.raises(UserError, match="too slow for --duration"):
        plan_of(StepFit(slowest, CPU.decode), 10.0, LIMITS)


def test_probes_fit_into_the_time_and_the_cache() -> None:
    for fit, limits in (
        (GPU, LIMITS),
        (CPU, LIMITS),
        (GPU, ProbeLimits(512, 2000, 256)),
        (CPU, ProbeLimits(4096, 4096, 512)),
    ):
        plan = plan_of(fit, 120.0, limits)
        assert sum(one.is_fitted for one in plan.prompts) >= 3
        assert sum(one.is_fitted for one in plan.batches) >= 3
        assert sum(not one.is_fitted for one in plan.prompts) >= 2
        assert sum(not one.is_fitted for one in plan.batches) >= 2
        assert max(one.tokens for one in plan.prompts) < limits.context_tokens
        for one in plan.batches:
            assert one.batch * one.prompt_tokens < limits.kv_tokens
            assert one.prompt_tokens + one.output_tokens(limits.step_tokens) < limits.context_tokens
    slow, fast = (plan_of(fit, 120.0, LIMITS) for fit in (CPU, GPU))
    assert slow.prompts[-1].tokens < fast.prompts[-1].tokens
    assert set(slow.prompts) >= {PromptProbe(16, True)}
    assert set(fast.batches) >= {BatchProbe(64, 16, True)}


def test_a_profile_with_its_error_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    hostile = 'm"\n[model]\n\x7f\u2028é\\'
    profile = replace(
        LIKE,
        name="mine",
        source=f"probe of {hostile}",
        prefill=GPU.prefill,
        decode_small=GPU.decode,
        error=ErrorSection(0.05, 0.02, 0.03),
    )
    path.write_text(profile_text(profile, [f"{hostile}: a comment"]))
    read = load(str(path))
    assert read == replace(profile, source='probe of m"[model]\\')
    assert load(str(_without_error(path))).error is None
    path.write_text(path.read_text().replace("ttft = 0.05", "ttft = 5"))
    with pytest.raises(UserError, match=r"error.ttft is 5: give at most 1"):
        load(str(path))


def _without_error(path: Path) -> Path:
    other = path.with_name("other.toml")
    other.write_text(path.read_text().partition("[error]")[0])
    return other


def test_the_error_of_a_profile_is_that_of_advice_and_of_simulated_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lengths = tmp_path / "mine.toml", tmp_path / "lengths.jsonl"
    lengths.write_text('{"input_length": 500, "output_length": 10}\n')
    error = ErrorSection(0.0712, 0.02, 0.0345)
    path.write_text(profile_text(replace(LIKE, name="mine", error=error), []))
    words = (str(lengths), "--rps", "5", "--duration", "8", "--profile", str(path))
    assert main(["plan", *words, "--instances", "1", "--seeds", "2"]) == 0
    assert "error of step times: 5.0%" in capsys.readouterr().out
    assert main(["simulate", *words, "--colocated", "1"]) == 0
    shown = capsys.readouterr().out
    assert "mean latency, s (±3.5%)" in shown
    assert "ttft p50, ms  " in shown


def test_no_coefficient_is_negative() -> None:
    """Times whose growth falls, as chance has it: pairs then cost next to nothing."""
    features = [(1, tokens, tokens**2) for tokens in (10, 100, 1000, 2000)]
    seconds = [0.01 + 1e-3 * tokens - 1e-7 * tokens**2 for tokens in (10, 100, 1000, 2000)]
    found = fitted(features, seconds)
    assert found[2] == 1e-12
    assert found[0] > 0
    assert found[1] == pytest.approx(1e-3, rel=0.2)
