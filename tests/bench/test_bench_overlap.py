"""What ``bench overlap`` is asked, and how it counts."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import UserError
from banaserve.migration.worker_api import GuestLinkStatus, LinkState
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.serving.launch import messages
from benchmarks.drivers import overlapped
from benchmarks.overlap import command, paced
from benchmarks.overlap import figures as figures
from benchmarks.overlap import neighbour as overlap_neighbour
from benchmarks.overlap import rounds as overlap_rounds
from depth import chosen_seed


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--layers", "30"], "between 1 and 29"),
        (["--layers", "5", "0"], "between 1 and 29"),
        (["--runs", "0"], "above 0"),
        (["--requests", "0"], "above 0"),
        (["--parts", "1"], "2 to 64 parts"),
        (["--parts", "65"], "2 to 64 parts"),
        (["--shares", "0.5", "0"], "0.05 to 1"),
        (["--shares", "1.5"], "0.05 to 1"),
        (["--pace", "opt-13b-a100", "--dilate", "0"], "more than 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        command.parse(argv)


@pytest.mark.parametrize("layers", ["12", "40", "0"])
def test_paced_layers_are_whole_layers_of_the_miniature(layers: str) -> None:
    given = command.parse(["--pace", "opt-13b-a100", "--layers", "5", layers])
    with pytest.raises(UserError, match=f"--layers {layers}: .*multiples of 5"):
        paced.run(given)


def test_paced_places_are_a_quarter_and_a_half_unless_asked() -> None:
    profile = profiles.load("opt-13b-a100")
    given = command.parse(["--pace", profile.name, "--parts", "4"])
    assert [tuple(place) for place in paced.places_of(given, profile)] == [
        ("layers_10.waiting", 2, 1),
        ("layers_10.overlap", 2, 4),
        ("layers_20.waiting", 4, 1),
        ("layers_20.overlap", 4, 4),
    ]


def test_loads_are_of_the_size_that_is_asked() -> None:
    given = command.parse(["--requests", "3", "--prompt-tokens", "50", "--batches", "1", "8"])
    loads = command.loads_of(given)
    assert [load.name for load in loads] == ["prefill", "ttft", "decode_1", "decode_8"]
    assert [load.num_requests for load in loads] == [3, 1, 1, 8]
    prompts = overlap_rounds.draw_prompts(random.Random(chosen_seed(0)), loads[0])
    assert [len(prompt) for prompt in prompts] == [50, 50, 50]
    assert prompts == overlap_rounds.draw_prompts(random.Random(chosen_seed(0)), loads[0]), "seeded"


def test_gains_are_ratios_within_a_round() -> None:
    loads = [
        figures.OverlapLoad("ttft", "ttft_gain", 1, 10, 1),
        figures.OverlapLoad("d", "d_gain", 1, 1, 1),
    ]
    home = figures.Times({"ttft": [2.0, 4.0], "d": [1.0, 1.0]}, {}, {}, {})
    times = figures.Times(
        {"ttft": [1.0, 4.0], "d": [2.0, 0.5]}, {}, {"ttft": [1.0, 0.0], "d": [1.0, 1.0]}, {}
    )
    samples = figures.gains("layers_15.overlap", loads, home, times)
    assert samples["layers_15.overlap.ttft_gain"] == ([2.0, 1.0], "ratio")
    assert samples["layers_15.overlap.d_gain"] == ([0.5, 2.0], "ratio")
    assert samples["layers_15.overlap.equal_answers"] == ([1.0, 0.0], "fraction")


def test_what_was_predicted_stands_beside_what_was_gained() -> None:
    loads = [
        figures.OverlapLoad("a", "a_gain", 1, 1, 1),
        figures.OverlapLoad("b", "b_gain", 1, 1, 1),
    ]
    waiting = figures.Times({"a": [4.0], "b": [3.0]}, {}, {}, {})
    sums_s = {
        "a": [{"waiting": 3.0, "predicted": 2.0, "measured": 2.0, "wrong": 0.1}],
        "b": [{"waiting": 6.0, "predicted": 6.0, "measured": 6.0, "wrong": 0.7}],
    }
    times = figures.Times({"a": [2.0], "b": [3.0]}, {}, {}, sums_s)
    samples = figures.beside_waiting("layers_15.overlap", loads, waiting, times)
    assert samples["layers_15.overlap.a_gain_over_waiting"] == ([2.0], "ratio")
    assert samples["layers_15.overlap.a_gain_predicted"] == ([1.5], "ratio")
    assert samples["layers_15.overlap.b_gain_predicted"] == ([1.0], "ratio")
    assert samples["layers_15.overlap.prediction_error"][0] == pytest.approx([0.1])
    heads = figures.headlines(samples | {"layers_5.overlap.a_gain": ([9.0], "ratio")}, 15)
    assert heads["a_gain_predicted"] == ([1.5], "ratio")
    assert "a_gain" not in heads, "of another number of layers"


class Told:
    """An engine whose runs take a fixed time, or do not end before another one has."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.orders: list[dict[str, Any]] = []

    def tell(self, **order: Any) -> dict[str, Any]:
        self.orders.append(order)
        return {"busy_s": 0.0} if order["do"] == "usage" else {"seconds": self.seconds}


