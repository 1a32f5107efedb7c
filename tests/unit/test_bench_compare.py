"""The systems that are compared: ``serve`` has their options, and they mean what they say."""

from __future__ import annotations

import pytest

from banaserve.bench.compare_systems import REFERENCE, System, chosen_systems, known_systems
from banaserve.cli.serve_options import parse_serve_argv
from banaserve.config import ServeConfig
from banaserve.errors import UserError
from banaserve.orchestrator.routing import registry


def config(system: System) -> ServeConfig:
    parsed = parse_serve_argv(["smollm2-135m", *system.options])
    assert parsed.vllm_argv == ()
    assert parsed.routing_policy in registry.names()
    return parsed


@pytest.mark.parametrize("num_instances", [2, 4])
def test_every_system_has_the_same_engines(num_instances: int) -> None:
    for name, system in known_systems(num_instances).items():
        assert system.name == name
        parsed = config(system)
        assert parsed.prefill + parsed.decode + parsed.colocated == num_instances
        assert parsed.kv_store == (name not in _WITHOUT_STORE)
        assert parsed.migration == (name == "banaserve")
        assert parsed.orchestrator.mode == ("on" if name == "banaserve" else "off")


_WITHOUT_STORE = ("colocated-round-robin", "colocated-least-requests", "banaserve-no-store")


def test_pairs_differ_in_one_thing() -> None:
    systems = known_systems(2)
    ours, still = config(systems["banaserve"]), config(systems["banaserve-no-migration"])
    assert (ours.routing_policy, ours.prefill) == (still.routing_policy, still.prefill)
    stored = set(systems["banaserve-colocated"].options)
    assert set(systems["banaserve-no-store"].options) - stored == {"--no-kv-store"}


def test_the_reference_is_one_plain_engine() -> None:
    parsed = config(REFERENCE)
    assert (parsed.colocated, parsed.kv_store) == (1, False)


def test_chosen() -> None:
    assert [one.name for one in chosen_systems([], 2)] == list(known_systems(2))
    given = chosen_systems(["static-pd", "mine=--colocated 3 --routing-option 'a=b c'"], 2)
    assert [one.name for one in given] == ["static-pd", "mine"]
    assert given[1].options == ("--colocated", "3", "--routing-option", "a=b c")
    with pytest.raises(UserError, match="did you mean static-pd"):
        chosen_systems(["static"], 2)
    with pytest.raises(UserError, match="each system once"):
        chosen_systems(["static-pd", "static-pd=--pd 1:1"], 2)
