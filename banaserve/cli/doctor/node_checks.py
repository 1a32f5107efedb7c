"""Checks of ``banaserve doctor`` on several machines, from reports to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from banaserve.cli.doctor.checks import CheckStatus, Finding
from banaserve.kvstore.sizes import format_size
from banaserve.nodes.measuring.survey import LinkReport, NodeReport

MAX_CLOCK_S = 1.0
SLOW_ROUND_TRIP_S = 5e-3
SLOW_BYTES_PER_S = 1e9 / 8


def check_nodes(nodes: Sequence[NodeReport], version: str, python: str) -> Iterator[Finding]:
    """Yield a finding for each node.

    Args:
        version: Versions of banaserve and vLLM on this machine.
        python: Python release on this machine.
    """
    for node in nodes:
        yield _check_node(node, version, python)


def check_links(links: Sequence[LinkReport]) -> Iterator[Finding]:
    """Yield a finding for each link from one machine to another."""
    for link in links:
        yield _check_link(link)


def _check_node(node: NodeReport, version: str, python: str) -> Finding:
    name, found = f"node {node.name}", node.found
    if found is None:
        advice = "run `banaserve node` there, with this cluster's key, and open its port"
        return Finding(name, CheckStatus.MISSING, node.problem, advice)
    has = f"{len(found.gpus)} GPUs, " if found.gpus else ""
    has += f"{found.num_processors} cores, {format_size(found.memory_bytes)} available"
    if found.version != version:
        detail = f"{has}; {found.version}, here {version}"
        return Finding(name, CheckStatus.MISSING, detail, "install the same on both")
    if found.model_problem:
        return Finding(name, CheckStatus.MISSING, f"{has}; {found.model_problem}")
    if found.server:
        advice = f"end the server {found.server}, or take other nodes"
        return Finding(name, CheckStatus.MISSING, f"{has}; it is in use", advice)
    if found.python.rpartition(".")[0] != python.rpartition(".")[0]:
        advice = "take the same Python on both"
        return Finding(name, CheckStatus.WARNING, f"{has}; Python {found.python}", advice)
    if abs(node.ahead_s) > MAX_CLOCK_S:
        detail = f"{has}; its clock is {node.ahead_s:+.1f} s off"
        advice = "let NTP set it: logs and traces of the nodes cannot be put side by side"
        return Finding(name, CheckStatus.WARNING, detail, advice)
    return Finding(name, CheckStatus.OK, f"{has}; {found.version}")


def _check_link(link: LinkReport) -> Finding:
    name, measured = f"{link.source} to {link.target}", link.measured
    if measured.problem:
        advice = "a firewall between them? Nodes reach each other at the ports that they listen on"
        return Finding(name, CheckStatus.MISSING, measured.problem, advice)
    detail = f"{1e3 * measured.round_trip_s:.2f} ms there and back, "
    detail += f"{8e-9 * measured.bytes_per_s:.1f} Gbit/s in one TCP connection"
    if measured.round_trip_s > SLOW_ROUND_TRIP_S or measured.bytes_per_s < SLOW_BYTES_PER_S:
        advice = "slow for moved layers, which cross it twice a step; serve in one place each"
        return Finding(name, CheckStatus.WARNING, detail, advice)
    return Finding(name, CheckStatus.OK, detail)
