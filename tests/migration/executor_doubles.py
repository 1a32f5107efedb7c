"""Instances with roles and a view of themselves, and an executor of them, without engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

import migration_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.types import InstanceId, InstanceReport, InstanceView, Role
from banaserve.serving.instances.service_state import ServiceState
from banaserve.serving.moves.guest_monitor import GuestMonitor
from banaserve.serving.operations.executor import MoveExecutor
from banaserve.serving.operations.roles import Roles

FACTS = doubles.FACTS
CONFIG = SimpleNamespace(
    additional_config={},
    cache_config=SimpleNamespace(num_gpu_blocks=300, block_size=16),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
    model_config=SimpleNamespace(
        dtype=torch.float32,
        get_num_kv_heads=lambda _: FACTS.num_kv_heads,
        get_num_attention_heads=lambda _: 9,
        get_head_size=lambda: 64,
        get_hidden_size=lambda: 576,
    ),
)


class Instance(doubles.Instance):
    """One that serves: a role, requests and a view of itself."""

    def __init__(self, name: str, cannot: str = "") -> None:
        super().__init__(name, cannot)
        self.role = Role.PREFILL if name.startswith("p") else Role.DECODE
        self.engine.vllm_config = CONFIG
        self.service = ServiceState(name)
        self.inflight_requests = 0
        self.keeps_streams = False
        self.num_changes = 0
        self.budget = self.role
        self.step_tokens = 0
        self.board = SimpleNamespace(meter=SimpleNamespace(call_s=None, overlap_fraction=float))

    def set_role(self, role: Role) -> None:
        self.role = role

    async def take_budget(self, role: Role, step_tokens: int = 0) -> None:
        self.budget, self.step_tokens = role, step_tokens

    def has_changed(self) -> None:
        self.num_changes += 1

    def move_streams(self) -> int:
        if self.keeps_streams:
            return 0
        moved, self.inflight_requests = self.inflight_requests, 0
        return moved

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and self.service.takes_requests

    def view(self) -> InstanceView:
        report = InstanceReport(0, 0, 0.0, 0.0, 0.0)
        return InstanceView(
            self.id,
            self.role,
            self.takes_requests,
            report,
            self.inflight_requests,
            0,
            1.0,
            placements=self.placements,
            step_tokens=self.step_tokens,
        )


class World:
    """Instances d0, p0, p1 and x0, which cannot migrate, and an executor of them."""

    def __init__(self, folder: Path) -> None:
        self.cluster = doubles.Cluster(folder)
        instances = {
            name: Instance(name, "MLA cannot be moved" if name == "x0" else "")
            for name in self.cluster.instances
        }
        for name, one in instances.items():
            self.cluster.coordinator.hosts[name].instance = one
        self.instances = instances
        self.served = SimpleNamespace(
            instances=instances, views=lambda: {n: one.view() for n, one in instances.items()}
        )
        self.engine = instances[InstanceId("d0")].engine
        clock = WallClock()
        self.roles = Roles(instances, clock)
        self.overseer = GuestMonitor(self.cluster.coordinator)
        self.executor = MoveExecutor(
            self.served,  # type: ignore[arg-type]
            self.cluster.coordinator,
            self.roles,
            clock,
            kv_growth=2.0,
        )
