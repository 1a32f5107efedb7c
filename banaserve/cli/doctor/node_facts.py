"""Facts that ``banaserve doctor`` collects about other machines."""

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
from banaserve.base.models import hub
from banaserve.cli.doctor.checks import Finding
from banaserve.cli.doctor.node_checks import check_link, check_node
from banaserve.nodes.by_ray.places import RayPlaces
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.measuring.survey import LinkReport, NodeReport, survey_nodes
from banaserve.nodes.messages import Inspect, own_version
from banaserve.nodes.model_check import model_digest
from banaserve.nodes.places import GivenPlaces, Places
from banaserve.nodes.server.assignment import InstanceNeed


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
        folder: Path | None = models.packaged_folder()
        if model != models.PACKAGED:
            folder = models.find_local(model) or hub.cached(models.HUB_IDS.get(model, model))
    except UserError:
        return Inspect()  # the finding on this machine's model reports this
    if folder is None or not folder.is_dir():
        return Inspect()
    argv = ("--model", str(folder))
    return Inspect(argv, model_digest(argv))
