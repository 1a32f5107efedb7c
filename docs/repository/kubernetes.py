"""Manifests for Kubernetes: what they start is what the commands take, and keys are files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from banaserve.base.errors import UserError
from banaserve.cli.node import app
from banaserve.cli.serve.command_line import parse_serve_argv
from docs.repository.findings import ROOT, Finding, at

FOLDER = ROOT / "docker" / "kubernetes"
LWS_FILE = FOLDER / "leaderworkerset.yaml"
RAY_FILE = FOLDER / "kuberay.yaml"
LWS: dict[str, Any] = yaml.safe_load(LWS_FILE.read_text())
RAY: dict[str, Any] = yaml.safe_load(RAY_FILE.read_text())
_VARIABLE = re.compile(r"\$\((\w+)\)")


def findings() -> Iterator[Finding]:
    """Yield words that commands refuse, ports that do not meet, mounts of nothing and open keys."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield from _leader(Path(folder))
            yield from _worker(Path(folder))
        except UserError as error:
            yield at(LWS_FILE, "args:", str(error))
    for path, pod in pods():
        yield from pod_findings(path, pod)


def pods() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the specification of each pod with its file."""
    template = LWS["spec"]["leaderWorkerTemplate"]
    yield LWS_FILE, template["leaderTemplate"]["spec"]
    yield LWS_FILE, template["workerTemplate"]["spec"]
    yield RAY_FILE, RAY["spec"]["headGroupSpec"]["template"]["spec"]
    for group in RAY["spec"]["workerGroupSpecs"]:
        yield RAY_FILE, group["template"]["spec"]


def _container(kind: str) -> dict[str, Any]:
    pod = LWS["spec"]["leaderWorkerTemplate"][f"{kind}Template"]["spec"]
    (one,) = pod["containers"]
    return dict(one)


def _arguments(kind: str, files: Path) -> list[str]:
    """Its words after the command, with values for variables and files for keys."""
    one = _container(kind)
    (files / "key").write_text("a-key-of-sixteen-and-more")
    known = {entry["name"]: "10.0.0.1" for entry in one["env"]}
    words = [_VARIABLE.sub(lambda found: known[found[1]], word) for word in one["args"]]
    return [re.sub(r"=/keys/\w+/key$", f"={files / 'key'}", word) for word in words]


def _leader(files: Path) -> Iterator[Finding]:
    _, *words = _arguments("leader", files)
    config = parse_serve_argv(words)
    if len(config.nodes) != LWS["spec"]["leaderWorkerTemplate"]["size"] - 1:
        yield at(LWS_FILE, "size:", "the leader does not name each worker")
    if config.num_instances != len(config.nodes):
        yield at(LWS_FILE, "args:", "a worker has one GPU, and not one instance")
    pod = LWS["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    if pod.get("terminationGracePeriodSeconds", 0) <= config.drain_timeout_s:
        yield at(LWS_FILE, "name: serve", "is killed before --drain-timeout has passed")
    if not config.keys or not config.cluster_key:
        yield at(LWS_FILE, "args:", "the leader has no keys")


def _worker(files: Path) -> Iterator[Finding]:
    _, *words = _arguments("worker", files)
    _, options = app.parse("banaserve node", words)
    if not options.cluster_key:
        yield at(LWS_FILE, "cluster-key-file", "a worker has no key")
    port = options.listen.rpartition(":")[2]
    named = [word for word in _container("leader")["args"] if word.startswith("--node=")]
    if {word.rpartition(":")[2] for word in named} != {port}:
        yield at(LWS_FILE, "--node=", f"workers listen at port {port}")


def pod_findings(path: Path, pod: dict[str, Any]) -> Iterator[Finding]:
    """Yield mounts that are no volumes, containers without a limit, and secrets that are words."""
    volumes = {volume["name"] for volume in pod["volumes"]}
    for one in pod["containers"]:
        place = f"name: {one['name']}"
        if {mount["name"] for mount in one["volumeMounts"]} != volumes:
            yield at(path, place, "mounts are not the volumes of the pod")
        if "memory" not in one["resources"]["limits"]:
            yield at(path, place, "has no limit of memory")
        for entry in one.get("env", []):
            if "valueFrom" not in entry and "TOKEN" in entry["name"]:
                yield at(path, entry["name"], "a secret is no word of the manifest")
