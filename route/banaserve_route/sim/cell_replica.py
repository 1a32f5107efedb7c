"""Cell as a replica behind a balancer: many instances under one router and one controller."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from banaserve.base.types import Distance, InstanceId, Role
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.cluster.cell import Cell
from banaserve.sim.instances.prefix_cache import HASH_BLOCK_TOKENS
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import ReplicaId
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES, ReplicaJob

_HASHED_BYTES = HASH_BLOCK_TOKENS // BLOCK_TOKENS * UNIT_BYTES


class CellReplica:
    """Cell that takes jobs of a balancer, and sends back those that it cannot begin.

    While no instance serves, a request whose first token has been sent stays and waits for an
    instance, and a request without a first token is sent back.

    Attributes:
        nodes: Instances of each machine.
        num_jobs: Number of jobs in the cell.

    Args:
        node_size: Number of instances of one machine.
        between: Network path between two machines of the cell.
        most_requests: Number of requests from which on the cell has no room, as its balancer's
            peers are told.
    """

    def __init__(
        self,
        replica_id: str,
        region: str,
        timeline: Timeline,
        profile: Profile,
        system: System,
        node_size: int,
        between: Distance,
        most_requests: int,
    ) -> None:
        self.id = ReplicaId(replica_id)
        self.region = region
        roles = system.roles()
        self.nodes = nodes_of(roles, node_size)
        self.num_jobs = 0
        self._most_requests = most_requests
        self._timeline = timeline
        self._next = 0
        self._jobs: dict[int, ReplicaJob] = {}
        self._unbegun: set[int] = set()
        self.cell = Cell(
            timeline,
            profile,
            system,
            roles,
            None,
            0,
            lambda _: None,
            far=far_between(self.nodes, between),
            nodes=self.nodes,
            listener=self,
        )
        self._instances = tuple(self.cell.instances.values())

    # ---- called by its balancer

    @property
    def num_waiting(self) -> int:
        return sum(len(one.engine.waiting) for one in self._instances)

    @property
    def num_running(self) -> int:
        return self.num_jobs - self.num_waiting

    @property
    def kv_used_fraction(self) -> float:
        used = sum(one.engine.used_tokens for one in self._instances)
        return min(1.0, used / max(1, sum(one.engine.kv_tokens for one in self._instances)))

    @property
    def is_ready(self) -> bool:
        return self.cell.is_ready

    @property
    def has_room(self) -> bool:
        return self.num_jobs < self._most_requests and self.cell.is_ready

    def submit(self, job: ReplicaJob) -> None:
        """Take a job of the balancer; a job that fits no instance ends at once."""
        prompt_tokens = job.request.num_tokens
        output_tokens = max(1, len(job.output) // UNIT_BYTES * BLOCK_TOKENS)
        number, self._next = self._next, self._next + 1
        request = SimRequest(
            number,
            self._timeline.now_s,
            prompt_tokens,
            output_tokens,
            _hash_ids(job.request.prompt),
        )
        self._jobs[number] = job
        self._unbegun.add(number)
        self.num_jobs += 1
        refused = self.cell.num_refused
        self.cell.submit(request)
        if self.cell.num_refused > refused:
            self.began(request)
            self.ended(request)

    # ---- called by its cell

    def began(self, request: SimRequest) -> None:
        if request.id in self._unbegun:
            self._unbegun.discard(request.id)
            self._jobs[request.id].on_first()

    def ended(self, request: SimRequest) -> None:
        job = self._jobs.pop(request.id)
        self.num_jobs -= 1
        job.hit_tokens = request.found_tokens
        job.on_done()

    def stranded(self, request: SimRequest) -> bool:
        if request.id not in self._unbegun:
            return False
        self._unbegun.discard(request.id)
        job = self._jobs.pop(request.id)
        self.num_jobs -= 1
        assert job.on_refused is not None
        job.on_refused()
        return True


def _hash_ids(prompt: bytes) -> tuple[int, ...]:
    """Return the ids of the whole blocks in ``prompt``, which holds digests of smaller blocks."""
    whole = len(prompt) // _HASHED_BYTES * _HASHED_BYTES
    ends = range(_HASHED_BYTES, whole + 1, _HASHED_BYTES)
    digests = [blake2b(prompt[:end], digest_size=8).digest() for end in ends]
    return tuple(int.from_bytes(digest, "little") for digest in digests)


def nodes_of(
    roles: Sequence[tuple[str, Role]], node_size: int
) -> tuple[tuple[InstanceId, ...], ...]:
    """Return the instances of each machine, with roles mixed in the order of ``roles``."""
    names = [InstanceId(name) for name, _ in roles]
    return tuple(
        tuple(names[first : first + node_size]) for first in range(0, len(names), node_size)
    )


def far_between(
    nodes: Sequence[Sequence[InstanceId]], between: Distance
) -> dict[InstanceId, dict[InstanceId, Distance | None]]:
    """Return the network paths of each instance to all on other machines, equal for all pairs."""
    everyone = [name for node in nodes for name in node]
    found = {}
    for node in nodes:
        # One table for all instances of a machine: thousands of cells have one each.
        own = set(node)
        ways: dict[InstanceId, Distance | None] = {
            name: between for name in everyone if name not in own
        }
        found.update(dict.fromkeys(node, ways))
    return found
