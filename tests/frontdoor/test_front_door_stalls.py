"""A client whose request has come while the front door stood still is read before it is judged."""

from __future__ import annotations

from typing import Any

import pytest
import uvicorn
from prometheus_client.registry import REGISTRY

pytest.importorskip("vllm")

from banaserve.frontdoor import app

STALLED = "banaserve_front_door_stalled_seconds_total"


class Sweeps:
    """Stands for the edge: counts how often its time limits are enforced."""

    def __init__(self) -> None:
        self.number = 0

    def sweep(self, now_s: float) -> None:
        self.number += 1


async def test_limits_of_clients_wait_until_the_loop_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(app, "monotonic", lambda: now_s[0])
    edge: Any = Sweeps()
    server = app._Server(uvicorn.Config(lambda: None), edge, None)

    async def ticks(first: int, last: int) -> int:
        before = edge.number
        for counter in range(first, last):
            await server.on_tick(counter)
            now_s[0] += 0.1
        return int(edge.number - before)

    assert await ticks(1, 11) == 2
    before_s = REGISTRY.get_sample_value(STALLED) or 0.0
    now_s[0] += 12.0
    assert await ticks(11, 16) == 0, "the first look after the stall"
    assert await ticks(16, 21) == 1
    assert (REGISTRY.get_sample_value(STALLED) or 0.0) - before_s == pytest.approx(12.0)
