"""Process that asks Ray for nodes and keeps an agent on each.

``python -m banaserve.nodes.ray_driver PARENT_PID`` reads one request, then numbers of agents that
were lost, a line each, and answers each with a line. What it has placed ends with it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from banaserve.errors import UserError
from banaserve.net.addresses import host_and_port
from banaserve.nodes.assignment import NodeFacts, assign
from banaserve.nodes.places import AgentPlace
from banaserve.nodes.ray_places import RayAnswer, RayRequest
from banaserve.platform.processes import die_with_parent
from banaserve.types import InstanceId, Role

_HELD = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")
_GROUP_S = 60.0
_AGENT_S = 60.0
_FIND_S = 5.0
_CONNECT_S = 5.0
_INIT_S = 45.0
_MAX_WORDS = 300


class RayAgents:
    """Agents that Ray runs as actors, in a placement group of one bundle a node.

    Args:
        ray: The module.

    Attributes:
        bundles: Resources of each agent.
    """

    def __init__(self, ray: Any, request: RayRequest) -> None:
        self._ray = ray
        self._request = request
        self.bundles: list[dict[str, float]] = []
        self._actors: list[Any] = []
        self._group: Any = None

    def connect(self) -> None:
        """Join the cluster.

        Raises:
            UserError: It cannot be reached, or is of another version.
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

    def place(self) -> list[AgentPlace]:
        """Start them.

        Raises:
            UserError: The nodes have no room.
        """
        ray, request = self._ray, self._request
        self.bundles = bundles = request.bundles or self._bundles()
        if not bundles:
            raise UserError(f"--cluster {request.address}: none of its nodes has a CPU to lend")
        self._group = self._granted(bundles)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from banaserve.nodes.ray_actor import AgentActor

        for number, bundle in enumerate(bundles):
            made = ray.remote(AgentActor).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
            )
            self._actors.append(made.remote(request.key))
        return [self.find(number, _AGENT_S) for number in range(len(self._actors))]

    def find(self, number: int, timeout_s: float = _FIND_S) -> AgentPlace:
        """Where an agent is now: Ray starts one that is lost again, maybe on another node.

        Raises:
            UserError: It has not come yet.
        """
        try:
            host, port = self._ray.get(self._actors[number].address.remote(), timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise UserError(f"Ray has not started an agent: {_one_line(error)}") from error
        return AgentPlace(host, port)

    def is_known(self) -> bool:
        """Whether Ray knows what it has placed here: a head that was started anew does not."""
        from ray.util.placement_group import placement_group_table

        return placement_group_table(self._group).get("state") in _HELD

    def _bundles(self) -> list[dict[str, float]]:
        """Resources of one node each, for as many instances as are planned there."""
        need = self._request.need
        facts = [_facts(node) for node in self._ray.nodes() if node["Alive"]]
        if not self._request.instances:
            return [{"CPU": 1.0} for node in facts if node.max_instances]
        instances = [(InstanceId(name), Role(role)) for name, role in self._request.instances]
        assigned = [one for one in assign(facts, instances, need) if one.instances]
        # Ray chooses the nodes: one that is lost may be replaced by another.
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
            wanted = "; ".join(_resources(bundle) for bundle in bundles)
            free = _resources(self._ray.available_resources())
            raise UserError(
                f"Ray has had no room for {_GROUP_S:g} seconds: {wanted}, each on a node of its "
                f"own; free in the whole cluster are {free}"
            ) from None
        return group


def _check_answers(address: str) -> None:
    """Raises UserError where nothing listens: Ray itself asks for minutes."""
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
    return " ".join(str(error).split())[:_MAX_WORDS] or type(error).__name__


def main() -> int:
    """Obey until standard input ends, nothing can be placed, or Ray has forgotten it."""
    die_with_parent(int(sys.argv[1]))
    # Ray prints to where it likes: answers have a descriptor of their own.
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
            answer(RayAnswer([agents.find(int(line))]))
        except UserError as error:
            if not agents.is_known():
                return 1
            answer(RayAnswer(problem=str(error)))
    return 0


def _import_ray() -> Any:
    # Its own checks of memory end engines that start, and nobody here is to be counted.
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