def test_a_host_is_fed_until_its_neighbour_has_ended() -> None:
    host, neighbour = Told(0.25), Told(2.0)
    streams = overlap_neighbour.Streams([[1], [2]], [[3], [4]], 7)
    found = overlap_neighbour.beside(host, neighbour, streams)  # type: ignore[arg-type]
    assert found == (1.0, 1.0, 0.0, 0.25)
    assert neighbour.orders == [{"do": "run", "prompts": [[3], [4]], "tokens": 7}] * 2
    kinds = [order["do"] for order in host.orders]
    assert kinds[0] == kinds[-1] == "usage"
    fed = host.orders[1:-1]
    assert [order["prompts"] for order in fed[:2]] in ([[[1]], [[2]]], [[[1]]])
    assert len(fed) >= 1


def test_a_guest_is_ordered_and_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(overlapped, "_pin", lambda pid, core: pinned.append(pid))
    live = object.__new__(overlapped.Live)
    live._folder, live._secret, live._num = tmp_path, "secret", 1
    live._control, parent = socket.socketpair()
    ready = SimpleNamespace(guests={"g2": GuestLinkStatus(LinkState.READY)})
    monkeypatch.setattr(live, "_ask", lambda asked: ready)
    with live._control, parent:
        messages.send(parent, messages.Started("g2", 8))
        assert live._guest() == "g2"
        order = messages.receive(parent)
    assert isinstance(order, messages.StartGuest)
    assert pinned == [8]


class Serving:
    """An engine that answers at once; its steps take as long as it may cut them."""

    def __init__(self, wrong: int = 0) -> None:
        self.parts = 0
        self.layers: Any = None
        self.wrong = wrong
        self.log: list[Any] = []

    def tell(self, **order: Any) -> dict[str, Any]:
        if order["do"] == "run":
            self.log.append((self.layers, self.parts, len(order["prompts"][0]), order["tokens"]))
            tokens = [prompt[0] + self.wrong for prompt in order["prompts"]]
            return {"seconds": float(self.parts or 60), "tokens": tokens}
        if order["do"] == "overlap":
            self.parts = order["parts"]
        if order["do"] == "away":
            self.layers, self.parts = order["layers"], 0
        done = float(len(self.log))
        times = {"measured": done, "wrong": 0.0, "waiting": 2 * done, "predicted": done}
        return times if order["do"] == "sums" else {"overlap": "as told"}


def rounds(live: Serving, stages: Serving | None = None) -> overlap_rounds.OverlapRounds:
    argv = ["--batches", "--requests", "1", "--prompt-tokens", "600", "--long-prompt-tokens", "700"]
    loads = command.loads_of(command.parse(argv))
    prompts = [
        {load.name: overlap_rounds.draw_prompts(random.Random(n), load) for load in loads}
        for n in range(2)
    ]
    return overlap_rounds.OverlapRounds(
        live,  # type: ignore[arg-type]
        stages,  # type: ignore[arg-type]
        30,
        [5, 15],
        30,
        512,
        loads,
        prompts,
        lambda what: None,
    )


def test_what_is_compared_is_measured_in_the_same_round() -> None:
    live, stages = Serving(), Serving()
    measuring = rounds(live, stages)
    assert list(measuring.run()) == [1, 2]
    warm, home = (512, 1), [(600, 16), (700, 1)]

    def away(layers: int) -> list[Any]:
        place = [30 - layers, 30]
        each = [(place, parts, *load) for load in home for parts in (1, 30)]
        return [(place, 30, *warm), *each]

    at_home = [(None, 0, *load) for load in home]
    first = [(None, 0, *warm), *at_home, *away(15), *away(5)]
    second = [*at_home, *away(5), *away(15)]
    assert live.log == first + second
    assert stages.log == [(None, 0, *warm), *at_home, *at_home]
    samples = measuring.samples()
    assert samples["layers_15.overlap.ttft_gain"] == ([2.0, 2.0], "ratio")
    assert samples["layers_5.waiting.prefill_gain"] == ([60.0, 60.0], "ratio")
    assert samples["ttft_gain"] == samples["layers_15.overlap.ttft_gain"]
    assert samples["stages.equal_answers"] == ([1.0, 1.0], "fraction")
    assert measuring.raw()["seconds"]["home"] == {"prefill": [60.0, 60.0], "ttft": [60.0, 60.0]}
    assert measuring.raw()["status"] == {"layers_15": "as told", "layers_5": "as told"}


def test_an_answer_that_differs_is_told() -> None:
    measuring = rounds(Serving(), Serving(wrong=1))
    list(measuring.run())
    assert measuring.samples()["stages.equal_answers"] == ([0.0, 0.0], "fraction")
    assert measuring.samples()["equal_answers"] == ([1.0, 1.0], "fraction")
