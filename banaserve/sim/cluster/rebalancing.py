"""Load of a simulated cell's instances, as the rebalancer of the server sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from banaserve.base.types import ClusterView, InstanceId, Role
from banaserve.orchestrator.control.rebalancing import DecodeLoad, Stream, load_of
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.instances.instance import SimInstance


def loads(
    instances: Mapping[InstanceId, SimInstance], cluster: ClusterView, role: Role
) -> list[DecodeLoad]:
    """Return the load of each ready instance of ``role``, as ``cluster`` has it."""
    found = []
    for view in cluster.instances.values():
        if view.role is role and view.ready:
            engine = instances[view.id].engine
            found.append(load_of(view, engine.num_streams, _streams_of(engine)))
    return found


def _streams_of(engine: SimEngine) -> Callable[[], list[Stream]]:
    """Return a function that lists the requests whose KV is in the store, the oldest first."""

    def streams() -> list[Stream]:
        running = [
            Stream(
                request,
                request.prompt_tokens + engine.generated_by(request),
                False,
                request.rebalanced_s,
            )
            for request in engine.decoding.values()
        ]
        waiting = [
            Stream(request, request.all_tokens, True, request.rebalanced_s)
            for request in engine.waiting
            if request.generated
        ]
        return [*running, *waiting]

    return streams
