"""Splitwise's table: its rows are read, and constants that made times are found again."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from banaserve.base.errors import UserError
from benchmarks.step_table import TableConstants, TableStep, fitted, main, read_table

_COLUMNS = "model,hardware,tensor_parallel,batch_size,prompt_size,token_size,prompt_time,token_time"


def _table(folder: Path, *rows: str) -> Path:
    path = folder / "perf_model.csv"
    path.write_text("\n".join([_COLUMNS, *rows, ""]))
    return path


def test_a_configuration_has_the_median_of_its_rows(tmp_path: Path) -> None:
    rows = [f"llama2-70b,a100-80gb,4,2,512,128,{ms},40" for ms in (90, 100, 300)]
    others = ["llama2-70b,h100-80gb-pcap,4,2,512,128,1,1", "llama2-70b,a100-80gb,2,64,512,128,1,1"]
    engine = ("llama2-70b", "a100-80gb", 4)
    prompts, tokens = (
        TableStep(*engine, "prompt", 2, 512, 0),
        TableStep(*engine, "token", 2, 512, 128),
    )
    assert read_table(_table(tmp_path, *rows, *others)) == {prompts: 0.1, tokens: 0.04}
    assert prompts.labels[1].endswith("to 2,048 prompt tokens")
    with pytest.raises(UserError, match="no row of a known model"):
        read_table(_table(tmp_path, *others))
    with pytest.raises(UserError, match="a row lacks a value"):
        read_table(_table(tmp_path, "llama2-70b,a100-80gb,4,2,512,128,,"))


def test_constants_are_found_again() -> None:
    made = TableConstants(1.3, 0.03, 4e-4)
    gpu_s = np.linspace(0.005, 0.06, 12)
    requests = np.array([1, 8, 64] * 4)
    found = fitted(gpu_s, requests, made.step_s(gpu_s, requests))
    assert found == pytest.approx(made)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the package is not there")
def test_the_package_has_operators_of_both_models(tmp_path: Path) -> None:
    rows = [
        f"{model},h100-80gb,8,{n},512,128,{100 * n},30"
        for model in ("llama2-70b", "bloom-176b")
        for n in (1, 2, 4, 8, 16)
    ]
    result = tmp_path / "result.json"
    assert main(["--table", str(_table(tmp_path, *rows)), "--json", str(result)]) == 0
    groups = json.loads(result.read_text())["raw"]["groups"]
    assert {name.partition(",")[0] for name in groups} == {"llama2-70b", "bloom-176b"}
