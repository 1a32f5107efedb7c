"""What ``bench overlap`` is asked, and how it counts."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.bench import overlap, overlap_neighbour, overlap_paced
from banaserve.bench import overlap_figures as figures
from banaserve.costs import profile as profiles
from banaserve.errors import UserError


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
        overlap._parse(argv)


@pytest.mark.parametrize("layers", ["12", "40", "0"])
def test_paced_layers_are_whole_layers_of_the_miniature(layers: str) -> None:
    given = overlap._parse(["--pace", "opt-13b-a100", "--layers", "5", layers])
    with pytest.raises(UserError, match=f"--layers {layers}: .*multiples of 5"):
        overlap_paced.run(given)


def test_paced_places_are_a_quarter_and_a_half_unless_asked() -> None:
    profile = profiles.load("opt-13b-a100")
    given = overlap._parse(["--pace", profile.name, "--parts", "4"])
    assert [tuple(place) for place in overlap_paced._places(given, profile)] == [
        ("layers_10.waiting", 2, 1),
        ("layers_10.overlap", 2, 4),
        ("layers_20.waiting", 4, 1),
        ("layers_20.overlap", 4, 4),
    ]


def test_loads_are_of_the_size_that_is_asked() -> None:
    given = overlap._parse(["--requests", "3", "--prompt-tokens", "50", "--batches", "1", "8"])
    loads = overlap._loads(given)
    assert [load.name for load in loads] == ["prefill", "ttft", "decode_1", "decode_8"]
    assert [load.num_requests for load in loads] == [3, 1, 1, 8]
    prompts = overlap._prompts(random.Random(0), loads[0])
    assert [len(prompt) for prompt in prompts] == [50, 50, 50]
    assert prompts == overlap._prompts(random.Random(0), loads[0]), "seeded"


def test_gains_are_ratios_within_a_round() -> None:
    loads = [figures.Load("ttft", "ttft_gain", 1, 10, 1), figures.Load("d", "d_gain", 1, 1, 1)]
    home = figures.Times({"ttft": [2.0, 4.0], "d": [1.0, 1.0]}, {}, {}, {})
    times = figures.Times(
        {"ttft": [1.0, 4.0], "d": [2.0, 0.5]}, {}, {"ttft": [1.0, 0.0], "d": [1.0, 1.0]}, {}
    )
    samples = figures.gains("layers_15.overlap", loads, home, times)
    assert samples["layers_15.overlap.ttft_gain"] == ([2.0, 1.0], "ratio")
    assert samples["layers_15.overlap.d_gain"] == ([0.5, 2.0], "ratio")
    assert samples["layers_15.overlap.equal_answers"] == ([1.0, 0.0], "fraction")


def test_what_was_predicted_stands_beside_what_was_gained() -> None:
    loads = [figures.Load("a", "a_gain", 1, 1, 1), figures.Load("b", "b_gain", 1, 1, 1)]
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


class Serving:
    """An engine that answers at once; its steps take as long as it may cut them."""

    def __init__(self) -> None:
        self.parts = 0
        self.log: list[Any] = []

    def tell(self, **order: Any) -> dict[str, Any]:
        if order["do"] == "overlap":
            self.parts = order["parts"]
            return {}
        if order["do"] == "sums":
            return {"measured": float(len(self.log))}
        self.log.append((self.parts, len(order["prompts"][0]), order["tokens"]))
        tokens = [prompt[:1] for prompt in order["prompts"]]
        return {"seconds": float(self.parts), "tokens": tokens}


def test_waiting_and_parts_are_measured_one_right_after_the_other() -> None:
    argv = ["--runs", "2", "--batches", "--requests", "1", "--prompt-tokens", "600"]
    given = overlap._parse([*argv, "--long-prompt-tokens", "700"])
    measuring = overlap._Measuring(given, datetime.now(UTC), "model", lambda what: None)
    engine = Serving()
    waiting, parts = measuring._passes(engine, (1, 32))  # type: ignore[arg-type]
    warm, served = engine.log[:4], engine.log[4:]
    assert [entry[1] for entry in warm] == [512] * 4
    assert served == [(1, 600, 16), (32, 600, 16), (1, 700, 1), (32, 700, 1)] * 2
    assert waiting.seconds == {"prefill": [1.0, 1.0], "ttft": [1.0, 1.0]}
    assert parts.seconds == {"prefill": [32.0, 32.0], "ttft": [32.0, 32.0]}
    assert parts.sums_s["ttft"] == [{"measured": 1.0}] * 2
    (again,) = measuring._passes(engine, (None,), waiting)  # type: ignore[arg-type]
    assert again.equal == {"prefill": [1.0, 1.0], "ttft": [1.0, 1.0]}
    other = waiting._replace(tokens={"prefill": [[[1]], [[2]]], "ttft": waiting.tokens["ttft"]})
    (odd,) = measuring._passes(engine, (None,), other)  # type: ignore[arg-type]
    assert odd.equal["prefill"] == [0.0, 0.0]
