"""Several sets of heads of one layer in one guest, over a real channel."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from banaserve.base.errors import GuestLostError
from banaserve.migration.modules.head_split import SplitHeads, VllmHeads, _Away
from banaserve.migration.modules.split_attention import RemoteAttention, RunAttention
from banaserve.migration.rpc import guest_client, messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.tensors import TensorBundle, from_wire, to_wire
from banaserve.migration.units.registry import decode_request
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import over_unix
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError
from banaserve.transport.interface import Message

NUM_TOKENS = 4000
HEAD_SIZE = 64
STALL_S = 20.0


class Echo:
    """Answers each question with twice its queries; what it answers may be spoiled."""

    def __init__(self, channel: StreamChannel) -> None:
        self.asked: list[int] = []
        self.spoil: Any = None
        self._channel = channel
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._answer(self._channel.receive(3600.0))
        except PeerGoneError:
            return

    def _answer(self, message: Message) -> None:
        request = decode_request(message.body)
        assert isinstance(request, RunAttention)
        self.asked.append(len(message.tensors[0].shape))
        outputs: Any = messages.StepOutputs((0,))
        tensor = 2 * from_wire(message.tensors[0])
        if self.spoil is not None:
            outputs, tensor = self.spoil(outputs, tensor)
        body = outputs if isinstance(outputs, bytes) else messages.encode(outputs)
        self._channel.send(Message(body, (to_wire(tensor),)), STALL_S)

    def join(self) -> None:
        self._thread.join()
        self._channel.close()


@pytest.fixture
def link() -> Iterator[tuple[GuestClient, Echo]]:
    ours, theirs = socket.socketpair()
    echo = Echo(over_unix(theirs))
    link = GuestClient("g", over_unix(ours), None, lambda: 1, STALL_S)  # type: ignore[arg-type]
    yield link, echo
    link.close()
    echo.join()


def attention(link: GuestClient, lost: list[str]) -> SplitHeads:
    """Of three KV heads with two query heads each; heads 0 and 2, and head 1, are in one guest."""
    layer: Any = SimpleNamespace(num_heads=6, num_kv_heads=3, impl=None, kv_cache=torch.empty(0))
    step_context: Any = SimpleNamespace(step_id=1, fields=dict, num_tokens=NUM_TOKENS)
    split = SplitHeads(None, layer, "l", step_context, lambda _, e: lost.append(str(e)))
    none_here = VllmHeads(None, layer, None, "l", [], step_context)  # type: ignore[arg-type]
    split._stay = lambda here: none_here  # type: ignore[method-assign]
    for unit_id, heads in (("a", (0, 2)), ("b", (1,))):
        residence: Any = SimpleNamespace(
            unit_id=unit_id, working_epoch=1, link=link, described_step=0
        )
        split.arrange(unit_id, heads, RemoteAttention(residence, step_context))
    return split


def step(split: SplitHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of one step, and the attention's output."""
    query = torch.randn(NUM_TOKENS, 6, HEAD_SIZE, generator=torch.Generator().manual_seed(0))
    new = torch.zeros(NUM_TOKENS, 3, HEAD_SIZE)
    nothing = torch.empty(0, 3)
    split.do_kv_cache_update(None, new, new, nothing, nothing)
    metadata = SimpleNamespace(num_actual_tokens=NUM_TOKENS)
    output = torch.full_like(query, float("nan"))
    return query, split.forward(None, query, new, new, nothing, metadata, output)


def test_questions_larger_than_a_socket_do_not_wait_for_each_other(link: Any) -> None:
    guest, echo = link
    lost: list[str] = []
    query, output = step(attention(guest, lost))
    assert lost == []
    assert torch.equal(output, 2 * query), "each head's output lies where its queries were"
    assert len(echo.asked) == guest.round_trips == 2


def test_a_guest_that_works_and_never_answers_is_not_waited_for_for_ever() -> None:
    ours, theirs = socket.socketpair()
    link = GuestClient("g", over_unix(ours), None, lambda: 1, 0.02)  # type: ignore[arg-type]
    link.watch(os.getpid())
    with pytest.raises(GuestLostError, match="not answered in time"):
        link.ask(messages.SetShare(0.5), messages.StepsDone, 0.1)
    assert link.lost is not None
    theirs.close()


class StandingStill:
    """A channel of a guest whose answer comes at a given look for it; time passes in looks alone.

    Args:
        look_s: Seconds that the first look takes; they are many where this process stood still.
        num_looks: Number of looks that find nothing.
    """

    def __init__(self, look_s: float, num_looks: int) -> None:
        self.now_s = 0.0
        self._look_s, self._num_looks = look_s, num_looks

    def perf_counter(self) -> float:
        return self.now_s

    def send(self, message: Message, timeout_s: float) -> None:
        pass

    def receive(self, timeout_s: float) -> Message:
        self.now_s += max(timeout_s, self._look_s)
        self._look_s = 0.0
        self._num_looks -= 1
        if self._num_looks >= 0:
            raise TransferTimeoutError("nothing came")
        tensor = to_wire(torch.zeros(1, 6, HEAD_SIZE))
        return Message(messages.encode(messages.StepOutputs((0,))), (tensor,))

    def close(self) -> None:
        pass


