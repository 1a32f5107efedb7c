"""Facts and findings of ``banaserve doctor`` on several machines."""

from __future__ import annotations

import asyncio
import platform
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve.cli.doctor.checks import Finding, failed, ok, warning
from banaserve.kvstore.sizes import format_size
from banaserve.nodes.by_ray.places import RayPlaces
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.measuring import LinkReport, NodeReport, survey_nodes
from banaserve.nodes.messages import Inspect, own_version
from banaserve.nodes.model_check import model_digest
from banaserve.nodes.places import GivenPlaces, Places
from banaserve.nodes.server.assignment import InstanceNeed

MAX_CLOCK_S = 1.0
SLOW_ROUND_TRIP_S = 5e-3
SLOW_BYTES_PER_S = 1e9 / 8


def examine_nodes(model: str, addresses: list[str], ray: str, key: str) -> Iterator[Finding]:
    """Yield findings for each node and each link between machines; takes a second per pair.

    Args:
        addresses: Agents' addresses as ``HOST:PORT``.
        ray: Address of a Ray cluster, on whose nodes agents run for the time of this call; empty
            for none.
        key: Key of the cluster; if empty, Ray's agents get a random one.

    Raises:
        UserError: Addresses or the key cannot be used, or Ray has no room.
    """
    folder = Path(tempfile.mkdtemp(prefix="banaserve-doctor-"))
    try:
        places: Places = GivenPlaces(addresses)
        if ray:
            key, need = key or secrets.token_hex(32), InstanceNeed()
            places = RayPlaces(ray, key, folder.name, [], need, folder / "ray.log")
        nodes, links = asyncio.run(_surveyed(places, key, _asked(model)))
        for node in nodes:
            yield check_node(node, own_version(), platform.python_version())
        yield from map(check_link, links)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _surveyed(
    places: Places, key: str, asked: Inspect
) -> tuple[list[NodeReport], list[LinkReport]]:
    found = await places.open(lambda _: None)
    try:
        return await survey_nodes(found, ClusterCredentials.of(key), asked)
    finally:
        await places.close()


def _asked(model: str) -> Inspect:
    """Return the question to a node, about the model only if it is on this machine."""
    try:
        folder = models.find_here(model)
    except UserError:
        return Inspect()  # the finding on this machine's model reports this
    if folder is None:
        return Inspect()
    argv = ("--model", str(folder))
    return Inspect(argv, model_digest(argv))


def check_node(node: NodeReport, version: str, python: str) -> Finding:
    """Check a node.

    Args:
        version: Versions of banaserve and vLLM on this machine.
        python: Python release on this machine.
    """
    name, found = f"node {node.name}", node.found
    if found is None:
        advice = "run `banaserve node` there, with this cluster's key, and open its port"
        problem = node.problem.removeprefix(f"{name}: ").removeprefix(f"{name} ")
        return failed(name, problem, advice)
    has = f"{len(found.gpus)} GPUs, " if found.gpus else ""
    has += f"{found.num_processors} cores, {format_size(found.memory_bytes)} available"
    if found.version != version:
        detail = f"{has}; {found.version}, here {version}"
        return failed(name, detail, "install the same on both")
    if found.model_problem:
        return failed(name, f"{has}; {found.model_problem}")
    if found.server:
        advice = f"end the server {found.server}, or take other nodes"
        return failed(name, f"{has}; it is in use", advice)
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
        return failed(name, measured.problem, advice)
    detail = f"{1e3 * measured.round_trip_s:.2f} ms there and back, "
    detail += f"{8e-9 * measured.bytes_per_s:.1f} Gbit/s in one TCP connection"
    if measured.round_trip_s > SLOW_ROUND_TRIP_S or measured.bytes_per_s < SLOW_BYTES_PER_S:
        advice = "slow for moved layers, which cross it twice a step; serve in one place each"
        return warning(name, detail, advice)
    return ok(name, detail)
