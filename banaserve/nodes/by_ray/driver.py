"""Process that asks Ray for nodes and keeps an agent on each.

``python -m banaserve.nodes.by_ray.driver PARENT_PID`` reads one request, then orders, one per line,
and answers each with a line. All agents that it has placed end with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.base.platform.processes import die_with_parent
from banaserve.base.types import InstanceId, Role
from banaserve.nodes.by_ray.places import RayAnswer, RayOrder, RayRequest
from banaserve.nodes.places import AgentPlace
from banaserve.nodes.server.assignment import NodeFacts, assign, no_room, room

_HELD = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")
_GROUP_S = 60.0
_AGENT_S = 60.0
_FIND_S = 5.0
_CONNECT_S = 5.0
_INIT_S = 45.0
_MAX_WORDS = 300
_PIN, _PINCH = "node:", 0.001
"""Prefix and amount of the resource that Ray names after a node's address: asking for it pins an
actor to that node."""


@dataclass
class _Agent:
    """Agent of a node.

    Attributes:
        bundle: Resources that it has from Ray; pinned to a node if the node has joined later.
        group, index: Placement group and bundle of it; None where Ray has granted none.
        actor: Actor that keeps the agent; None for an agent that is not needed.
        host: Address of the node at which it was last found.
    """

    bundle: dict[str, float]
    group: Any = None
    index: int = 0
    actor: Any = None
    host: str = ""

    @property
    def is_pinned(self) -> bool:
        return any(name.startswith(_PIN) for name in self.bundle)


class RayAgents:
    """Agents that Ray runs as actors, those of the start in one placement group.

    Args:
        ray: The module ``ray``.
    """

    def __init__(self, ray: Any, request: RayRequest) -> None:
        self._ray = ray
        self._request = request
        self._agents: list[_Agent] = []
        self._group: Any = None
        self._known: set[str] = set()

    def connect(self) -> None:
        """Join the cluster.

        Raises:
            UserError: The cluster cannot be reached, or has another version of Ray.
        """
        ray, request = self._ray, self._request
        _check_answers(request.address)
        try:
            ray.init(
                address=request.address,
                namespace=f"banaserve-{request.name}",
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"--cluster {request.address}: {_one_line(error)}") from error

    def place(self) -> RayAnswer:
        """Start the agents; return their places and resources.

        Raises:
            UserError: The nodes have no room.
        """
        request = self._request
        self._known = {node["NodeManagerAddress"] for node in self._alive()}
        bundles = request.bundles or self._bundles()
        if not bundles:
            raise UserError(f"--cluster {request.address}: none of its nodes has a CPU to lend")
        self._agents = [_Agent(bundle) for bundle in bundles]
        first = [agent for agent in self._agents if not agent.is_pinned]
        self._group = self._granted([agent.bundle for agent in first])
        for index, agent in enumerate(first):
            agent.group, agent.index = self._group, index
            if index not in request.dropped:  # an agent of the start has the number of its bundle
                agent.actor = self._actor(agent)
        return RayAnswer([self._placed(number) for number in range(len(bundles))], bundles)

    def _placed(self, number: int) -> AgentPlace | None:
        """Return an agent's place at the start; None if it was dropped, or its node is not there.

        No other node replaces a node that has joined later.
        """
        if number in self._request.dropped:
            return None
        if not self._agents[number].is_pinned:
            return self.find(number, _AGENT_S)
        with contextlib.suppress(UserError):
            return self._started(number)
        return None

    def _started(self, number: int) -> AgentPlace:
        """Start an agent, and wait for its place."""
        agent = self._agents[number]
        if agent.group is None:
            agent.group = self._granted([agent.bundle])
        agent.actor = self._actor(agent)
        try:
            return self.find(number, _AGENT_S)
        except UserError:
            self.drop(number)
            raise

    def _actor(self, agent: _Agent) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from banaserve.nodes.by_ray.places import AgentActor

        made = self._ray.remote(AgentActor).options(
            num_cpus=agent.bundle["CPU"],
            num_gpus=agent.bundle.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                agent.group, placement_group_bundle_index=agent.index
            ),
        )
        return made.remote(self._request.key)

    def add(self, address: str) -> RayAnswer:
        """Start one more agent, with all resources that one of Ray's nodes has for instances.

        A node of the start that was dropped still has its lease, and its agent gets that lease.

        Raises:
            UserError: There is no such node, or the node has an agent already, or has no room.
        """
        alive = {node["NodeManagerAddress"]: node for node in self._alive()}
        host = address if address in alive else address.rpartition(":")[0]
        if host not in alive:
            raise UserError(
                f"Ray has no node {address}: it has {', '.join(alive)}; a node joins Ray with "
                "`ray start --address`"
            )
        there = [number for number, agent in enumerate(self._agents) if agent.host == host]
        if any(self._agents[number].actor is not None for number in there):
            raise UserError(f"node {host} is one of this server's already")
        self._known.add(host)
        if there:
            return RayAnswer([self._started(there[0])], number=there[0])
        need, facts = self._request.need, _facts(alive[host])
        if (most := room(facts, need)) < 1:
            raise UserError(f"node {host} has no room: {no_room(facts, need)}")
        bundle = {"CPU": float(most), **_gpus(most * need.num_gpus), f"{_PIN}{host}": _PINCH}
        number = len(self._agents)
        self._agents.append(_Agent(bundle))
        try:
            return RayAnswer([self._started(number)], [bundle], number)
        except UserError:
            self._agents.pop()
            raise

    def drop(self, number: int) -> None:
        """End an agent for good; a node of the start stays leased until the driver ends."""
        agent = self._agents[number]
        if agent.actor is not None:
            self._ray.kill(agent.actor, no_restart=True)
        agent.actor = None
        if agent.is_pinned:
            agent.host = ""
            if agent.group is not None:
                self._ray.util.remove_placement_group(agent.group)
            agent.group = None

    def gained(self) -> list[str]:
        """Return the addresses of nodes with CPUs that have appeared since the last call."""
        here = {n["NodeManagerAddress"] for n in self._alive() if _facts(n).max_instances}
        new = sorted(here - self._known)
        self._known |= here
        return new

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def find(self, number: int, timeout_s: float = _FIND_S) -> AgentPlace:
        """Return an agent's present place: Ray restarts a lost agent, maybe on another node.

        Raises:
            UserError: The agent has not been started yet, or Ray has no room for it.
        """
        agent = self._agents[number]
        if agent.actor is None:
            raise UserError("Ray has no room for its agent any more")
        try:
            host, port = self._ray.get(agent.actor.address.remote(), timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise UserError(f"Ray has not started an agent: {_one_line(error)}") from error
        agent.host = host
        return AgentPlace(host, port)

    def is_known(self) -> bool:
        """Return whether Ray still knows the placement group: a restarted head does not."""
        return self._ray.util.placement_group_table(self._group).get("state") in _HELD

    def _bundles(self) -> list[dict[str, float]]:
        """Return the resources of each agent, for the instances planned on its node."""
        need = self._request.need
        facts = [_facts(node) for node in self._alive()]
        if not self._request.instances:
            return [{"CPU": 1.0} for node in facts if node.max_instances]
        instances = [(InstanceId(name), Role(role)) for name, role in self._request.instances]
        assigned = [one for one in assign(facts, instances, need) if one.instances]
        # Ray chooses the nodes: a lost node may be replaced by another.
        return [
            {"CPU": float(len(one.instances)), **_gpus(len(one.instances) * need.num_gpus)}
            for one in assigned
        ]

    def _granted(self, bundles: Sequence[dict[str, float]]) -> Any:
        group = self._ray.util.placement_group(list(bundles), strategy="STRICT_SPREAD")
        try:
            self._ray.get(group.ready(), timeout=_GROUP_S)
        except self._ray.exceptions.GetTimeoutError:
            self._ray.util.remove_placement_group(group)
            wanted = "; ".join(_resources(bundle) for bundle in bundles)
            free = _resources(self._ray.available_resources())
            raise UserError(
                f"Ray has had no room for {_GROUP_S:g} seconds: {wanted}, each on a node of its "
                f"own; free in the whole cluster are {free}"
            ) from None
        return group


def _check_answers(address: str) -> None:
    """Raise UserError if nothing listens at the address: Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, port = host_and_port("--cluster", address)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise UserError(f"--cluster {address}: no Ray cluster answers there: {error}") from error


