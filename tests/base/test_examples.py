"""The examples that start no engine: they run, and their packages install."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sticky_routing import Sticky, StickyOptions

from banaserve.base.errors import UserError
from banaserve.base.types import ClusterView, InstanceId, InstanceView, RequestId, RequestView, Role
from banaserve.orchestrator.control.routing.legs import LegOptions
from installed_packages import install_examples

pytestmark = pytest.mark.deep

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.room
def test_the_trace_that_is_simulated_compares_all_systems(tmp_path: Path) -> None:
    made = ran(str(EXAMPLES / "simulate_trace.py"))
    heading, *rows = made.splitlines()
    assert heading.split()[0] == "SYSTEM"
    assert [row.split()[0] for row in rows] == ["colocated", "static", "elastic"]
    assert all(float(row.split()[1]) > 0 for row in rows)
    trace = tmp_path / "trace.jsonl"
    lines = [{"t": i, "input_length": 100, "output_length": 5} for i in range(10)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert ran(str(EXAMPLES / "simulate_trace.py"), str(trace)) != made
    command = [sys.executable, str(EXAMPLES / "simulate_trace.py"), str(tmp_path / "none.jsonl")]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    [line] = failed.stderr.splitlines()
    assert line.startswith("cannot read")


@pytest.mark.parametrize("name", ["serve_one_to_one.py", "connector_only.py"])
def test_an_example_does_not_ask_a_server_that_it_has_not_started(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, str(EXAMPLES / name), f"--port={port}"]
        failed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == f"port {port} is taken: give another one with --port"


@pytest.mark.early
def test_installed_examples_are_found_by_the_commands(tmp_path: Path) -> None:
    install_examples([EXAMPLES / "routing_policy", EXAMPLES / "store_tier"], tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    found = ran("-m", "banaserve", "doctor", PYTHONPATH=path)
    for plugin in (
        "sticky of example-sticky-routing 1.0",
        "dictionary of example-dictionary-tier 1.0",
    ):
        assert any(plugin in line for line in found.splitlines()), found
    assert "refused" not in found


def views(**inflight: int) -> ClusterView:
    return ClusterView(
        0.0,
        {
            InstanceId(name): InstanceView(
                InstanceId(name),
                Role.PREFILL if name.startswith("p") else Role.DECODE,
                True,
                None,
                count,
                0,
                1000.0,
            )
            for name, count in inflight.items()
        },
    )


def test_the_sticky_policy_leaves_an_instance_that_is_busier_by_more_than_its_lead() -> None:
    policy = Sticky(StickyOptions(max_lead_requests=2), LegOptions())
    request = RequestView(RequestId("r"), 100)
    first = policy.route(request, views(p0=0, p1=0, d0=0, d1=1))
    assert (first.prefill, first.decode) == ("p0", "d0")
    still = policy.route(request, views(p0=2, p1=0, d0=2, d1=0))
    assert (still.prefill, still.decode) == ("p0", "d0")
    left = policy.route(request, views(p0=3, p1=0, d0=0, d1=0))
    assert (left.prefill, left.decode) == ("p1", "d0")
    with pytest.raises(UserError, match="max_lead_requests is -1"):
        StickyOptions(max_lead_requests=-1)
