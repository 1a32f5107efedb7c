"""Ranks agree: what has failed on one has failed on all, and none waits for another in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.migration.ranks import OTHER_FAILED, Ranks
from banaserve.migration.rpc.tensors import TensorBundle

NUM_RANKS = 3
Work = Callable[[Ranks], Any]


@pytest.fixture(scope="module")
def all_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Work], list[Future[Any]]]]:
    """``run(work)``: what has become of it on each rank; ranks are threads with a group each."""
    store = tmp_path_factory.mktemp("ranks") / "rendezvous"

    def group(rank: int) -> Any:
        file = dist.FileStore(str(store), NUM_RANKS)
        return dist.ProcessGroupGloo(file, rank, NUM_RANKS, timedelta(seconds=60))

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        made = [Ranks(one) for one in pool.map(group, range(NUM_RANKS))]

        def run(work: Work) -> list[Future[Any]]:
            ends = [pool.submit(work, ranks) for ranks in made]
            for end in ends:
                end.exception(60)
            return ends

        yield run


def test_one_rank_asks_nobody(tmp_path: Path) -> None:
    alone = Ranks()
    assert (alone.is_alone, alone.rank) == (True, 0)
    assert alone.any_of([True, False]) == [True, False]
    assert alone.run(lambda: 7) == 7
    with pytest.raises(ValueError, match="mine"):
        alone.run(lambda: int("mine"))


def test_what_holds_on_one_holds_on_all(all_ranks: Callable[[Work], list[Future[Any]]]) -> None:
    ends = all_ranks(lambda ranks: (ranks.rank, ranks.any_of([ranks.rank == 1, False, True])))
    assert [end.result() for end in ends] == [(n, [True, False, True]) for n in range(NUM_RANKS)]
    assert [end.result() for end in all_ranks(lambda ranks: ranks.any_of([]))] == [[]] * NUM_RANKS


@pytest.mark.parametrize("error", [MigrationError("no room"), GuestLostError("gone"), KeyError(3)])
def test_a_failure_of_one_is_told_to_all(
    error: Exception, all_ranks: Callable[[Work], list[Future[Any]]]
) -> None:
    def work(ranks: Ranks) -> str:
        if ranks.rank == 2:
            raise error
        return "done"

    for _ in range(3):
        ends = all_ranks(lambda ranks: ranks.run(lambda: work(ranks)))
        assert ends[2].exception() is error
        for end in ends[:2]:
            with pytest.raises(MigrationError, match=OTHER_FAILED):
                end.result()
        # All are in step after it.
        assert [end.result() for end in all_ranks(lambda r: r.run(lambda: r.rank))] == [0, 1, 2]


def test_a_step_that_one_guest_did_not_answer_gives_up_all(
    all_ranks: Callable[[Work], list[Future[Any]]],
) -> None:
    given_up: dict[int, str] = {}

    def step(ranks: Ranks) -> int:
        def answer() -> int:
            if ranks.rank == 0:
                raise GuestLostError("it stands still")
            return ranks.rank

        def give_up(reason: str) -> GuestLostError:
            given_up[ranks.rank] = reason
            return GuestLostError(reason)

        return ranks.step(answer, give_up)

    ends = all_ranks(step)
    assert [type(end.exception()) for end in ends] == [GuestLostError] * NUM_RANKS
    assert str(ends[0].exception()) == "it stands still"
    assert given_up == {1: OTHER_FAILED, 2: OTHER_FAILED}


def test_a_guest_that_is_lost_on_one_rank_is_on_all(
    all_ranks: Callable[[Work], list[Future[Any]]],
) -> None:
    def lost(ranks: Ranks, on: int) -> str:
        mine = GuestLostError("it stands still") if ranks.rank == on else None
        return str(ranks.lost(mine, GuestLostError))

    told = [end.result() for end in all_ranks(lambda ranks: lost(ranks, 1))]
    assert told == [OTHER_FAILED, "it stands still", OTHER_FAILED]
    assert [end.result() for end in all_ranks(lambda r: lost(r, NUM_RANKS))] == ["None"] * NUM_RANKS


def test_an_answer_of_another_shape_is_a_failure_of_all(
    all_ranks: Callable[[Work], list[Future[Any]]],
) -> None:
    pytest.importorskip("vllm")
    from torch import nn

    from banaserve.migration.modules.layer_proxy import RemoteLayers

    hidden, given_up = torch.zeros(3, 8), list[str]()

    def step(ranks: Ranks) -> Any:
        def check_shape(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
            if tensor.shape != wanted.shape:
                raise GuestLostError("another shape")

        def give_up(reason: str) -> GuestLostError:
            given_up.append(reason)
            return GuestLostError(reason)

        num_rows = 2 if ranks.rank == 1 else 3
        link = SimpleNamespace(
            submit=lambda *_: None,
            collect=lambda _: [torch.zeros(num_rows, 8)],
            check_shape=check_shape,
            give_up=give_up,
            bundle=TensorBundle,
        )
        residence: Any = SimpleNamespace(link=link, unit_id="u", working_epoch=1)
        context: Any = SimpleNamespace(num_tokens=3, fields=dict)
        layer = nn.Identity()
        layer.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]
        away = RemoteLayers(nn.ModuleList([layer]), [0], ["l"], context, ranks, lambda *_: None)
        away.arrange(residence)
        return away.run({"hidden_states": hidden})

    assert [type(end.exception()) for end in all_ranks(step)] == [GuestLostError] * NUM_RANKS
    assert given_up == [OTHER_FAILED] * 2
