"""Each cell of ``bench compare`` begins with the placement that the server started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from banaserve.base.errors import UserError
from banaserve.contracts.control_api import RoleRequest
from banaserve.contracts.instances import RoleChange
from banaserve.contracts.migration_api import Return
from banaserve.frontdoor.admin_client import AdminClient
from banaserve_bench.compare import command
from banaserve_bench.compare.command import StartPlacement


@dataclass
class Cluster:
    """Answers as the admin API does; a role switch takes two looks."""

    role_of: dict[str, str]
    away: dict[str, int] = field(default_factory=dict)
    under_way: int = 0
    refusals: int = 0
    told: list[Any] = field(default_factory=list)

    def placement(self) -> Any:
        self.under_way -= self.under_way > 0
        instances = [
            SimpleNamespace(id=name, role=role, units=[0] * self.away.get(name, 0))
            for name, role in self.role_of.items()
        ]
        migrations = [SimpleNamespace(is_open=self.under_way > 0)]
        return SimpleNamespace(instances=instances, migrations=migrations)

    def set_paused(self, paused: bool) -> None:
        self.told.append("paused" if paused else "goes on")

    def run(self, ask: Return) -> None:
        if self.refusals:
            self.refusals -= 1
            raise UserError("busy")
        self.told.append(ask)
        self.away.pop(ask.source)

    @property
    def roles(self) -> Cluster:
        return self

    def begin(self, ask: RoleRequest) -> RoleChange:
        self.told.append(ask)
        return RoleChange("r1", ask.instance, self.role_of[ask.instance], ask.role, "draining")

    def show(self, change_id: str, wait_s: float) -> RoleChange:
        ask = self.told[-1]
        self.role_of[ask.instance] = ask.role
        return RoleChange(change_id, ask.instance, "", ask.role, "done")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_AGAIN_S", 0.0)


def started(cluster: Cluster) -> StartPlacement:
    return StartPlacement(cast(AdminClient, cluster))


def test_modules_come_home_and_roles_back_while_the_orchestrator_rests() -> None:
    cluster = Cluster({"p0": "prefill", "d0": "decode", "d1": "decode"})
    start = started(cluster)
    cluster.role_of["d0"] = "prefill"
    cluster.away["d1"] = 2
    cluster.under_way, cluster.refusals = 3, 1
    start.restore()
    assert cluster.told == ["paused", Return("d1"), RoleRequest("d0", "decode"), "goes on"]
    assert cluster.role_of == {"p0": "prefill", "d0": "decode", "d1": "decode"}


def test_what_is_in_its_place_is_left_there() -> None:
    cluster = Cluster({"p0": "prefill", "d0": "decode"})
    started(cluster).restore()
    assert cluster.told == ["paused", "goes on"]


def test_what_does_not_come_back_is_told_and_the_orchestrator_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_TIMEOUT_S", 0.0)
    cluster = Cluster({"p0": "prefill"}, away={"p0": 1}, refusals=10**6)
    with pytest.raises(UserError, match="does not come back: busy"):
        started(cluster).restore()
    assert cluster.told == ["paused", "goes on"]
