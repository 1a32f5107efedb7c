"""Mock cores: their tokens, limits, pauses, troubles, start and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from front_end import front_end
from mock_facts import MockOptions, Trouble
from mock_process import INIT, engine_argv, launched, mock_core
from mock_protocol import ENGINE_CORE_DEAD, FinishReason, token_at

pytestmark = pytest.mark.deep

PROMPT = list(range(1000, 1200))
END_S = 60.0


def test_core_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, mock_core, mock_parent;"
        "print([one for one in ('torch', 'vllm') if one in sys.modules])"
    )
    folder = str(Path(__file__).parent)
    said = subprocess.check_output([sys.executable, "-P", "-c", code], env={"PYTHONPATH": folder})
    assert said.decode().strip() == "[]"


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_before", [1, 2, 7])
def test_continuation_on_another_core_yields_the_same_stream(
    params: dict[str, object], num_before: int
) -> None:
    with mock_core() as one:
        one.add("a", PROMPT, max_tokens=8, **params)
        whole = one.tokens("a")
    with mock_core() as other:
        brought = {"banaserve_output": whole[:num_before]}
        other.add("b", PROMPT, max_tokens=8, extra_args=brought, **params)
        assert whole[:num_before] + other.tokens("b") == whole


def test_tokens_depend_on_weights_prompt_position_and_seed() -> None:
    usual = token_at("w", [1], 0, 0, range(10**9))
    assert usual == token_at("w", [1], 0, 0, range(10**9))
    others = [("v", [1], 0, 0), ("w", [2], 0, 0), ("w", [1], 1, 0), ("w", [1], 0, 1)]
    assert usual not in [token_at(*one, range(10**9)) for one in others]


def test_end_token_and_stop_tokens_wait_for_min_tokens() -> None:
    with mock_core(MockOptions(answer_tokens=3)) as core:
        core.add("end", PROMPT, max_tokens=9, _eos_token_id=2)
        core.add("late", PROMPT, max_tokens=9, min_tokens=5, _eos_token_id=2)
        found = core.until_finished("end", "late")
        assert [len(found[name]) for name in ("end", "late")] == [3, 6]
        assert {outputs[-1].finish_reason for outputs in found.values()} == {FinishReason.STOP}
        core.add("stop", PROMPT, max_tokens=9, allowed_token_ids=[400], stop_token_ids=[400])
        (last,) = core.until_finished("stop")["stop"]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, 400)


def test_request_ends_with_the_context() -> None:
    with mock_core(argv=("--max-model-len", "256")) as core:
        core.add("a", PROMPT, max_tokens=9999)
        assert len(core.tokens("a")) == 256 - len(PROMPT)


def test_running_requests_and_blocks_are_limited() -> None:
    options = MockOptions(step_ms=5.0, max_running=2, num_blocks=4)
    with mock_core(options, ("--block-size", "128")) as core:
        for name in "abc":
            core.add(name, PROMPT, max_tokens=4)
        core.add("large", PROMPT, max_tokens=300)
        most, left = 0, 4
        while left:
            message = core.receive()
            assert message.scheduler_stats is not None
            most = max(most, message.scheduler_stats.num_running_reqs)
            left -= sum(one.finish_reason is not None for one in message.outputs)
        assert most <= 2


def test_aborted_request_frees_its_blocks_and_says_nothing() -> None:
    with mock_core(MockOptions(step_ms=2.0)) as core:
        core.add("a", PROMPT, max_tokens=3000)
        while not core.receive().outputs:
            pass
        core.abort("a")
        pool = core.call("banaserve_pool_info")["value"]
        assert pool["free_blocks"] == pool["num_blocks"]
        core.add("b", PROMPT, max_tokens=2)
        assert len(core.until_finished("b")["b"]) == 2


def test_budget_is_cut_to_what_the_engine_has() -> None:
    with mock_core() as core:
        answer = core.call("banaserve_set_budget", 10**6, 3)
        assert answer == {"type": "Answered", "value": {"num_tokens": 4096, "num_requests": 3}}


def test_long_prompt_takes_several_steps_of_the_budget() -> None:
    with mock_core() as core:
        core.call("banaserve_set_budget", 64, 4)
        core.add("a", PROMPT, max_tokens=1)
        messages = []
        while not messages or not messages[-1].outputs:
            messages.append(core.receive())
        assert len(messages) == -(-len(PROMPT) // 64)


def test_prefix_that_comes_again_is_cached_until_the_cache_is_reset() -> None:
    def cached() -> int:
        core.add("a", PROMPT, max_tokens=1)
        stats = core.until_finished("a")["a"][0].prefill_stats
        assert stats is not None
        return stats.num_cached_tokens

    with mock_core() as core:
        assert [cached(), cached()] == [0, 128]
        assert core.call("reset_prefix_cache", False, False) is True
        assert cached() == 0


def test_paused_core_keeps_what_comes() -> None:
    with mock_core() as core:
        core.call("pause_scheduler", "keep", False)
        core.add("a", PROMPT, max_tokens=2)
        assert core.call("is_scheduler_paused") is True
        core.call("resume_scheduler")
        assert len(core.tokens("a")) == 2


def test_migration_is_refused_in_a_reply() -> None:
    with mock_core() as core:
        (reply,) = core.call("collective_rpc", "banaserve_migration_status", None, (False,), None)
        assert reply["type"] == "Refused"


@pytest.mark.parametrize(
    ("how", "code", "says_dead"), [("die", -9, False), ("fatal", 1, True)], ids=["die", "fatal"]
)
def test_core_that_dies_at_a_token(how: str, code: int, says_dead: bool) -> None:
    with mock_core(MockOptions(troubles=(Trouble(how, after_tokens=3),))) as core:
        core.add("a", PROMPT, max_tokens=9)
        assert core.process.wait(END_S) == code
        messages = list(core.front.pending())
        assert (messages[-1] == [ENGINE_CORE_DEAD]) is says_dead


def test_core_that_dies_of_a_token_in_a_prompt() -> None:
    with mock_core(MockOptions(troubles=(Trouble("die", token=7),))) as core:
        core.add("a", PROMPT, max_tokens=3)
        assert len(core.tokens("a")) == 3
        core.add("b", [7], max_tokens=3)
        assert core.process.wait(END_S) == -9


def test_core_that_dies_of_a_request_at_its_token() -> None:
    with mock_core() as core:
        core.add("a", PROMPT, max_tokens=9, extra_args={"dies_at": 3})
        assert core.process.wait(END_S) == -9
        assert len(list(core.front.pending())) == 3


def test_core_that_hangs_lives_and_ends_by_a_kill_alone() -> None:
    with mock_core(MockOptions(troubles=(Trouble("hang", after_tokens=2),))) as core:
        core.add("a", PROMPT, max_tokens=9)
        while not core.receive().outputs:
            pass
        core.process.terminate()
        assert core.process.poll() is None


def test_core_that_fails_at_its_start_once(tmp_path: Path) -> None:
    (flag := tmp_path / "flag").touch()
    trouble = Trouble("fail at start", once=str(flag))
    with front_end(tmp_path) as front:
        options = MockOptions(troubles=(trouble,))
        with launched(front, options, engine_argv()) as process:
            assert process.wait(END_S) == 1
        with launched(front, options, engine_argv()) as process:
            assert front.shake(INIT, lambda: process.poll() is None).ready["status"] == "READY"


def test_core_that_serves_leaves_a_trouble_of_starts_to_others(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with mock_core(MockOptions(troubles=(Trouble("never ready", once=str(flag)),))) as core:
        flag.touch()
        core.add("a", PROMPT, max_tokens=9)
        while not any(one.finish_reason is not None for one in core.receive().outputs):
            pass
        assert flag.exists()


def test_core_ends_in_order_after_the_step_under_way() -> None:
    with mock_core(MockOptions(step_ms=5.0)) as core:
        core.add("a", PROMPT, max_tokens=3000)
        while not core.receive().outputs:
            pass
        core.process.terminate()
        assert core.process.wait(END_S) == 0
        assert list(core.front.pending())[-1] == [ENGINE_CORE_DEAD]
