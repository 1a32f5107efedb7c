"""Steps in parts through layers here and in guests behind real channels; no engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.base.errors import GuestLostError
from banaserve.migration.kv.step_context import StepContext, common_from
from banaserve.migration.microbatch import overlap
from banaserve.migration.microbatch.overlap import Overlap
from banaserve.migration.modules.layer_proxy import LayerChain, RemoteLayers, RunLayers
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_channel import GuestChannel
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.tensors import TensorBundle, restore
from banaserve.migration.units.registry import decode_request
from banaserve.transport.channels.connect import over_unix
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import Message
from many_parts import as_many_as_can_be

WIDTH, ROOM, NUM_LAYERS, STALL_S = 512, 64, 6, 20.0
LENGTHS = [3, 40, 1, 17]


class Layer(nn.Module):
    """Each token looks at itself and at all before it in its sequence, as they were written here.

    A token that runs before those in front of it, or twice, changes the result.
    """

    def __init__(self, common: Callable[[], CommonAttentionMetadata]) -> None:
        super().__init__()
        self._common = common
        self.written = torch.zeros(len(LENGTHS) * ROOM, WIDTH)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        common = self._common()
        self.written[common.slot_mapping] += hidden_states
        seen = torch.empty_like(hidden_states)
        for token, slot in enumerate(common.slot_mapping.tolist()):
            first = slot - int(positions[token])
            seen[token] = self.written[first : slot + 1].mean(0)
        before = hidden_states if residual is None else residual
        return seen + 0.1 * before, 0.5 * before + seen


class Guest:
    """Serves layers in a thread of its own, as a guest's process does."""

    def __init__(self, num_layers: int, name: str) -> None:
        ours, theirs = socket.socketpair()
        self.link = GuestClient(name, over_unix(ours), None, lambda: 1, STALL_S)  # type: ignore[arg-type]
        self.dies_at = -1
        self.follow: list[int] = []
        self._common: Any = None
        self._layers = LayerChain([Layer(lambda: self._common) for _ in range(num_layers)])
        self._channel = over_unix(theirs)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        channel = GuestChannel(self._channel)
        try:
            while len(self.follow) != self.dies_at:
                message = channel.receive(3600.0)
                request = decode_request(message.body)
                assert isinstance(request, RunLayers)
                channel.expect(request.num_follow)
                self.follow.append(request.num_follow)
                channel.answer(message, self._run(request, message))
        except PeerGoneError:
            pass
        channel.close()
        self._channel.close()

    def _run(self, request: RunLayers, message: Message) -> Message:
        self._common = common_from(restore(request.step, message.tensors))
        bundle = TensorBundle()
        values = self._layers.run(restore(request.arguments, message.tensors))
        outputs = messages.StepOutputs(tuple(bundle.put(value) for value in values), 1e-3)
        return Message(messages.encode(outputs), tuple(bundle.tensors))

    def close(self) -> None:
        self.link.close()
        self._thread.join()


