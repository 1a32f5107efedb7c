"""Survey of nodes before a server uses them: their resources, and the distances between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from banaserve.base.errors import ProtocolError
from banaserve.base.net.addresses import written
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import NodeLostError, connect
from banaserve.nodes.measuring.link_measuring import measure_link
from banaserve.nodes.messages import Inspect, Inspected, LinkMeasured, MeasureLink, NodeMessage
from banaserve.nodes.places import AgentPlace

T = TypeVar("T", bound=NodeMessage)
HERE = "this machine"
_ANSWER_S = 60.0
"""Maximum time for an answer, in seconds: reading a large model from a slow disk takes long."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report on a node.

    Attributes:
        name: ``HOST:PORT`` of the node.
        found: Resources of the node; None if it does not answer.
        ahead_s: Lead of the node's clock over this machine's clock, in seconds.
        problem: Reason why the node does not answer; empty if it does.
    """

    name: str
    found: Inspected | None
    ahead_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Report on the link from one node, or from this machine, to another node."""

    source: str
    target: str
    measured: LinkMeasured


async def survey_nodes(
    places: Sequence[AgentPlace], credentials: ClusterCredentials, asked: Inspect
) -> tuple[list[NodeReport], list[LinkReport]]:
    """Inspect all nodes, then measure the links of all pairs sequentially.

    Returns:
        The nodes in their order; links from here to each node, then between all that answer.
    """
    nodes = await asyncio.gather(*(inspected(place, credentials, asked) for place in places))
    there = [place for place, node in zip(places, nodes, strict=True) if node.found is not None]
    links = []
    for target in there:
        measured = await measure_link(target.host, target.port, credentials)
        links.append(LinkReport(HERE, _name(target), measured))
    for source in there:
        for target in there:
            if source != target:
                measured = await measured_from(source, target, credentials)
                links.append(LinkReport(_name(source), _name(target), measured))
    return list(nodes), links


async def inspected(
    place: AgentPlace, credentials: ClusterCredentials, asked: Inspect
) -> NodeReport:
    """Return a report on the node at ``place``, without taking the node."""
    try:
        found = await _asked(place, credentials, asked, Inspected)
    except (NodeLostError, ProtocolError) as error:
        return NodeReport(_name(place), None, problem=str(error))
    return NodeReport(_name(place), found, found.time_s - time.time())


async def measured_from(
    source: AgentPlace, target: AgentPlace, credentials: ClusterCredentials
) -> LinkMeasured:
    """Let one node measure the link to another."""
    question = MeasureLink(target.host, target.port)
    try:
        return await _asked(source, credentials, question, LinkMeasured)
    except (NodeLostError, ProtocolError) as error:
        return LinkMeasured(problem=str(error))


async def _asked(
    place: AgentPlace, credentials: ClusterCredentials, question: NodeMessage, kind: type[T]
) -> T:
    link = await connect(place.host, place.port, credentials)
    try:
        await link.send(question)
        async with asyncio.timeout(_ANSWER_S):
            answer = await link.receive()
    except TimeoutError:
        raise NodeLostError(f"node {_name(place)} does not answer") from None
    finally:
        await link.close()
    if not isinstance(answer, kind):
        raise ProtocolError(f"it says {type(answer).__name__}")
    return answer


def _name(place: AgentPlace) -> str:
    return written(place.host, place.port)
