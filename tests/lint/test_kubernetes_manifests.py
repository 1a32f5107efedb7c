"""Manifests for Kubernetes: what they start is what the commands take, and keys are files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from banaserve.cli.node import app
from banaserve.cli.serve.options.command_line import parse_serve_argv

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
LWS = yaml.safe_load((FOLDER / "leaderworkerset.yaml").read_text())
RAY = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
_VARIABLE = re.compile(r"\$\((\w+)\)")


def pods() -> Iterator[dict[str, Any]]:
    template = LWS["spec"]["leaderWorkerTemplate"]
    yield template["leaderTemplate"]["spec"]
    yield template["workerTemplate"]["spec"]
    yield RAY["spec"]["headGroupSpec"]["template"]["spec"]
    yield from (group["template"]["spec"] for group in RAY["spec"]["workerGroupSpecs"])


def container(kind: str) -> dict[str, Any]:
    (one,) = LWS["spec"]["leaderWorkerTemplate"][f"{kind}Template"]["spec"]["containers"]
    assert one["command"] == ["banaserve"]
    return one


def arguments(kind: str, files: Path) -> list[str]:
    """Its words after the command, with values for variables and files for keys."""
    one = container(kind)
    (files / "key").write_text("a-key-of-sixteen-and-more")
    known = {entry["name"]: "10.0.0.1" for entry in one["env"]}
    words = [_VARIABLE.sub(lambda found: known[found[1]], word) for word in one["args"]]
    return [re.sub(r"=/keys/\w+/key$", f"={files / 'key'}", word) for word in words]


def test_the_leader_is_a_server_of_all_workers(tmp_path: Path) -> None:
    command, *words = arguments("leader", tmp_path)
    assert command == "serve"
    config = parse_serve_argv(words)
    assert len(config.nodes) == LWS["spec"]["leaderWorkerTemplate"]["size"] - 1
    assert config.num_instances == len(config.nodes), "a worker has one GPU"
    assert config.keys
    assert config.cluster_key


def test_a_worker_is_a_node_at_the_port_that_the_leader_calls(tmp_path: Path) -> None:
    command, *words = arguments("worker", tmp_path)
    assert command == "node"
    parsed = typer.main.get_command(app).make_context("node", list(words))
    assert parsed.params["cluster_key_file"].read_text()
    port = parsed.params["listen"].rpartition(":")[2]
    leader = [word for word in container("leader")["args"] if word.startswith("--node=")]
    assert {word.rpartition(":")[2] for word in leader} == {port}
    assert container("worker")["ports"] == [{"containerPort": int(port)}]


@pytest.mark.parametrize("pod", list(pods()), ids=["leader", "worker", "ray-head", "ray-worker"])
def test_mounts_are_volumes_and_secrets_are_no_words(pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    for one in pod["containers"]:
        assert {mount["name"] for mount in one["volumeMounts"]} == volumes
        assert "memory" in one["resources"]["limits"]
        for entry in one.get("env", []):
            assert "valueFrom" in entry or "TOKEN" not in entry["name"]
