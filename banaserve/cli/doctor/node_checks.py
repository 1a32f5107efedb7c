"""Checks of ``banaserve doctor`` on several machines, from reports to findings. Pure."""

from __future__ import annotations

from banaserve.cli.doctor.checks import Finding, missing, ok, warning
from banaserve.kvstore.sizes import format_size
from banaserve.nodes.measuring.survey import LinkReport, NodeReport

MAX_CLOCK_S = 1.0
SLOW_ROUND_TRIP_S = 5e-3
SLOW_BYTES_PER_S = 1e9 / 8


def check_node(node: NodeReport, version: str, python: str) -> Finding:
    """Check a node.

    Args:
        version: Versions of banaserve and vLLM on this machine.
        python: Python release on this machine.
    """
    name, found = f"node {node.name}", node.found
    if found is None:
        advice = "run `banaserve node` there, with this cluster's key, and open its port"
        return missing(name, node.problem, advice)
    has = f"{len(found.gpus)} GPUs, " if found.gpus else ""
    has += f"{found.num_processors} cores, {format_size(found.memory_bytes)} available"
    if found.version != version:
        detail = f"{has}; {found.version}, here {version}"
        return missing(name, detail, "install the same on both")
    if found.model_problem:
        return missing(name, f"{has}; {found.model_problem}")
    if found.server:
        advice = f"end the server {found.server}, or take other nodes"
        return missing(name, f"{has}; it is in use", advice)
    if found.python.rpartition(".")[0] != python.rpartition(".")[0]:
        return warning(name, f"{has}; Python {found.python}", "take the same Python on both")
    if abs(node.ahead_s) > MAX_CLOCK_S:
        detail = f"{has}; its clock is {node.ahead_s:+.1f} s off"
        advice = "let NTP set it: logs and traces of the nodes cannot be put side by side"
        return warning(name, detail, advice)
    return ok(name, f"{has}; {found.version}")


def check_link(link: LinkReport) -> Finding:
    """Check a link from one machine to another."""
    name, measured = f"{link.source} to {link.target}", link.measured
    if measured.problem:
        advice = "a firewall between them? Nodes reach each other at the ports that they listen on"
        return missing(name, measured.problem, advice)
    detail = f"{1e3 * measured.round_trip_s:.2f} ms there and back, "
    detail += f"{8e-9 * measured.bytes_per_s:.1f} Gbit/s in one TCP connection"
    if measured.round_trip_s > SLOW_ROUND_TRIP_S or measured.bytes_per_s < SLOW_BYTES_PER_S:
        advice = "slow for moved layers, which cross it twice a step; serve in one place each"
        return warning(name, detail, advice)
    return ok(name, detail)
