"""Tensors of a step come and go between messages and a device; the device is torch's "meta"."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from banaserve.base.errors import UserError
from banaserve.kernels.interface import Batch, PartialAttention
from banaserve.migration.host.placement import PlacementManager
from banaserve.migration.modules.layer_proxy import RemoteLayers
from banaserve.migration.modules.split_attention import RemoteAttention
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import tensors
from banaserve.migration.rpc.messages import AttentionSlice, Build, GuestAddress, KvShape
from banaserve.migration.rpc.tensors import TensorBundle, restore, to_wire
from banaserve.migration.units import guest_unit
from banaserve.migration.units.context import Context, GuestContext
from banaserve.migration.units.heads import GuestHeads, HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.serving.launch import launcher as launchers
from banaserve.serving.launch.devices import Devices, check_groups
from banaserve.serving.launch.launcher import SpawnLauncher
from banaserve.serving.launch.messages import StartEngine, StartGuest

META = torch.device("meta")
HEADS, SIZE, HEAD_SIZE = 2, 4, 64


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tensors that left the device: "meta" holds no values, so zeros leave in their place."""
    left: list[Any] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == META:
            left.append(tuple(tensor.shape))
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(tensors, "to_host", to_host)
    return left


def test_a_message_says_which_of_its_tensors_were_on_a_device(crossed: list[Any]) -> None:
    values = {
        "there": torch.empty(3, dtype=torch.int32, device=META),
        "here": torch.ones(2, dtype=torch.int32),
        "numbers": np.arange(2),
        "plain": 4,
    }
    packed_in = TensorBundle()
    packed = packed_in.put_all(values)
    assert crossed == [(3,)]
    again = restore(packed, packed_in.tensors, META)
    assert again["there"].device == META
    assert again["here"].device.type == "cpu"
    assert isinstance(again["numbers"], np.ndarray)
    assert again["plain"] == 4
    on_cpu = restore(packed, packed_in.tensors)
    assert on_cpu["there"].device.type == "cpu", "as a guest on a CPU takes it"


def link_of(*values: torch.Tensor) -> Any:
    return SimpleNamespace(
        collect=lambda num_tokens: list(values), check_shape=lambda tensor, wanted: tensor
    )


class Layer(nn.Module):
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return hidden_states, residual


def test_a_guests_answers_go_to_the_hosts_device() -> None:
    step_context: Any = SimpleNamespace(num_tokens=3)
    residence: Any = SimpleNamespace(link=link_of(torch.zeros(3, 8), torch.zeros(3, 8)))
    hidden = torch.empty(3, 8, device=META)
    model = nn.ModuleList([Layer()])
    layers = RemoteLayers(model, [0], ["l"], step_context, Ranks(), lambda *_: None)
    layers.arrange(residence)
    assert [value.device for value in layers.collect(hidden)] == [META] * 2
    attention = RemoteAttention(residence, step_context)
    assert [value.device for value in attention.collect(hidden, hidden)] == [META] * 2


