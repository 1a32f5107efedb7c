"""Calls into an engine's processes: what travels fits its contract, or an error says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.base.config.serve_config import Budget
from banaserve.base.errors import MigrationError, ProtocolError
from banaserve.contracts.migration_api import Overlapping
from banaserve.contracts.move_phase import MovePhase
from banaserve.contracts.rpc.engine_api import CoreApi, PoolResize, PoolStatus, WorkerApi
from banaserve.contracts.rpc.typed_rpc import RemoteCall, call, implements
from banaserve.contracts.trace_events import EngineAnswer, EngineNotes
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.migration.units.context import Context
from banaserve.migration.units.experts import ExpertSet
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.migration.worker_api import (
    CommitReport,
    GuestLinkStatus,
    HostStatus,
    KvStatus,
    LinkState,
    MigrationApi,
    MoveFacts,
    MoveReport,
    UnitStatus,
)

ADDRESS = GuestAddress("g1", "/run/g1.sock", "token", "shm", "/run", "00" * 32, target="p0")
MOVE = MoveReport(
    "m1", "m0", MovePhase.COPIED, "g1", "", 7, MoveFacts(rounds=2, precopy_bytes=9, prepare_s=0.5)
)
HOME = MoveReport("m2", "m0", MovePhase.FAILED, None, "the guest is lost", None, MoveFacts())
UNITS = [
    UnitStatus("m0", LayerRange(2, 5), "g1", 3, None),
    UnitStatus("m3", HeadSet({5: (0, 2), 6: (1,)}), "g1", 4, None),
    UnitStatus("m4", Context(7, 9), "g2", 5, 128),
    UnitStatus("m5", ExpertSet({1: (0, 3), 4: (2,)}), "g2", 5, None),
]
OVERLAP = Overlapping(4, "its tokens look at later ones", 1, 2, 6, 0.25)
STATUS = HostStatus(
    epoch=5,
    guests={
        "g1": GuestLinkStatus(LinkState.READY, "", 12, 0.5, 3),
        "g2": GuestLinkStatus(LinkState.LOST, "killed"),
        "g3": GuestLinkStatus(LinkState.CONNECTING),
    },
    moves={"m1": MOVE, "m2": HOME},
    units=UNITS,
    guests_lost=1,
    steps_lost=2,
    overlap=OVERLAP,
    kv=KvStatus(300, 600, 150, 3000, 30, None, 42),
    graph_sizes=[1, 8],
    graphs_captured=3,
)
POOL = PoolStatus(450, 400, 3, 1, 0)
NOTES = EngineNotes("cmpl-1-p", [], 2)
FINGERPRINT = Fingerprint(
    **{
        field.name: {int: 16, str: "a", bool: True}.get(field.type, ())
        for field in msgspec.structs.fields(Fingerprint)
    }
)

CALLS: list[tuple[RemoteCall[Any], object]] = [
    (call(MigrationApi.banaserve_migration_attach, [ADDRESS]), None),
    (call(MigrationApi.banaserve_migration_detach, "g1"), None),
    (call(MigrationApi.banaserve_migration_prepare, "m1", LayerRange(2, 5), "g1"), MOVE),
    (call(MigrationApi.banaserve_migration_move_on, "m1", "m0", None), HOME),
    (call(MigrationApi.banaserve_migration_precopy, "m1"), MOVE),
    (call(MigrationApi.banaserve_migration_commit, "m1"), CommitReport(MOVE, 6)),
    (call(MigrationApi.banaserve_migration_free, "m1"), MOVE),
    (call(MigrationApi.banaserve_migration_abort, "m1"), HOME),
    (call(MigrationApi.banaserve_migration_overlap, 4), OVERLAP),
    (call(MigrationApi.banaserve_migration_share, "g1", 0.5), None),
    (call(MigrationApi.banaserve_migration_experts, True), {1: [3, 0], 4: [0, 2]}),
    (call(MigrationApi.banaserve_migration_status, True), STATUS),
    (call(CoreApi.banaserve_pool_info), POOL),
    (call(CoreApi.banaserve_resize_pool, 450, True), PoolResize(POOL, 2)),
    (call(CoreApi.banaserve_set_budget, 2048, 16), Budget(2048, 16)),
    (call(CoreApi.banaserve_notes, ["cmpl-1"]), EngineAnswer(7.5, [[NOTES]])),
    (call(WorkerApi.banaserve_fingerprint), FINGERPRINT),
    (call(WorkerApi.banaserve_describe_adapter, "/adapters/sql"), "0123abcd"),
]
CONTRACTS = (MigrationApi, CoreApi, WorkerApi)


def methods(contract: type[Any]) -> dict[str, Callable[..., Any]]:
    return dict(inspect.getmembers(contract, inspect.isfunction))


def serving(name: str, does: Callable[..., Any]) -> Callable[..., object]:
    """``does`` as the method of a process that keeps the contract."""
    contract = next(c for c in CONTRACTS if name in methods(c))
    return implements(getattr(contract, name))(lambda owner, *args: does(*args))


def over_the_wire(value: object) -> Any:
    """As vLLM carries it: encoded without types."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def test_every_method_is_tried_here() -> None:
    assert {asked.name for asked, _ in CALLS} == {n for c in CONTRACTS for n in methods(c)}


