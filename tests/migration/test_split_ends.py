"""Both ends of a split sequence, over a real channel, with vLLM's kernels."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops

from banaserve.base.errors import GuestLostError, ProtocolError
from banaserve.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.kv.remote_kv import UnitLocation
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.context_split import ContextAttention, RemoteContext
from banaserve.migration.modules.paged_attention import KvPages
from banaserve.migration.modules.split_attention import RunAttention
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.tensors import TensorBundle, from_wire, restore
from banaserve.migration.units.context import Context, HostContext, OlderBlocks
from banaserve.migration.units.registry import decode_request, make_unit
from banaserve.transport.channels.connect import over_unix
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import Message
from depth import seeds
from split_doubles import (
    BLOCK_SIZE,
    GROUP,
    HEAD_SIZE,
    ISA,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    SCALE,
    batch_of,
    random_step,
    write,
)
from unit_doubles import engine_of


class Inner:
    """vLLM's implementation of attention, whose metadata is the batch itself."""

    scale = SCALE

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        write(key, value, cache, slots)

    def forward(self, layer: Any, query: Any, *args: Any, output: torch.Tensor) -> torch.Tensor:
        *_, cache, batch = args
        pages = cache.view(len(cache), NUM_KV_HEADS, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
        plan = ops.cpu_attn_get_scheduler_metadata(
            batch.num_reqs, query.shape[1], NUM_KV_HEADS, HEAD_SIZE, batch.seq_lens,
            query.dtype, batch.query_start_loc, True, -1, ISA, True,
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query, *pages, output, batch.query_start_loc, batch.seq_lens, SCALE, True,
            None, -1, batch.block_table_tensor, 0.0, plan, None,
        )  # fmt: skip
        return output


class Ends:
    """A host's attention, and a guest with ``older`` in a thread."""

    def __init__(self, common: Any, away: RemoteBlocks, here: Any, there: Any) -> None:
        self.layer = SimpleNamespace(impl=Inner(), kv_cache=here)
        self.lost: list[GuestLostError] = []
        self.common = common
        builder = SimpleNamespace(build=lambda _, batch: batch)
        step_context = StepContext(builder, BLOCK_SIZE, NUM_BLOCKS)
        builder.build(0, common)
        pages = KvPages.of(self.layer, self.layer.impl, here)
        self.older = OlderBlocks(pages, {"l": there}, {"l": SCALE})
        ours, theirs = socket.socketpair()
        self._channel = over_unix(theirs)
        self.link = GuestClient("g", over_unix(ours), None, lambda: 1, 20.0)  # type: ignore[arg-type]
        residence = UnitLocation("u", self.link, None, 0)  # type: ignore[arg-type]
        residence.epoch = 1
        attention = ContextAttention(
            self.layer, "l", step_context, lambda _, e: self.lost.append(e), pages, Ranks()
        )
        attention.arrange(RemoteContext(residence, away, step_context))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(PeerGoneError):
            while True:
                self._answer(self._channel.receive(3600.0))

    def _answer(self, message: Message) -> None:
        request = decode_request(message.body)
        assert isinstance(request, RunAttention)
        if request.step is not None:
            self.older.describe(request.step_id, restore(request.step, message.tensors))
        query = from_wire(message.tensors[0])
        bundle = TensorBundle()
        indices = tuple(map(bundle.put, self.older.run(request.name, request.step_id, query)))
        answer = messages.encode(messages.StepOutputs(indices))
        self._channel.send(Message(answer, tuple(bundle.tensors)), 20.0)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        output = torch.full_like(query, float("nan"))
        new = torch.full((len(query), NUM_KV_HEADS, HEAD_SIZE), float("nan"))
        arguments = self.layer, query, new, new, self.layer.kv_cache, self.common
        return self.layer.impl.forward(*arguments, output=output)

    def close(self) -> None:
        self.link.close()
        self._thread.join()
        self._channel.close()


@pytest.mark.parametrize("seed", seeds(12, 12))
def test_both_ends_give_what_vllm_gives(seed: int) -> None:
    common, _, away = random_step(seed)
    common.slot_mapping[:] = -1
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
    here = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    write(key, value, here, torch.arange(len(key)))
    query = torch.randn(
        common.num_actual_tokens, NUM_KV_HEADS * GROUP, HEAD_SIZE, generator=generator
    )
    whole = Inner().forward(None, query, here, common, output=torch.empty_like(query))
    there = torch.full_like(here, float("nan"))
    there[away.ids()] = here[away.ids()]
    here[away.ids()] = float("nan")
    ends = Ends(common, away, here, there)
    try:
        for _ in range(2):
            assert torch.allclose(ends.attend(query), whole, atol=2e-6)
        assert ends.link.round_trips == (2 if len(away) else 0)
        assert ends.lost == []
    finally:
        ends.close()


def test_a_guest_that_is_lost_is_told_once_and_ends_no_step() -> None:
    away = RemoteBlocks(NUM_BLOCKS)
    away.set([1])
    common = batch_of([40], [1], [[1, 2]])
    common.slot_mapping[:] = -1
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    ends = Ends(common, away, cache, cache.clone())
    ends.link.close()
    try:
        output = ends.attend(torch.randn(1, NUM_KV_HEADS * GROUP, HEAD_SIZE))
        assert len(ends.lost) == 1
        assert not output.isnan().any()
    finally:
        ends.close()


def test_a_step_that_names_what_is_not_there_is_refused() -> None:
    pages = KvPages(write, (NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.float32)
    cache = torch.zeros(4, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    older = OlderBlocks(pages, {"l": cache}, {"l": SCALE})
    one = torch.tensor([32], dtype=torch.int32)
    fields = {"query_start": one.new_tensor([0, 1]), "num_tokens": one}
    for blocks in ([4], [-1], []):
        with pytest.raises(ProtocolError, match="not here"):
            older.describe(7, {**fields, "block_table": one.new_tensor([blocks])})
    with pytest.raises(ProtocolError, match="no step"):
        older.describe(7, fields)
    with pytest.raises(ProtocolError, match="more tokens"):
        older.describe(7, {**fields, "block_table": one.new_tensor([[0]]), "num_tokens": one + 1})
    with pytest.raises(ProtocolError, match="not been described"):
        older.run("l", 7, torch.zeros(1, NUM_KV_HEADS * GROUP, HEAD_SIZE))


def test_only_what_is_away_is_poisoned_healed_and_given_back() -> None:
    shape = NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
    host = HostKv({name: torch.zeros(shape) for name in ("l0", "l1", "l2")}, 1.0)
    for tensor in host.tensors.values():
        tensor[:] = 1
    engine = engine_of(host, SimpleNamespace(impl=Inner()), poisons=True)
    unit = make_unit("u", Context(0, 2), engine)
    assert isinstance(unit, HostContext)
    unit.away.set([1, 2])
    unit.poison()
    unit.away.mark_local([2, 3])
    freed = unit.free()
    assert [one.predicted_bytes for one in freed] == [host.page_bytes] * 2
    assert [one.freed_bytes for one in freed] == [host.page_bytes] * 2
    for name in unit.names:
        assert (host.tensors[name][[1, 2]] == 0).all(), "given back, and healed"
        assert (host.tensors[name][[0, 3]] == 1).all()
    assert (host.tensors["l2"] == 1).all()
    unit.make_room()
    assert (host.tensors["l0"][3:] == 1).all(), "what is new at home stays"
