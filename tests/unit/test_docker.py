"""What the containers are told exists: commands, options, metrics, files."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.registry import REGISTRY

from banaserve.cli.serve.options.command_line import parse_serve_argv
from banaserve.engine.vllm.monitoring import metrics  # noqa: F401  (registers its families)
from banaserve.engine.vllm.monitoring import metrics as moves_metrics  # noqa: F401
from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.interface import TierStats

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES = COMPOSE["services"]
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "banaserve.json").read_text())
IMAGES = [DOCKER / "Dockerfile.cpu", DOCKER / "Dockerfile.cuda"]


def with_defaults(text: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_command_is_one_of_ours(monkeypatch):
    monkeypatch.setenv("BANASERVE_API_KEY", "for clients")
    monkeypatch.setenv("BANASERVE_ADMIN_KEY", "for operators")
    command, *argv = [with_defaults(word) for word in SERVICES["serve"]["command"]]
    assert command == "serve"
    config = parse_serve_argv(argv)
    assert config.vllm_argv == ()  # nothing that only vLLM could know
    assert (config.prefill, config.decode, config.kv_store) == (2, 2, True)
    assert (config.host, config.port) == ("0.0.0.0", 8000)


def test_ports_are_on_loopback_and_keys_come_from_outside():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        for name, value in service.get("environment", {}).items():
            if name.endswith(("KEY", "PASSWORD")):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), name


def test_what_is_mounted_exists_and_volumes_are_declared():
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            found = source in COMPOSE["volumes"] or (DOCKER / source).exists()
            assert found, mount


def test_the_second_file_and_the_build_name_what_is_there():
    more = yaml.safe_load((DOCKER / "compose.cuda.yml").read_text())
    assert set(more["services"]) <= set(SERVICES)
    build = SERVICES["serve"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert ROOT / with_defaults(build["dockerfile"]) == IMAGES[0]


def test_grafana_finds_prometheus_and_prometheus_the_front_door():
    sources = yaml.safe_load(
        (DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "targets" in panel}
    assert uids == {source["uid"] for source in sources}
    assert sources[0]["url"].split("//")[1].split(":")[0] in SERVICES
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert name in SERVICES
    assert f"--port={port}" in SERVICES[name]["command"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_small_and_does_not_run_as_root(path):
    text = path.read_text()
    stages = re.findall(r"^FROM \S+", text, re.MULTILINE)
    assert len(stages) == 2
    assert all(":latest" not in stage and ":" in stage for stage in stages)
    last = text[text.rindex("\nFROM") :]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*--start-period", last, re.MULTILINE)
    (probed,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", last)
    # A probe has no key. Importing the module would import vLLM.
    opened = re.search(
        r"OPEN_PATHS = frozenset\((.*)\)", (ROOT / "banaserve/api/auth.py").read_text()
    )
    assert f'"{probed}"' in opened[1]
    copied = re.findall(r"^COPY --from=build (\S+)", last, re.MULTILINE)
    assert copied == ["/opt/banaserve"]


def test_the_build_context_holds_what_the_build_needs_and_no_more():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc", "banaserve"}
    assert needed | {"requirements", "docker/build.sh"} == set(kept)


def store_metrics() -> set[str]:
    tier = TierReport(stats=TierStats(**dict.fromkeys(TierStats.__struct_fields__, 0)))
    numbers = dict.fromkeys(StoreStats.__struct_fields__, 0)
    text = prometheus_text(StoreStats(**{**numbers, "tiers": (tier,)}))
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) | {"banaserve_kvstore_up"}


def own_metrics() -> set[str]:
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {
        family.name + suffix
        for family in REGISTRY.collect()
        for suffix in suffixes.get(family.type, [])
        if family.name.startswith("banaserve_")
    }


def vllm_metrics() -> set[str]:
    package = Path(importlib.util.find_spec("vllm").origin).parent
    text = (package / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'name="(vllm:\w+)"', text))
    return names | {name + suffix for name in names for suffix in ("_total", "_bucket")}


def test_every_metric_of_the_dashboard_exists():
    known = own_metrics() | store_metrics() | vllm_metrics()
    shown = {
        name
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"\b(?:banaserve_|vllm:)\w+", target["expr"])
    }
    assert len(shown) > 40
    assert shown - known == set()


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
