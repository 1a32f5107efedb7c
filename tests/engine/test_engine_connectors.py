"""What engine cores ask of a connector: of the store's own, and of none that users bring along."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.base.config.serve_config import Budget
from banaserve.contracts.environment import INSTANCE_VARIABLE
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.contracts.trace_events import EngineAnswer
from banaserve.engine.compat import engine as compat
from banaserve.engine.connector.connector import StoreConnector, client_name
from banaserve.engine.connector.handover import Handover
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.interface import TierStats

ANSWER = EngineAnswer(1.0, [])


class Connector:
    """As ``StoreConnector``."""

    def __init__(self) -> None:
        self.max_tokens = 0

    def limit_steps(self, num_tokens: int) -> None:
        self.max_tokens = num_tokens

    def notes_of(self, names: list[str]) -> EngineAnswer:
        return ANSWER


def core(monkeypatch: pytest.MonkeyPatch, connector: Any, name: str) -> Any:
    monkeypatch.setattr(compat, "own_budget", lambda config: (2048, 64))
    transfer = SimpleNamespace(kv_connector=name) if name else None
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer), connector=connector
    )
    return SimpleNamespace(scheduler=scheduler)


def budget(core: Any) -> Budget:
    return call(CoreApi.banaserve_set_budget, 512, 16).read(compat._set_budget(core, 512, 16))


def notes(core: Any) -> EngineAnswer | None:
    return call(CoreApi.banaserve_notes, ["r"]).read(compat._notes(core, ["r"]))


def test_the_stores_connector_hears_of_budgets_and_is_asked_for_notes(monkeypatch) -> None:
    connector = Connector()
    ours = core(monkeypatch, connector, "StoreConnector")
    assert budget(ours) == Budget(512, 16)
    assert connector.max_tokens == 512
    assert notes(ours) == ANSWER


@pytest.mark.parametrize(("connector", "name"), [(object(), "LMCacheConnectorV1"), (None, "")])
def test_another_connector_is_left_alone(monkeypatch, connector: Any, name: str) -> None:
    theirs = core(monkeypatch, connector, name)
    assert budget(theirs) == Budget(512, 16)
    assert notes(theirs) is None


class ClearedStore:
    """A client of a store that has this after it was cleared; None: it does not answer."""

    def __init__(self, stats: StoreStats | None) -> None:
        self._stats = stats

    def clear(self) -> int | None:
        return None if self._stats is None else 0

    def stats(self) -> StoreStats | None:
        return self._stats


def cleared(used_slots: int = 0, **tier: Any) -> StoreStats:
    nothing: dict[str, Any] = dict.fromkeys(StoreStats.__struct_fields__, 0)
    report = TierReport(stats=TierStats(**{"name": "ssd"} | tier))
    return StoreStats(**nothing | {"used_slots": used_slots, "tiers": (report,)})


@pytest.mark.parametrize(
    ("stats", "is_empty"),
    [
        (cleared(), True),
        (cleared(name="peers", available=False), True),  # theirs to keep
        (None, False),
        (cleared(used_slots=1), False),
        (cleared(num_blocks=1), False),
        (cleared(in_flight=1), False),
        (cleared(available=False, problem="the disk is full"), False),
        (cleared(keeps="blocks"), False),
    ],
)
def test_a_reset_of_the_store_is_one_where_it_is_empty_with_its_tiers(
    stats: StoreStats | None, is_empty: bool
) -> None:
    connector = StoreConnector.__new__(StoreConnector)
    connector._client = ClearedStore(stats)  # type: ignore[assignment]
    assert connector.reset_cache() == is_empty


def test_all_processes_of_an_engine_are_one_client_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(INSTANCE_VARIABLE, raising=False)
    of_scheduler = client_name("0a1b")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert client_name("0a1b") == of_scheduler
    assert client_name("2c3d") != of_scheduler


@pytest.mark.parametrize(
    ("adapter", "instance", "asks"),
    [(None, "", True), ("an adapter", "", False), ("an adapter", "p0.1", True)],
)
def test_only_what_a_server_of_ours_has_named_is_shared_of_an_adapter(
    monkeypatch: pytest.MonkeyPatch, adapter: str | None, instance: str, asks: bool
) -> None:
    """Plain vLLM's block hashes stay the same where the files of an adapter were replaced."""
    monkeypatch.delenv(INSTANCE_VARIABLE, raising=False)
    if instance:
        monkeypatch.setenv(INSTANCE_VARIABLE, instance)
    asked: list[Any] = []
    connector = StoreConnector.__new__(StoreConnector)
    connector._scheduler = SimpleNamespace(  # type: ignore[assignment]
        match=lambda *given: asked.append(given) or 5, allocated=lambda *given: asked.append(given)
    )
    request: Any = SimpleNamespace(lora_request=adapter)
    matched = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, object(), matched[0] or 0)  # type: ignore[arg-type]
    assert matched == (5 if asks else 0, False)
    assert len(asked) == (2 if asks else 0)


@pytest.mark.parametrize("field", ["push_to", "pushed_from"])
def test_a_handover_that_the_store_would_refuse_counts_as_none(field: str) -> None:
    """Plain vLLM passes a client's own on; the store ends a connection with what is no message."""
    given = {"banaserve_handover": {"hold": 7, field: "h" * 257}}
    assert Handover.of(given) == Handover()
