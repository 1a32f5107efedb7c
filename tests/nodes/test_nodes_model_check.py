"""Model of a node beside that of its server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.nodes.model_check import check_model, model_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(3 << 20))
    return folder


def test_the_same_files_pass(model: Path) -> None:
    argv = ("--dtype", "float32", "--model", str(model), "--port", "8000")
    check_model(argv, model_digest(argv))
    check_model(argv, "")  # the server has none of its own


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_other_files_are_refused_with_what_to_do(model: Path, name: str) -> None:
    argv = ("--model", str(model))
    digest = model_digest(argv)
    file = model / name
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(UserError, match=r"not those of the server: copy them there again"):
        check_model(argv, digest)


def test_a_folder_that_is_missing_is_named(model: Path) -> None:
    argv = ("--model", f"{model}-2")
    assert model_digest(argv) == ""
    with pytest.raises(UserError, match=r"model-2: this node has no such folder"):
        check_model(argv, "")


def test_a_name_of_the_hub_is_the_nodes_own_to_fetch(model: Path) -> None:
    assert model_digest(("--model", "org/model")) == ""
    check_model(("--model", "org/model"), "")


def test_a_file_that_cannot_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("banaserve.nodes.model_check.digest_files", denied)
    with pytest.raises(UserError, match=f"{model}: Permission denied"):
        model_digest(("--model", str(model)))
