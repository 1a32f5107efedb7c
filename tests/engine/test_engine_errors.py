"""The line that a user gets when an engine ends: vLLM's error, and the option that mends it."""

from __future__ import annotations

import importlib.util
import mmap
from argparse import Namespace
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.engine import engine_args
from banaserve.engine.compat.engine_errors import (
    CAUSE_ELSEWHERE,
    REMEDIES,
    Remedy,
    advice_for,
    last_error,
    last_error_in,
)

LATENTS = (
    "RuntimeError: expect weight to be bfloat16, float16, int8, fp8_e4m3 or uint8(mxfp4 or int4)."
)
LINEAR = "AssertionError: CPU GDN attention requires BF16."
POINTER = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
OTHER = "ValueError: No available memory for the cache blocks."
CORE = "(MainProcess pid=4457) ERROR 11-26 17:46:16 [core.py:1510] "
RANK = "(Worker_TP0 pid=6601) ERROR 11-26 17:49:26 [multiproc_executor.py:953] "


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ((), ""),
        (("INFO: loading", "1 error"), ""),
        ((f"{CORE}{LATENTS}", "    return self._op(*args, **kwargs)", LATENTS), LATENTS),
        ((f"[rank0]: {LINEAR}",), LINEAR),
        # Of several ranks the core says only that one has failed.
        ((f"{RANK}{LATENTS}", f"{CORE}{POINTER}", POINTER), LATENTS),
        ((f"{CORE}{POINTER}",), POINTER),
        ((f"{RANK}{LATENTS}", f"{CORE}{OTHER}"), OTHER),
        ((f"{CORE}banaserve.base.errors.FingerprintError: other blocks",), "other blocks"),
    ],
)
def test_the_last_error_is_the_one_that_names_its_cause(lines: tuple[str, ...], error: str) -> None:
    assert last_error(lines) == error


@pytest.mark.parametrize(
    ("error", "option"),
    [(LATENTS, "--dtype bfloat16"), (LATENTS, "--attention-backend"), (LINEAR, "--dtype bfloat16")],
)
def test_an_error_that_an_option_mends_comes_with_the_option(
    error: str, option: str, tmp_path: Path
) -> None:
    log = tmp_path / "p0.log"
    log.write_text(f"{CORE}{error}\n")
    said = last_error_in(log)
    assert option in said.partition(" (vLLM: ")[0]
    assert said.endswith(f" (vLLM: {error}; log: {log})")
    assert "\n" not in said


def test_another_error_stands_alone(tmp_path: Path) -> None:
    log = tmp_path / "p0.log"
    log.write_text(f"{CORE}{OTHER}\n")
    assert advice_for(OTHER) == ""
    assert last_error_in(log) == f"{OTHER} (log: {log})"
    assert last_error_in(tmp_path / "none.log") == f"see {tmp_path / 'none.log'}"


@pytest.fixture(scope="module")
def installed() -> Path:
    """The folder of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("there is no vLLM")
    return Path(spec.origin).parent


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda one: one.words)
def test_the_installed_vllm_says_these_words(remedy: Remedy, installed: Path) -> None:
    place = installed / remedy.source
    if place.suffix == ".so" and not place.exists():
        pytest.skip(f"this vLLM has no {remedy.source}: its kernels are for another processor")
    with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(remedy.words.encode()) >= 0


@pytest.mark.parametrize("words", CAUSE_ELSEWHERE)
def test_the_installed_vllm_points_to_causes_with_these_words(words: str, installed: Path) -> None:
    places = ("v1/engine/utils.py", "v1/executor/multiproc_executor.py")
    assert any(words in (installed / place).read_text(encoding="utf-8") for place in places)


def test_what_vllm_refuses_is_one_line_that_is_cut_between_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Namespace) -> None:
        raise ValueError("the reason:\n" + "word " * 200)

    monkeypatch.setattr(engine_args.AsyncEngineArgs, "from_cli_args", refuse)
    with pytest.raises(UserError, match=r"^vLLM cannot serve this: the reason:( word)+ \.\.\.$"):
        engine_args.engine_config(Namespace(additional_config={}))
