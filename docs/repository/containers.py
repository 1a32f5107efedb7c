"""What the containers are told exists: options, ports, files; images as they must be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from banaserve.base.errors import UserError
from banaserve.cli.serve.command_line import parse_serve_argv
from docs.repository.dashboard import DASHBOARD
from docs.repository.findings import PACKAGES, ROOT, Finding, at

DOCKER = ROOT / "docker"
COMPOSE_FILE = DOCKER / "compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
IMAGES = (DOCKER / "Dockerfile.cpu", DOCKER / "Dockerfile.cuda")
_PINS = ("build.sh", "compose.yml", "pin_images.py", "Dockerfile.cpu", "Dockerfile.cuda")


def findings() -> Iterator[Finding]:
    """Yield what a container is told and is not there, and what it may do and must not."""
    yield from _command()
    for name, service in SERVICES.items():
        yield from service_findings(name, service)
    yield from _monitoring()
    for path in IMAGES:
        yield from image_findings(path, path.read_text())
    yield from _build_context()


def _command() -> Iterator[Finding]:
    _, *argv = (re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", one) for one in SERVICES["serve"]["command"])
    keys = {"BANASERVE_API_KEY": "for clients", "BANASERVE_ADMIN_KEY": "for operators"}
    try:
        with patch.dict(os.environ, keys):
            config = parse_serve_argv(argv)
    except UserError as error:
        yield at(COMPOSE_FILE, "command:", str(error))
        return
    if config.vllm_argv:
        yield at(COMPOSE_FILE, "command:", f"options that only vLLM knows: {config.vllm_argv}")


def service_findings(name: str, service: dict[str, Any]) -> Iterator[Finding]:
    """Yield ports for all, secrets in the file, rights and mounts of nothing of one service."""
    place = f"  {name}:"
    if not all(port.startswith("127.0.0.1:") for port in service.get("ports", [])):
        yield at(COMPOSE_FILE, place, f"{name} has a port that is not on loopback")
    if not service.get("read_only") or service.get("cap_drop") != ["ALL"]:
        yield at(COMPOSE_FILE, place, f"{name} is not read_only, or keeps capabilities")
    for key, value in service.get("environment", {}).items():
        is_secret = key.endswith(("KEY", "PASSWORD"))
        if is_secret and not re.fullmatch(r"\$\{\w+:\?[^}]+\}", value):
            yield at(COMPOSE_FILE, key, f"{key} must come from outside")
    for mount in service.get("volumes", []):
        source = mount.split(":")[0]
        if source not in COMPOSE["volumes"] and not (DOCKER / source).exists():
            yield at(COMPOSE_FILE, mount, f"there is no {source}, as a volume or a file")


def _monitoring() -> Iterator[Finding]:
    file = DOCKER / "grafana/provisioning/datasources/prometheus.yml"
    found = yaml.safe_load(file.read_text())["datasources"]
    uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "targets" in panel}
    if uids != {source["uid"] for source in found}:
        yield at(file, "uid:", f"the dashboard asks {uids}")
    if found[0]["url"].split("//")[1].split(":")[0] not in SERVICES:
        yield at(file, "url:", "is no service of compose.yml")
    prometheus = DOCKER / "prometheus.yml"
    (job,) = yaml.safe_load(prometheus.read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    if f"--port={port}" not in SERVICES.get(name, {}).get("command", ()):
        yield at(prometheus, target, f"no service listens at {target}")


def image_findings(path: Path, text: str) -> Iterator[Finding]:
    """Yield what runs an image as root, or probes a path that needs a key."""
    last = text[text.rindex("\nFROM") :]
    if not re.search(r"^USER 10001:10001$", last, re.MULTILINE):
        yield at(path, "USER", "does not run as 10001:10001")
    # A probe has no key. Importing the module would import vLLM.
    auth = (ROOT / "banaserve/frontdoor/middleware/api_keys.py").read_text()
    opened = re.search(r"OPEN_PATHS = frozenset\((.*)\)", auth)
    probed = re.findall(r"127\.0\.0\.1:8000(/\w+)", last)
    if opened is None or len(probed) != 1 or f'"{probed[0]}"' not in opened[1]:
        yield at(path, "127.0.0.1:8000", "probes no path that is open without a key")


def _build_context() -> Iterator[Finding]:
    file = ROOT / ".dockerignore"
    lines = file.read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc"}
    needed |= {package.partition("/")[0] for package in PACKAGES}
    needed |= {"requirements", *(f"docker/{name}" for name in _PINS)}
    if "*" not in lines:
        yield Finding(file, 1, "does not begin by leaving out everything")
    for name in sorted(needed ^ kept):
        yield at(file, f"!{name}", f"{name} is not both needed and kept")
