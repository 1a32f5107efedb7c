"""A shadow policy decides each request too, and changes nothing."""

from __future__ import annotations

import random

import pytest

from banaserve.base.errors import UserError
from banaserve.cli import main as cli
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import BalancerSettings, PolicySettings, ShadowSettings
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import ReplicaId, ReplicaView, Request
from banaserve_route.policies.registry import make
from banaserve_route.policies.shadow import ShadowChoice, ShadowedPolicy
from ports import free_port


def requests(count: int) -> list[Request]:
    draw = random.Random(3)
    return [
        Request(f"r{i}", prompt=bytes([draw.randrange(4)]) * 400, num_tokens=100)
        for i in range(count)
    ]


def served_by(policy: object, count: int = 60) -> tuple[list[ReplicaId], Fleet]:
    """Return the targets of requests of which each fourth one fails, and the fleet."""
    fleet = Fleet(policy)  # type: ignore[arg-type]
    for name in ("a", "b", "c"):
        fleet.add(ReplicaView(ReplicaId(name), ""))
    targets = []
    for number, request in enumerate(requests(count)):
        decision = fleet.choose(request, float(number))
        flight = fleet.sent(request, decision, float(number))
        targets.append(flight.target)
        if number % 4:
            fleet.first_token(flight, number + 0.5)
            fleet.finished(flight, number + 0.75, 8)
        else:
            fleet.failed(flight, number + 0.25)
    fleet.check()
    return targets, fleet


@pytest.mark.parametrize("shadow", ["round_robin", "random", "predicted_latency", "gorgo"])
def test_the_serving_policy_decides_as_without_a_shadow(shadow: str) -> None:
    alone, _ = served_by(make("prefix_cache", random.Random(1)))
    both = ShadowedPolicy(make("prefix_cache", random.Random(1)), make(shadow, random.Random(2)))
    targets, _ = served_by(both)
    assert targets == alone
    counts = both.counts
    assert sum(one.num_requests for one in counts.values()) == 60
    assert sum(one.num_first_tokens for one in counts.values()) == 45
    assert sum(one.first_token_s for one in counts.values()) == pytest.approx(45 * 0.5)
    assert counts[ShadowChoice.FAILED].num_requests == both.num_failed_events == 0


def test_equal_policies_agree_always() -> None:
    both = ShadowedPolicy(*(make("prefix_cache", random.Random(1)) for _ in range(2)))
    served_by(both)
    assert both.counts[ShadowChoice.SAME].num_requests == 60


def test_a_shadow_that_fails_is_counted_and_changes_nothing() -> None:
    shadow = make("round_robin", random.Random(1))

    def fail(*_: object) -> None:
        raise SystemExit

    shadow.choose = shadow.on_finished = fail  # type: ignore[method-assign]
    alone, _ = served_by(make("least_requests", random.Random(1)))
    both = ShadowedPolicy(make("least_requests", random.Random(1)), shadow)
    targets, _ = served_by(both)
    assert targets == alone
    assert both.counts[ShadowChoice.FAILED].num_requests == 60
    assert both.num_failed_events == 45


def test_a_balancer_shows_the_shadows_choices() -> None:
    shadow = ShadowSettings(name="round_robin")
    settings = BalancerSettings(policy=PolicySettings(name="least_requests", shadow=shadow))
    balancer = Balancer(settings, print)
    page = balancer.metrics.page()
    assert b'banaserve_route_shadow_decisions_total{choice="same"} 0.0' in page
    assert b"banaserve_route_shadow_failed_events_total 0.0" in page
    balancer.close()
    without = Balancer(BalancerSettings(), print)
    assert b"shadow" not in without.metrics.page()
    without.close()


def test_an_unknown_shadow_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    argv = ["route", "--replica", "http://127.0.0.1:9", "--port", port, "--shadow-policy", "nosuch"]
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    assert "nosuch" in capsys.readouterr().err
    with pytest.raises(UserError, match="nosuch"):
        Balancer(
            BalancerSettings(policy=PolicySettings(shadow=ShadowSettings(name="nosuch"))), print
        )


async def test_each_proxied_request_is_compared(house) -> None:
    one, two = await house.replica(), await house.replica()
    told = PolicySettings(name="least_requests", shadow=ShadowSettings(name="round_robin"))
    balancer = await house.balance(one, two, policy=told)
    for _ in range(6):
        assert (await house.ask()).status == 200
    counts = balancer.fleet.policy.counts
    assert sum(one.num_requests for one in counts.values()) == 6
    assert sum(one.num_first_tokens for one in counts.values()) == 6
