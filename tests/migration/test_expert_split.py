"""Experts of a layer in several places: the parts add up to the whole, whoever has which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("vllm")

from banaserve.base.errors import GuestLostError, ProtocolError
from banaserve.migration.modules import expert_split
from banaserve.migration.modules.expert_split import NOT_HERE, SplitExperts, sum_of
from banaserve.migration.ranks import Ranks
from banaserve.migration.units.experts import _check_step

HIDDEN, NUM_EXPERTS, TOP_K = 8, 6, 3


class Matrices:
    """Experts that are a matrix each; stands for vLLM's, which need an engine."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.global_num_experts = len(weights)
        self.forward: Any = None
        self.computed = 0

    def parameters(self) -> Any:
        return iter([self.weights])


def compute(
    experts: Matrices, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    experts.computed += ids.numel()
    return torch.einsum("nk,nkoh,nh->no", weights, experts.weights[ids], x)


class Guest:
    """Has some experts of ``whole``, numbered from 0 on in the order of ``ids``."""

    def __init__(self, whole: Matrices, ids: tuple[int, ...], link: str = "") -> None:
        self.link: Any = link or str(ids)
        self.experts = Matrices(whole.weights[list(ids)])
        self.asked: list[tuple[torch.Tensor, ...]] = []
        self.waiting = 0
        self.is_lost = ""

    def submit(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        if self.is_lost == "submit":
            raise GuestLostError("gone")
        assert not any(guest.waiting for guest in Guest.all if guest.link == self.link)
        self.waiting += 1
        self.asked.append((x, weights, ids))

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        self.waiting -= 1
        if self.is_lost == "collect":
            raise GuestLostError("gone")
        x, weights, ids = self.asked[-1]
        _check_step(x, weights, ids, self.experts.global_num_experts)
        return sum_of(self.experts, x, weights, ids, ids != NOT_HERE)  # type: ignore[arg-type]

    all: ClassVar[list[Guest]] = []


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Matrices:
    def place(experts: Matrices, forward: Any) -> None:
        experts.forward = forward

    monkeypatch.setattr(expert_split, "compute_experts", compute)
    monkeypatch.setattr(expert_split, "place_experts", place)
    step = SimpleNamespace(attn_metadata={})
    monkeypatch.setattr(expert_split, "get_forward_context", lambda: step)
    Guest.all = []
    torch.manual_seed(5)
    return Matrices(torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN))


def guest(whole: Matrices, *ids: int, link: str = "") -> Guest:
    made = Guest(whole, ids, link)
    Guest.all.append(made)
    return made


def batch(num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    weights, ids = chosen.topk(TOP_K)
    return torch.randn(num_tokens, HIDDEN, generator=generator), weights, ids.int()


def never(*_: Any) -> None:
    raise AssertionError("no guest is lost")


@pytest.mark.parametrize(
    "places",
    [
        [(0,)],
        [(4, 1)],
        [(0, 1, 2, 3, 4, 5)],
        [(0, 3), (1, 2), (4,)],
        [(5, 0), (4, 3, 2, 1)],
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_parts_add_up(whole: Matrices, places: list[tuple[int, ...]], num_tokens: int) -> None:
    x, weights, ids = batch(num_tokens)
    expected = compute(whole, x, weights, ids)
    split = SplitExperts(whole, never, Ranks())  # type: ignore[arg-type]
    for number, some in enumerate(places):
        split.arrange(f"m{number}", some, guest(whole, *some))
    whole.computed = 0
    assert torch.allclose(whole.forward(x, weights, ids), expected, atol=1e-5)
    away = {expert for some in places for expert in some}
    at_home = sum(int(one) not in away for one in ids.flatten())
    assert whole.computed == at_home, "nothing is computed twice"
    assert sum(one.experts.computed for one in Guest.all) == ids.numel() - at_home


def test_a_guest_is_not_asked_where_nobody_has_chosen_its_experts(whole: Matrices) -> None:
    x, weights, _ = batch(4)
    ids = torch.tensor([[0, 1, 2]] * 4, dtype=torch.int32)
    split = SplitExperts(whole, never, Ranks())  # type: ignore[arg-type]
    split.arrange("m0", (3, 4), guest(whole, 3, 4))
    assert torch.equal(whole.forward(x, weights, ids), compute(whole, x, weights, ids))
    assert Guest.all[0].asked == []


def test_only_those_tokens_travel_that_have_chosen_one(whole: Matrices) -> None:
    x, weights, _ = batch(3)
    ids = torch.tensor([[0, 1, 2], [5, 0, 4], [1, 4, 0]])
    split = SplitExperts(whole, never, Ranks())  # type: ignore[arg-type]
    split.arrange("m0", (5, 4), guest(whole, 5, 4))
    assert torch.allclose(whole.forward(x, weights, ids), compute(whole, x, weights, ids))
    ((sent_x, sent_weights, sent_ids),) = Guest.all[0].asked
    assert torch.equal(sent_x, x[1:])
    assert torch.equal(sent_weights, weights[1:])
    assert sent_ids.tolist() == [[0, NOT_HERE, 1], [NOT_HERE, 1, NOT_HERE]]
    assert sent_ids.dtype == ids.dtype


def test_two_units_of_one_guest_wait_for_each_other(whole: Matrices) -> None:
    x, weights, ids = batch(20)
    split = SplitExperts(whole, never, Ranks())  # type: ignore[arg-type]
    split.arrange("m0", (0, 1), guest(whole, 0, 1, link="g"))
    split.arrange("m1", (2, 3), guest(whole, 2, 3, link="g"))
    expected = compute(whole, x, weights, ids)
    assert torch.allclose(whole.forward(x, weights, ids), expected, atol=1e-5)


@pytest.mark.parametrize("when", ["submit", "collect"])
def test_a_lost_guest_adds_nothing_and_is_told_of(whole: Matrices, when: str) -> None:
    x, weights, ids = batch(20)
    lost: list[Any] = []
    split = SplitExperts(whole, lambda link, error: lost.append(link), Ranks())  # type: ignore[arg-type]
    split.arrange("m0", (0, 1), guest(whole, 0, 1, link="g"))
    split.arrange("m1", (2,), guest(whole, 2, link="h"))
    split.arrange("m2", (3,), guest(whole, 3, link="g"))
    for one in Guest.all:
        one.is_lost = when if one.link == "g" else ""
    output = whole.forward(x, weights, ids)
    assert output.shape == x.shape
    assert set(lost) == {"g"}
    left = torch.where(torch.isin(ids, torch.tensor([0, 1, 3])), 0.0, weights)
    assert torch.allclose(output, compute(whole, x, left, ids), atol=1e-5)


def test_vllms_own_runs_again_once_all_are_home(whole: Matrices) -> None:
    split = SplitExperts(whole, never, Ranks())  # type: ignore[arg-type]
    split.arrange("m0", (0,), guest(whole, 0))
    split.arrange("m1", (1,), guest(whole, 1))
    split.arrange("m0", (0,), None)
    assert whole.forward is not None
    split.arrange("m1", (1,), None)
    assert whole.forward is None


def test_choices_are_counted_from_the_first_question_to_the_last(whole: Matrices) -> None:
    split = SplitExperts(whole, never, Ranks())  # type: ignore[arg-type]
    assert split.count(True) == [0] * NUM_EXPERTS
    x, weights, ids = batch(9)
    assert torch.equal(whole.forward(x, weights, ids), compute(whole, x, weights, ids))
    expected = [int((ids == expert).sum()) for expert in range(NUM_EXPERTS)]
    assert split.count(True) == expected
    assert split.count(False) == expected
    assert whole.forward is None
    assert split.count(False) == [0] * NUM_EXPERTS


X, WEIGHTS, IDS = torch.zeros(2, HIDDEN), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "weights", "ids"),
    [
        pytest.param(X[0], WEIGHTS, IDS, id="one token without its dimension"),
        pytest.param(X, WEIGHTS[:1], IDS, id="weights of fewer tokens"),
        pytest.param(X, WEIGHTS[:, :2], IDS, id="weights of fewer experts"),
        pytest.param(X[:1], WEIGHTS, IDS, id="fewer tokens"),
        pytest.param(X, WEIGHTS, IDS + 4, id="an expert that is not here"),
        pytest.param(X, WEIGHTS, IDS - 2, id="an expert below all"),
        pytest.param(X, WEIGHTS, IDS.float(), id="experts that are no whole numbers"),
        pytest.param(X, WEIGHTS.int(), IDS, id="weights that are"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    _check_step(X, WEIGHTS, IDS, 4)
    _check_step(X, WEIGHTS, IDS + NOT_HERE, 4)
    with pytest.raises(ProtocolError):
        _check_step(x, weights, ids, 4)