class Kernels:
    """Notes where everything lies that it is called with."""

    name = "noting"

    def __init__(self) -> None:
        self.seen: set[torch.device] = set()

    def partial_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, *_: Any
    ) -> PartialAttention:
        self.seen |= {t.device for t in (query, key, value, batch.block_table, batch.range_end)}
        return PartialAttention(
            torch.empty_like(query), torch.empty(query.shape[:2], device=query.device)
        )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Of an engine whose device is "meta"."""
    kernels = Kernels()
    monkeypatch.setattr(guest_unit, "device_of", lambda config: META)
    monkeypatch.setattr(guest_unit, "attends_with", lambda config: kernels)
    landing = SimpleNamespace(region=None, close=lambda: None)
    monkeypatch.setattr(guest_unit, "StagingBuffer", lambda *_: landing)
    return kernels


SHAPE = KvShape(5, (HEADS, SIZE, 2 * HEAD_SIZE), "float32", "LBHNC", SIZE)
SLICE = AttentionSlice("l", HEADS, HEADS, HEAD_SIZE, 0.125, None, None)


def test_heads_of_a_guest_are_written_and_attended_on_its_device(
    kernels: Kernels, crossed: list[Any]
) -> None:
    build = Build("u", SHAPE, 2, HeadSet({0: tuple(range(HEADS))}), slices=(SLICE,))
    unit = GuestHeads(None, None, build, 1)  # type: ignore[arg-type]
    ints = {
        "query_start_loc": [0, 2], "query_start_loc_cpu": [0, 2], "seq_lens": [2],
        "block_table_tensor": [[1]], "slot_mapping": [4, 5],
    }  # fmt: skip
    there: dict[str, Any] = {
        name: torch.empty(
            np.shape(value), dtype=torch.int64 if name == "slot_mapping" else torch.int32,
            device="cpu" if name.endswith("cpu") else META,
        )
        for name, value in ints.items()
    }  # fmt: skip
    plain = {"num_reqs": 1, "num_actual_tokens": 2, "max_query_len": 2, "max_seq_len": 2}
    tensors = TensorBundle()
    packed = tensors.put_all({**there, **plain, "causal": True})
    step = unit.read_step(packed, tensors.tensors)
    assert step.common.slot_mapping.device == META
    assert step.common.query_start_loc_cpu.device.type == "cpu"
    new = torch.zeros(2, HEADS, HEAD_SIZE)
    assert unit.run("l", step, new, new, new).device == META
    assert kernels.seen == {META}
    unit.close()


def test_older_blocks_of_a_guest_are_read_on_its_device(kernels: Kernels) -> None:
    build = Build("u", SHAPE, 0, Context(0, 1), slices=(SLICE,))
    unit = GuestContext(None, None, build, 1)  # type: ignore[arg-type]
    ints = torch.int32
    fields = {
        "block_table": torch.tensor([[1, 2]], dtype=ints),
        "query_start": torch.tensor([0, 1], dtype=ints),
        "num_tokens": torch.tensor([8], dtype=ints),
    }
    query = torch.zeros(1, HEADS, HEAD_SIZE)
    tensors = TensorBundle()
    tensors.put(query)
    packed = tensors.put_all(fields)
    part = unit.run("l", 1, packed, tensors.tensors)
    assert part.output.device == META
    assert kernels.seen == {META}


def test_experts_of_a_guest_on_a_gpu_have_memory_to_compute_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker import workspace

    from banaserve.migration.guest import environment

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(workspace, "_manager", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(environment, "device_of", lambda config: gpu)
    monkeypatch.setattr(environment, "share_group", lambda: None)
    monkeypatch.setattr(environment, "set_current_vllm_config", contextlib.nullcontext)
    monkeypatch.setattr(environment.compat, "join_ranks", lambda *_, **__: None)
    monkeypatch.setattr(environment.compat, "end_ranks", lambda: None)
    parallel = SimpleNamespace(rank=0, tensor_parallel_size=1, disable_custom_all_reduce=False)
    config: Any = SimpleNamespace(parallel_config=parallel)
    with environment.guest_environment(config, "rendezvous"):
        assert workspace.current_workspace_manager()._device == gpu


@pytest.mark.parametrize(("landed", "store"), [(True, True), (True, False), (False, True)])
def test_steps_are_not_cut_where_a_guest_has_to_be_asked_for_what_the_store_loads(
    landed: bool, store: bool
) -> None:
    """A host that has posted a part holds the channel until it has been answered."""
    residence = SimpleNamespace(link=object(), has_landed=landed)
    unit = SimpleNamespace(residence=residence, modules=LayerRange(1, 2), microbatch_blocker="")
    placement = PlacementManager.__new__(PlacementManager)
    placement._units = {"u": unit}  # type: ignore[dict-item]
    config = SimpleNamespace(kv_transfer_config=object() if store else None)
    placement._engine = SimpleNamespace(config=config)  # type: ignore[assignment]
    assert ("what the store loads" in placement._why_wait()) is (landed and store)


def test_values_leave_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class OnGpu:
        """What torch is asked of a tensor there."""

        device, shape, dtype = torch.device("cuda", 0), (2,), torch.float32

        def detach(self) -> OnGpu:
            return self

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> Any:
        calls.append(("pinned", pin_memory))
        return SimpleNamespace(copy_=lambda source: calls.append("copied") or "values")

    monkeypatch.setattr(tensors, "torch", SimpleNamespace(empty=empty))
    assert tensors.to_host(OnGpu()) == "values"  # type: ignore[arg-type, comparison-overlap]
    assert calls == [("pinned", True), "copied"]


def test_nothing_is_copied_that_is_in_its_place() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert tensors.to_host(tensor).data_ptr() == tensor.data_ptr()
    assert tensors.to_device(tensor, torch.device("cpu")) is tensor
    assert to_wire(tensor).data.ctypes.data == tensor.data_ptr()


async def test_a_guest_sees_the_devices_of_the_instance_that_it_runs_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = SpawnLauncher(["--model", "m"], Devices({"d0": "0,1", "p0": "2"}))
    seen: list[str | None] = []

    def spawn(order: object, environment: dict[str, str]) -> object:
        seen.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    monkeypatch.setattr(launchers, "spawn", spawn)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for target in ("p0", "d0", ""):
        address = GuestAddress("g", "c", "t", "shm", str(tmp_path), "00", target=target)
        await launcher.start(StartGuest(address, str(tmp_path / "log")))
    await launcher.start(StartEngine("p0", "ipc://x", str(tmp_path / "log")))
    assert seen == ["2", "0,1", None, "2"]


@pytest.mark.parametrize(
    ("groups", "num_ranks", "wrong"),
    [
        (["0", "1"], [1, 1], ""),
        (["0", "0"], [1, 1], ""),
        (["0,1", "2, 3"], [2, 2], ""),
        (["0,1", "2"], [2, 1], ""),
        (["0,1", "2"], [2, 2], "--devices '2': .*2 tensor-parallel ranks .*such as '0,1'"),
        (["0,0"], [2], "--devices '0,0': .*different GPUs"),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(
    groups: list[str], num_ranks: list[int], wrong: str
) -> None:
    if not wrong:
        check_groups(groups, num_ranks)
        return
    with pytest.raises(UserError, match=wrong):
        check_groups(groups, num_ranks)
