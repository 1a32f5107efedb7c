"""Roles and step sizes of mock engines change under streams: no token changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

import migration_load as loads
from answers_before import Before
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import RoleRequest
from banaserve.contracts.instances import RoleChange
from banaserve.frontdoor.admin_client import AdminClient
from depth import chosen_seed
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until
from role_changes import changed

pytestmark = pytest.mark.deep

NUM_CHANGES = 40
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve(
        *("--pd", "2:2", "--max-model-len", "1024", "--orchestrator", "off"),
        *("--max-num-batched-tokens", "1024", "--max-num-seqs", "32"),
        *("--routing-policy", "slo_aware", "--slo-ttft", "1", "--slo-tpot", "0.1"),
        mocks=MockOptions(step_ms=4.0),
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def admin(server: MockRun) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


@pytest.fixture(scope="module")
def before(server: MockRun) -> Before:
    return Before(server)


def switched(admin: AdminClient, instance: str, role: str) -> RoleChange:
    change = admin.roles.begin(RoleRequest(instance, role, 100.0))
    while change.is_open:
        change = admin.roles.show(change.id, wait_s=10.0)
    assert (change.state, change.num_left) == ("done", 0), change
    return change


def tokens_of(server: MockRun, instance: str) -> float:
    return server.metric("vllm:generation_tokens_total", instance_id=instance)


def roles(admin: AdminClient) -> dict[str, str]:
    return {one.id: one.role for one in admin.status().instances}


def test_a_role_switches_under_streams_and_back(server, admin, before):
    with loads.streaming(server, before, 5) as load:
        switched(admin, "p1", "decode")
        assert roles(admin) == {"p0": "prefill", "p1": "decode", "d0": "decode", "d1": "decode"}
        with pytest.raises(UserError, match="only one that serves prefill"):
            admin.roles.begin(RoleRequest("p0", "decode"))
        enough = tokens_of(server, "p1") + 40
        until(lambda: tokens_of(server, "p1") >= enough, "p1 decodes")
        load.wait_tokens(60)
        switched(admin, "p1", "prefill")
        assert roles(admin) == {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
        load.wait_tokens(60)
    assert server.metric("banaserve_instance_ready", instance_id="p1", role="prefill") == 1
    assert server.metric("banaserve_leg_retries_total") == 0
    assert server.metric("banaserve_instance_restarts_total") == 0


def test_tokens_stay_the_same_while_roles_and_step_sizes_change_at_random(server, admin, before):
    draws = random.Random(chosen_seed(17))
    seen: set[str] = set()
    num_refused = 0
    with loads.streaming(server, before, NUM_STREAMS) as load:
        for number in range(NUM_CHANGES):
            instance = draws.choice(["p0", "p1", "d0", "d1"])
            role = draws.choice(["prefill", "decode", "both"])
            tokens = draws.choice([0, 64, 256, 1024])
            ask = RoleRequest(instance, role, 100.0, max_num_batched_tokens=tokens)
            change = changed(admin, ask)
            if change is None:
                num_refused += 1
                continue
            assert change.state == "done", change
            seen.add(change.role)
            if number % 10 == 0:
                load.wait_tokens(20)
    assert seen == {"prefill", "decode", "colocated"}
    assert num_refused < NUM_CHANGES / 2
    assert len({record.id for record in load.records}) == len(before.prompts)
    for way in ("one_leg", "two_legs"):
        assert server.metric("banaserve_requests_total", way=way) > 0
        for time in ("ttft", "tpot"):
            compared = "banaserve_routing_prediction_ratio_count"
            assert server.metric(compared, time=time, legs=way) > 0
    assert server.metric("banaserve_leg_retries_total") == 0
    assert server.metric("banaserve_instance_restarts_total") == 0
