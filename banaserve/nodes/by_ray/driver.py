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
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.base.platform.processes import die_with_parent
from banaserve.base.types import InstanceId, Role
from banaserve.nodes.assignment import NodeFacts, assign, no_room, room
from banaserve.nodes.by_ray.places import RayAnswer, RayOrder, RayRequest
from banaserve.nodes.places import AgentPlace

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


class RayAgents:
    """Agents that Ray runs as actors, in a placement group with one bundle per node.

    Args:
        ray: The module ``ray``.

    Attributes:
        bundles: Resources of each agent of the start.
    """

    def __init__(self, ray: Any, request: RayRequest) -> None:
        self._ray = ray
        self._request = request
        self.bundles: list[dict[str, float]] = []
        self._actors: list[Any] = []
        self._hosts: dict[int, str] = {}
        self._group: Any = None
        self._groups: dict[int, Any] = {}
        self._known: set[str] = set()
        self._leases: dict[str, int] = {}

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

    def place(self) -> list[AgentPlace | None]:
        """Start the agents.

        Returns:
            Places of the agents; None for an agent that was dropped, or whose node has joined later
            and is not there now.

        Raises:
            UserError: The nodes have no room.
        """
        request = self._request
        self._known = {node["NodeManagerAddress"] for node in self._alive()}
        self.bundles = bundles = request.bundles or self._bundles()
        if not bundles:
            raise UserError(f"--cluster {request.address}: none of its nodes has a CPU to lend")
        self._group = self._granted(bundles)
        self._actors = [
            None if number in request.dropped else self._actor(self._group, number, bundle)
            for number, bundle in enumerate(bundles)
        ]
        first = [
            None if actor is None else self.find(number, _AGENT_S)
            for number, actor in enumerate(self._actors)
        ]
        return first + [self._placed_again(bundle) for bundle in request.added]

    def _placed_again(self, bundle: dict[str, float]) -> AgentPlace | None:
        """Start the agent of a node that has joined; no other node replaces that node."""
        number = len(self._actors)
        self._actors.append(None)
        if number not in self._request.dropped:
            with contextlib.suppress(UserError):
                return self._start_added(number, bundle)
        return None

    def _actor(self, group: Any, index: int, bundle: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from banaserve.nodes.by_ray.actor import AgentActor

        made = self._ray.remote(AgentActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
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
        if host in self._hosts.values():
            raise UserError(f"node {host} is one of this server's already")
        self._known.add(host)
        if (number := self._leases.pop(host, -1)) >= 0:
            self._actors[number] = self._actor(self._group, number, self.bundles[number])
            return RayAnswer([self.find(number, _AGENT_S)], number=number)
        need, facts = self._request.need, _facts(alive[host])
        if (most := room(facts, need)) < 1:
            raise UserError(f"node {host} has no room: {no_room(facts, need)}")
        bundle = {"CPU": float(most), **_gpus(most * need.num_gpus), f"{_PIN}{host}": _PINCH}
        self._actors.append(None)
        try:
            return RayAnswer([self._start_added(len(self._actors) - 1, bundle)], [bundle])
        except UserError:
            self._actors.pop()
            raise

    def _start_added(self, number: int, bundle: dict[str, float]) -> AgentPlace:
        group = self._granted([bundle])
        self._actors[number], self._groups[number] = self._actor(group, 0, bundle), group
        try:
            return self.find(number, _AGENT_S)
        except UserError:
            self.drop(number)
            raise

    def drop(self, number: int) -> None:
        """End an agent for good; a node of the start stays leased until the driver ends."""
        actor, self._actors[number] = self._actors[number], None
        host = self._hosts.pop(number, "")
        if host and number < len(self.bundles):
            self._leases[host] = number
        if actor is not None:
            self._ray.kill(actor, no_restart=True)
        if (group := self._groups.pop(number, None)) is not None:
            _remove(group)

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
        if (actor := self._actors[number]) is None:
            raise UserError("Ray has no room for its agent any more")
        try:
            host, port = self._ray.get(actor.address.remote(), timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise UserError(f"Ray has not started an agent: {_one_line(error)}") from error
        self._hosts[number] = host
        return AgentPlace(host, port)

    def is_known(self) -> bool:
        """Return whether Ray still knows the placement group: a restarted head does not."""
        from ray.util.placement_group import placement_group_table

        return placement_group_table(self._group).get("state") in _HELD

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
        from ray.util.placement_group import placement_group

        group = placement_group(list(bundles), strategy="STRICT_SPREAD")
        try:
            self._ray.get(group.ready(), timeout=_GROUP_S)
        except self._ray.exceptions.GetTimeoutError:
            _remove(group)
            wanted = "; ".join(_resources(bundle) for bundle in bundles)
            free = _resources(self._ray.available_resources())
            raise UserError(
                f"Ray has had no room for {_GROUP_S:g} seconds: {wanted}, each on a node of its "
                f"own; free in the whole cluster are {free}"
            ) from None
        return group


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _check_answers(address: str) -> None:
    """Raise UserError if nothing listens at the address: Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, port = host_and_port("--cluster", address)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise UserError(f"--cluster {address}: nobody answers there: {error}") from error


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
        answer(RayAnswer(agents.place(), agents.bundles))
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
            "--cluster needs Ray on this machine and on the nodes: pip install 'banaserve[ray]'"
        ) from None
    return ray


if __name__ == "__main__":
    sys.exit(main())