def collected(
    channel: StandingStill,
    monkeypatch: pytest.MonkeyPatch,
    pid: int | None = None,
    *,
    is_one_of_several: bool = False,
) -> int:
    """Number of outputs of one step of a guest at the other end of ``channel``."""
    monkeypatch.setattr(guest_client, "time", channel)
    link = GuestClient(
        "g",
        channel,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        lambda: 1,
        STALL_S,
        is_one_of_several=is_one_of_several,
    )
    if pid is not None:
        link.watch(pid)
    link.submit(messages.SetShare(0.5), TensorBundle())
    return len(link.collect(1))


def test_time_in_which_the_host_stood_still_does_not_count_against_its_guest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    an_hour_s = 3600.0
    assert collected(StandingStill(an_hour_s, 3), monkeypatch) == 1


def test_a_guest_that_alone_is_silent_as_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GuestLostError, match="nothing came"):
        collected(StandingStill(0.0, 1000), monkeypatch)


def test_a_guest_of_several_processes_may_wait_longer_for_its_siblings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_looks = 12  # a guest that stands still alone has four
    idle = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with idle, pytest.raises(GuestLostError, match="nothing came"):
        collected(StandingStill(0.0, num_looks), monkeypatch, idle.pid)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as idle:
        channel = StandingStill(0.0, num_looks)
        assert collected(channel, monkeypatch, idle.pid, is_one_of_several=True) == 1


def _no_text(_: Any, tensor: torch.Tensor) -> Any:
    """A reason that is not UTF-8."""
    body = messages.encode(messages.RequestRefused("no room"))
    return body.replace(b"no room", b"no \xff\xfeom"), tensor


def _flipped(outputs: Any, tensor: torch.Tensor) -> Any:
    body = messages.encode(outputs)
    return bytes([body[0] ^ 0xFF]) + body[1:], tensor


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_flipped, "no guest's answer"),
        (_no_text, "no guest's answer"),
        (lambda _, t: (messages.StepOutputs((3,)), t), "did not come"),
        (lambda _, t: (messages.StepOutputs((-1,)), t), "did not come"),
        (lambda _, t: (messages.StepOutputs(()), t), "0 tensors, not 1"),
        (lambda _, t: (messages.StepOutputs((None,)), t), "another shape"),
        (lambda o, t: (o, t[:-1]), "another shape"),
        (lambda o, t: (o, t.double()), "another shape"),
        (lambda _, t: (messages.StepsDone(), t), "answered with StepsDone"),
        (lambda _, t: (messages.RequestRefused("no room"), t), "no room"),
    ],
)
def test_an_answer_that_makes_no_sense_costs_the_guest_and_not_the_host(
    link: Any, spoil: Any, why: str
) -> None:
    guest, echo = link
    echo.spoil = spoil
    lost: list[str] = []
    _, output = step(attention(guest, lost))
    assert why in lost[0]
    assert guest.lost is not None
    assert torch.equal(output, torch.zeros_like(output)), "finite: the step's output is dropped"


def test_heads_here_are_computed_while_a_guest_has_the_others() -> None:
    events: list[str] = []
    layer: Any = SimpleNamespace(num_heads=6, num_kv_heads=3, impl=None, kv_cache=torch.empty(0))
    step_context: Any = SimpleNamespace(metadata=lambda builder: None)
    split = SplitHeads(None, layer, "l", step_context, lambda *_: None)  # type: ignore[arg-type]

    def collect(query: torch.Tensor) -> list[torch.Tensor]:
        events.append("collected")
        return [torch.ones_like(query)]

    def forward(*_: Any, output: torch.Tensor) -> None:
        events.append("computed")
        output.zero_()

    here = SimpleNamespace(forward=forward, do_kv_cache_update=lambda *_: None)
    local = VllmHeads(None, layer, None, "l", [], step_context)  # type: ignore[arg-type]
    local._groups = [
        SimpleNamespace(  # type: ignore[list-item]
            kv_heads=slice(1, 2), query_heads=slice(2, 4), impl=here, builder=None
        )
    ]
    split._local = local
    away: Any = SimpleNamespace(
        link=None, submit=lambda *_: events.append("asked"), collect=collect
    )
    split._units = {"u": _Away((0, 2), torch.tensor([0, 2]), torch.tensor([0, 1, 4, 5]), away)}
    _, output = step(split)
    assert events == ["asked", "computed", "collected"]
    assert output[:, [0, 1, 4, 5]].eq(1).all()
    assert output[:, 2:4].eq(0).all()