class Host:
    """A model of layers of which some are in guests.

    Args:
        ranges: Each with its guest.
        max_microbatches: Of a step.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, Guest]], max_microbatches: int) -> None:
        self.lost: list[str] = []
        self.layers = nn.ModuleList(Layer(self._common) for _ in range(NUM_LAYERS))
        builder = SimpleNamespace(build=lambda _, common: common)
        self._build = builder
        self.step_context = StepContext(builder, ROOM, len(LENGTHS))
        self.overlap = Overlap(self.layers, self.step_context, "", max_microbatches)
        self.ranges = []
        for begin, end, guest in ranges:
            residence: Any = SimpleNamespace(
                unit_id="u", working_epoch=1, link=guest.link, saves=False
            )
            names = [f"l{n}" for n in range(begin, end)]
            arguments = names, self.step_context, Ranks(), self._on_lost
            found = RemoteLayers(self.layers, range(begin, end), *arguments)
            found.arrange(residence)
            self.ranges.append(found)
        self.overlap.step_in("")

    @staticmethod
    def _common() -> CommonAttentionMetadata:
        metadata = get_forward_context().attn_metadata
        assert isinstance(metadata, dict)
        common: CommonAttentionMetadata = metadata["l0"]
        return common

    def _on_lost(self, _: GuestClient, error: GuestLostError) -> None:
        self.lost.append(str(error))

    def step(
        self, common: CommonAttentionMetadata, positions: torch.Tensor, behind_first: float = 0
    ) -> torch.Tensor:
        """What the model returns for a batch; hidden states follow from the slots.

        Args:
            behind_first: What the model itself adds behind its first layer.
        """
        self._build.build(0, common)
        names = [f"l{n}" for n in range(NUM_LAYERS)]
        context = ForwardContext(
            no_compile_layers={},
            attn_metadata=dict.fromkeys(names, common),
            slot_mapping=dict.fromkeys(names, common.slot_mapping),
        )
        hidden = torch.sin(common.slot_mapping[:, None] + torch.arange(WIDTH) / WIDTH)
        residual = None
        with override_forward_context(context):
            for layer in self.layers:
                hidden, residual = layer(positions, hidden, residual)
                if behind_first and layer is self.layers[0]:
                    hidden = hidden + behind_first
        return torch.cat([hidden, residual], dim=1) if residual is not None else hidden


def batches() -> Iterator[tuple[CommonAttentionMetadata, torch.Tensor]]:
    """A few tokens of each sequence at a time, until all are through."""
    done = [0] * len(LENGTHS)
    for chunk in ([1, 2, 1, 1], [2, 20, 0, 5], [0, 18, 0, 11]):
        rows = [n for n, size in enumerate(chunk) if size]
        queries = torch.tensor([chunk[n] for n in rows])
        positions = torch.cat([torch.arange(done[n], done[n] + chunk[n]) for n in rows])
        slots = torch.cat([torch.arange(chunk[n]) + done[n] + n * ROOM for n in rows])
        starts = torch.tensor([0, *queries.cumsum(0).tolist()], dtype=torch.int32)
        done = [before + size for before, size in zip(done, chunk, strict=True)]
        lengths = torch.tensor([done[n] for n in rows])
        yield (
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts.clone(),
                seq_lens=lengths,
                num_reqs=len(rows),
                num_actual_tokens=len(slots),
                max_query_len=int(queries.max()),
                max_seq_len=int(lengths.max()),
                block_table_tensor=torch.tensor(rows)[:, None],
                slot_mapping=slots,
                seq_lens_cpu_upper_bound=lengths.clone(),
            ),
            positions,
        )


@pytest.fixture
def guests() -> Iterator[Callable[[int], Guest]]:
    made: list[Guest] = []

    def make(num_layers: int) -> Guest:
        made.append(Guest(num_layers, f"g{len(made)}"))
        return made[-1]

    yield make
    for guest in made:
        guest.close()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts as are allowed, whatever this machine is fast at."""

    monkeypatch.setattr(overlap, "plan_microbatches", as_many_as_can_be)
    monkeypatch.setattr(overlap, "SMALL_TOKENS", 0)


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    host = Host([], 1)
    return [host.step(*batch) for batch in batches()]


def equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "ranges", [[(3, 6)], [(0, 3)], [(2, 4)], [(0, 2), (4, 6)], [(1, 2), (2, 4)], [(0, 3), (3, 6)]]
)
@pytest.mark.parametrize("max_microbatches", [1, 2, 5, 64])
def test_parts_give_what_the_whole_gives(
    guests: Callable[[int], Guest],
    expected: list[torch.Tensor],
    ranges: list[tuple[int, int]],
    max_microbatches: int,
) -> None:
    away = [(begin, end, guests(end - begin)) for begin, end in ranges]
    host = Host(away, max_microbatches)
    assert equal([host.step(*batch) for batch in batches()], expected)
    status = host.overlap.status()
    assert host.lost == []
    assert status.blocker == ""
    # The first step shows that this model only passes on; one part asks nothing of anybody.
    assert status.steps_cut == (2 if max_microbatches > 1 else 0)
    for _, _, guest in away:
        assert max(guest.follow) == min(max_microbatches - 1, 28)