def _facts(node: dict[str, Any]) -> NodeFacts:
    has = node["Resources"]
    gpus = tuple(str(number) for number in range(int(has.get("GPU", 0))))
    memory_bytes = int(has.get("memory", 0))
    return NodeFacts(node["NodeManagerAddress"], gpus, memory_bytes, int(has.get("CPU", 0)))


def _gpus(num: int) -> dict[str, float]:
    return {"GPU": float(num)} if num else {}


def _resources(bundle: dict[str, float]) -> str:
    words = [f"{bundle[name]:g} {name}" for name in ("GPU", "CPU") if name in bundle]
    return " and ".join(words) or "none"


def _one_line(error: BaseException) -> str:
    # A task's error begins with a traceback, and ends with the exception that the task raised.
    words = str(getattr(error, "cause", None) or error)
    return " ".join(words.split())[:_MAX_WORDS] or type(error).__name__


def main() -> int:
    """Obey orders until standard input ends, no agent can be placed, or Ray has lost the agents."""
    die_with_parent(int(sys.argv[1]))
    # Ray prints to standard output: answers have a file descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def answer(said: RayAnswer) -> None:
        answers.write(msgspec.json.encode(said) + b"\n")

    def give_up() -> None:
        problem = f"--cluster {request.address}: Ray has not answered for {_INIT_S:g} seconds"
        answer(RayAnswer(problem=problem))
        os._exit(1)

    try:
        request = msgspec.json.decode(sys.stdin.buffer.readline(), type=RayRequest)
        agents = RayAgents(_import_ray(), request)
        patience = threading.Timer(_INIT_S, give_up)
        patience.daemon = True
        patience.start()
        agents.connect()
        patience.cancel()
        answer(agents.place())
    except UserError as error:
        answer(RayAnswer(problem=str(error)))
        return 1
    for line in sys.stdin.buffer:
        try:
            answer(_obeyed(agents, msgspec.json.decode(line, type=RayOrder)))
        except UserError as error:
            if not agents.is_known():
                return 1
            answer(RayAnswer(problem=str(error)))
    return 0


def _obeyed(agents: RayAgents, order: RayOrder) -> RayAnswer:
    match order.what:
        case "find":
            return RayAnswer([agents.find(order.number)])
        case "add":
            return agents.add(order.address)
        case "drop":
            agents.drop(order.number)
            return RayAnswer()
        case "look":
            return RayAnswer(gained=agents.gained())


def _import_ray() -> Any:
    # Usage statistics are off: users of banaserve are not to be counted by Ray.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError(
            "--cluster needs Ray beside banaserve, here and on the nodes: pip install ray"
        ) from None
    return ray


if __name__ == "__main__":
    sys.exit(main())
