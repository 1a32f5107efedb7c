"""Options of the migration policies: wrong ones are named before anything is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.model.moving import Link
from banaserve.orchestrator.control.move_policies import options
from banaserve.orchestrator.control.move_policies.options import RepairedOptions
from banaserve.orchestrator.control.move_policies.registry import make


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("repared", {}, "did you mean repaired"),
        ("repaired", {"delta_upp": 0.3}, "did you mean delta_up"),
        ("published", {"rho": 1.0}, "did you mean rho_per_s"),
        ("still", {"delta": 1.0}, "unknown option"),
        ("repaired", {"rho": -1.0}, "rho is -1.0: give 0 or more"),
        ("repaired", {"overlap_fraction": 1.5}, r"overlap_fraction is 1.5: give a number in"),
        ("repaired", {"horizon_s": float("nan")}, "horizon_s takes a number: got nan"),
        ("repaired", {"max_moves": "many"}, "max_moves takes a whole number: got 'many'"),
        ("repaired", {"delta_down": 0.5}, "delta_down is above delta_up"),
        ("repaired", {"scalar": "som"}, "did you mean sum"),
        ("published", {"layers_a_move": 0}, "layers_a_move is 0"),
        ("repaired", {"hop_bytes_per_s": -1.0}, "hop_bytes_per_s is -1.0: give 0 or more"),
    ],
)
def test_wrong_options_are_named(name: str, section: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as failure:
        make(name, **section)
    assert words in str(failure.value)


def test_messages_between_steps_have_a_bandwidth_of_their_own() -> None:
    slow = RepairedOptions(link_bytes_per_s=1e6, link_sync_s=1.0, link_hop_s=1e-3)
    assert slow.hop == Link(1e6, 0.0, 1e-3)
    assert replace(slow, hop_bytes_per_s=1e9).hop == Link(1e9, 0.0, 1e-3)
    assert replace(slow, hop_bytes_per_s=1e9).link == slow.link


def test_links_that_were_learnt_do_not_pile_up() -> None:
    for number in range(1000):
        assert RepairedOptions(link_hop_s=1e-6 * (number + 1)).link.hop_s > 0
    assert options._link.cache_info().currsize < 100
