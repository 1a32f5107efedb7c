"""The shared words: values that pass between floors. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NewType

InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)


class Role(Enum):
    """What the router sends to an instance. The engine itself does not know it."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What an instance last said of itself.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests admitted by the engine and not yet in a batch.
        kv_used_fraction: Share of the KV blocks in use, in [0, 1].
        busy_fraction: Share of wall time spent in forward passes, smoothed, in [0, 1].
        at_s: When the report was made, on the router's clock.
    """

    num_running: int
    num_waiting: int
    kv_used_fraction: float
    busy_fraction: float
    at_s: float


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as a policy sees it: its last report with the router's own counts on top.

    Attributes:
        report: None until the first report of this incarnation.
        inflight_requests: Requests that the router has sent there and that have not ended.
        inflight_prefill_tokens: Prompt tokens of those that were neither cached nor computed yet,
            by the router's own knowledge; live, never stale.
        prefill_tokens_per_s: Measured prefill speed, for turning tokens into seconds.
    """

    id: InstanceId
    role: Role
    ready: bool
    report: InstanceReport | None
    inflight_requests: int
    inflight_prefill_tokens: int
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All instances at one moment of the router's clock."""

    now_s: float
    instances: Mapping[InstanceId, InstanceView]

    def serving(self, role: Role) -> tuple[InstanceView, ...]:
        """Ready instances of ``role``, in the order of their ids."""
        found = [view for view in self.instances.values() if view.ready and view.role is role]
        return tuple(sorted(found, key=lambda view: view.id))


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a routing policy may know of a request."""

    id: RequestId
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request runs. ``prefill`` is None where one instance does both legs."""

    prefill: InstanceId | None
    decode: InstanceId
    reason: str
