"""A server whose guests are reached over TCP, as they would be on another machine."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveHeads, MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from observing import writers
from server_run import Run

pytestmark = pytest.mark.e2e


def ask(server: Run) -> list[int]:
    """The tokens of an answer whose prompt no cache knows."""
    body = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 32}
    how = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    answer = server.post("/v1/completions", {**body, **how})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_layers_and_heads_move_over_tcp(serve: Callable[..., Run]) -> None:
    server = serve("--pd", "1:1", "--dtype", "float32", "--migration-transport", "tcp")
    admin, expected = AdminClient(*find_admin(server.run_dir)), ask(server)
    assert admin.run(MoveLayers("d0", "p0", (4, 12))).state == "done"
    assert ask(server) == expected
    (guest,) = [pid for log, pid in writers(server.run_dir) if log.startswith("guest")]
    # One connection for messages, one for KV.
    connections = psutil.Process(guest).net_connections("tcp")
    assert len([one for one in connections if one.status == "ESTABLISHED"]) >= 2
    assert admin.run(MoveHeads("d0", "p0", {20: (0, 2)})).state == "done"
    assert ask(server) == expected
    assert admin.run(Return("d0")).state == "done"
    assert ask(server) == expected
