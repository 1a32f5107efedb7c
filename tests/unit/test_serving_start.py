"""Questions to engines while a server starts: one that dies meanwhile holds nothing up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from banaserve.api import serving
from banaserve.engine.vllm import cluster as clusters
from banaserve.engine.vllm.cluster import Cluster, ClusterTimeouts
from banaserve.engine.vllm.compat.engine import EngineDeadError
from banaserve.engine.vllm.instance import State
from banaserve.errors import UserError
from banaserve.types import InstanceId
from waiting import until


async def test_a_question_that_is_never_answered_is_asked_again(monkeypatch):
    monkeypatch.setattr(serving, "_ANSWER_S", 0.01)
    asked = []

    async def ask() -> str:
        asked.append(1)
        if len(asked) == 1:
            await asyncio.Event().wait()
        if len(asked) == 2:
            raise EngineDeadError
        return "facts"

    assert await serving._answered(ask) == "facts"
    assert len(asked) == 3


async def test_instances_that_never_answer_end_the_start_in_one_line(monkeypatch):
    monkeypatch.setattr(serving, "_ANSWER_S", 0.001)
    with pytest.raises(UserError, match="do not answer: see their logs"):
        await serving._answered(asyncio.Event().wait)


class SlowClock:
    """Ten seconds have gone by since the engine was ready when anybody looks after it."""

    def now(self) -> float:
        return 10.0


async def test_an_engine_that_waited_for_the_others_to_start_has_not_stalled(monkeypatch):
    monkeypatch.setattr(clusters, "is_on_cpu", lambda: False)
    looked, killed = [], []

    def view() -> SimpleNamespace:
        looked.append(1)
        return SimpleNamespace(report=SimpleNamespace(at_s=0.0))

    async def probe(_: float) -> None:
        pass

    instance = SimpleNamespace(
        id=InstanceId("p0"),
        state=State.READY,
        pid=1,
        has_lost_client=False,
        view=view,
        probe=probe,
        kill=lambda: killed.append(1),
    )
    cluster = Cluster([instance], None, SlowClock(), ClusterTimeouts(stall_s=1.0))
    watching = asyncio.create_task(cluster._keep_fresh(instance))
    await until(lambda: len(looked) >= 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert killed == []