def test_of_steps_too_small_to_cut_only_a_few_are_learnt_from(
    guests: Callable[[int], Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "SMALL_TOKENS", 6)
    host, home = Host([(3, 6, guests(3))], 64), Host([], 1)
    first, *larger = batches()
    steps = [first] * 33
    assert equal([host.step(*step) for step in steps], [home.step(*step) for step in steps])
    status = host.overlap.status()
    # Every eighth, each in five parts here: one for each of its tokens.
    assert (status.steps_waited, status.steps_cut, status.parts) == (29, 4, 20)
    assert equal([host.step(*step) for step in larger], [home.step(*step) for step in larger])
    assert host.overlap.status().steps_cut == 4 + len(larger)


def test_one_guest_with_two_ranges(
    guests: Callable[[int], Guest], expected: list[torch.Tensor]
) -> None:
    both = SharedGuest()
    try:
        host = Host([(0, 2, both), (3, 5, both)], 4)
        for span, name in zip(host.ranges, ("a", "b"), strict=True):
            span._residence.unit_id = name
        assert equal([host.step(*batch) for batch in batches()], expected)
    finally:
        both.close()


class SharedGuest(Guest):
    """Two ranges of two layers, by unit."""

    def __init__(self) -> None:
        self._units = {
            name: LayerChain([Layer(lambda: self._common) for _ in range(2)]) for name in "ab"
        }
        super().__init__(0, "both")

    def _run(self, request: RunLayers, message: Message) -> Message:
        self._layers = self._units[request.unit_id]
        return super()._run(request, message)


@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_guest_dies_and_the_other_stays_in_step(
    guests: Callable[[int], Guest], expected: list[torch.Tensor], at: int
) -> None:
    one, other = guests(2), guests(2)
    host = Host([(0, 2, one), (4, 6, other)], 5)
    one.dies_at = at
    found = [host.step(*batch) for batch in batches()]
    assert len(host.lost) >= 1
    assert equal(found[:1], expected[:1])
    assert torch.equal(found[-1], torch.zeros_like(found[-1])), "dropped, but finite"
    assert other.link.lost is None
    # Nothing that was dropped is still on the way: the next answer is its own.
    common, positions = next(batches())
    with host.step_context.part(common):
        host.ranges[1].submit(
            {"positions": positions, "hidden_states": torch.zeros(5, WIDTH), "residual": None}, 0
        )
    answer = host.ranges[1].collect(torch.zeros(5, WIDTH))
    assert all(value is not None and value.shape == (5, WIDTH) for value in answer)


def test_switched_on_and_off(guests: Callable[[int], Guest], expected: list[torch.Tensor]) -> None:
    guest = guests(3)
    host = Host([(3, 6, guest)], 4)
    found = []
    for batch, max_microbatches in zip(batches(), (4, 1, 3), strict=True):
        host.overlap.allow(max_microbatches)
        host.overlap.step_aside()
        host.overlap.step_in("")
        found.append(host.step(*batch))
    assert equal(found, expected)
    assert guest.follow == [0, 0, 2, 1, 0]
    host.overlap.step_aside()
    assert not any("Before" in type(module).__name__ for module in host.layers)


def test_a_model_with_something_between_its_layers_waits(guests: Callable[[int], Guest]) -> None:
    guest = guests(2)
    host, plain = Host([(2, 4, guest)], 4), Host([], 1)
    found = [host.step(*batch, behind_first=1) for batch in batches()]
    assert equal(found, [plain.step(*batch, behind_first=1) for batch in batches()])
    assert "hidden_states" in host.overlap.status().blocker
    assert host.overlap.status().steps_cut == 0
    assert set(guest.follow) == {0}