@pytest.mark.parametrize(("asked", "value"), CALLS, ids=[asked.name for asked, _ in CALLS])
def test_arguments_and_values_arrive_as_they_were_given(
    asked: RemoteCall[Any], value: object
) -> None:
    seen: list[tuple[Any, ...]] = []

    def does(*args: Any) -> object:
        seen.append(args)
        return value

    reply = serving(asked.name, does)(None, *over_the_wire(asked.args))
    assert asked.read(over_the_wire(reply)) == value
    assert msgspec.to_builtins(seen[0]) == asked.args
    assert over_the_wire(asked.args) == over_the_wire(seen[0])


def test_modules_of_each_kind_arrive() -> None:
    for unit in UNITS:
        asked = call(MigrationApi.banaserve_migration_prepare, "m1", unit.modules, "g1")
        seen = []

        def does(_: str, modules: object, __: str, seen: list[object] = seen) -> MoveReport:
            seen.append(modules)
            return MOVE

        serving(asked.name, does)(None, *over_the_wire(asked.args))
        assert seen == [unit.modules]


@pytest.mark.parametrize(("asked", "value"), CALLS, ids=[asked.name for asked, _ in CALLS])
@pytest.mark.parametrize(
    "reply",
    [
        None,
        {},
        {"error": ""},
        {"type": "Answered"},
        {"type": "Answered", "value": {"epoch": "five", "num_tokens": "five"}},
        {"type": "Answered", "value": 7},
        {"type": "Refused"},
        {"type": "Done", "value": None},
    ],
)
def test_a_reply_that_does_not_fit_names_the_method(
    asked: RemoteCall[Any], value: object, reply: object
) -> None:
    with pytest.raises(ProtocolError, match=f"^{asked.name} has a reply that breaks its contract"):
        asked.read(reply)


def test_every_missing_field_of_a_status_is_noticed() -> None:
    asked = call(MigrationApi.banaserve_migration_status)
    for field in msgspec.structs.fields(HostStatus):
        plain = msgspec.to_builtins(STATUS)
        del plain[field.name]
        with pytest.raises(ProtocolError, match=f"missing required field `{field.name}`"):
            asked.read({"type": "Answered", "value": plain})


def test_what_is_refused_keeps_its_words() -> None:
    def refuses(move_id: str) -> MoveReport:
        raise MigrationError(f"there is no move {move_id}")

    asked = call(MigrationApi.banaserve_migration_free, "m9")
    reply = serving(asked.name, refuses)(None, *asked.args)
    with pytest.raises(MigrationError, match=r"^there is no move m9$"):
        asked.read(over_the_wire(reply))


@given(st.one_of(st.none(), st.integers(), st.booleans(), st.lists(st.text(), max_size=2)))
def test_arguments_that_break_the_contract_are_refused(wrong: Any) -> None:
    asked = call(MigrationApi.banaserve_migration_free, wrong)
    reply = serving(asked.name, lambda _: pytest.fail("it was called"))(None, *asked.args)
    with pytest.raises(MigrationError, match="Expected `str`"):
        asked.read(reply)


def test_too_many_arguments_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        serving("banaserve_migration_free", lambda _: MOVE)(None, "m1", "m2")


def test_measurements_are_told_as_far_as_they_were_made() -> None:
    assert MOVE.facts.measured() == {
        "rounds": 2,
        "precopy_bytes": 9,
        "precopy_s": 0.0,
        "prepare_s": 0.5,
    }
    facts = MoveFacts(freed_bytes=0, stall_s=0.0)
    assert facts.measured().keys() == {
        "rounds", "precopy_bytes", "precopy_s", "freed_bytes", "stall_s",
    }  # fmt: skip


def test_workers_and_engine_cores_have_what_the_contracts_list() -> None:
    pytest.importorskip("vllm")
    from banaserve.engine.compat import engine
    from banaserve.engine.compat.engine import EngineCoreProc
    from banaserve.mains.worker import WorkerExtension
    from banaserve.migration.host import install

    install.install_utilities()
    engine.install_utilities()
    for contract, served in (
        (MigrationApi, WorkerExtension),
        (WorkerApi, WorkerExtension),
        (CoreApi, EngineCoreProc),
    ):
        for name, method in methods(contract).items():
            found = getattr(served, name)
            wanted = list(inspect.signature(method).parameters.values())[1:]
            assert list(inspect.signature(found).parameters.values())[1:] == wanted
