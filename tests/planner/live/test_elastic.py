"""Roles and step sizes that change at random under streams: no token changes.

Greedy, float32, SmolLM2, two prefill and two decode instances; who decides on roles is this test,
and requests are served by one instance or two as predicted.
"""

from __future__ import annotations

import random

import pytest

import migration_load as loads
import small_model
from banaserve.base.platform.huge_pages import are_offered
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import RoleRequest
from banaserve.frontdoor.admin_client import AdminClient
from depth import IS_LONG, chosen_seed
from observing import huge_page_bytes, writer
from reference import reference_tokens
from role_changes import changed

pytestmark = pytest.mark.e2e

KV_BYTES = 96 << 20
SERVE_OPTIONS = (
    *("--pd", "2:2", "--dtype", "float32", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
    *("--max-num-batched-tokens", "1024", "--max-num-seqs", "32", "--orchestrator", "off"),
    *("--routing-policy", "slo_aware", "--slo-ttft", "60", "--slo-tpot", "10"),
)
NUM_CHANGES = 100 if IS_LONG else 16
NUM_STREAMS = 16
NUM_CHATS = 4
BLOCK_TOKENS = 128
"""Most that a KV block of this server has."""


@pytest.mark.skipif(not are_offered(), reason="this system has no huge pages to give")
def test_the_cache_of_forked_engines_lies_in_huge_pages(server):
    for name in ("p0", "p1", "d0", "d1"):
        assert huge_page_bytes(writer(server.run_dir, name)) >= 0.9 * KV_BYTES, name


def test_tokens_stay_the_same_while_roles_and_step_sizes_change_at_random(server, fork_server):
    admin = AdminClient(*find_admin(server.run_dir))
    reference = loads.Reference(fork_server, 24, longest=400, seed=11)
    draws = random.Random(chosen_seed(17))
    seen: set[str] = set()
    num_refused = 0
    with loads.streaming(server, reference, NUM_STREAMS) as load:
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
    assert len({record.id for record in load.records}) == len(reference.prompts)
    for way in ("one_leg", "two_legs"):
        assert server.metric("banaserve_requests_total", way=way) > 0
        for time in ("ttft", "tpot"):
            compared = "banaserve_routing_prediction_ratio_count"
            assert server.metric(compared, time=time, legs=way) > 0
    assert server.metric("banaserve_leg_retries_total") == 0
    assert server.metric("banaserve_instance_restarts_total") == 0


def test_the_next_turn_of_a_chat_goes_where_the_last_one_lies(serve, fork_server):
    """The second turn has the first one's answer in it; no store could bring it to another one.

    Turning to one after the other would meet other instances: the second turns come backwards.
    """
    server = serve(
        *("--colocated", "4", "--no-kv-store", "--dtype", "float32", "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", str(KV_BYTES), "--migration", "off", "--orchestrator", "off"),
        *("--routing-policy", "slo_aware", "--slo-ttft", "60", "--slo-tpot", "10"),
    )
    reference = loads.Reference(fork_server, 8 * NUM_CHATS, longest=600, seed=5)
    chats = range(8 * NUM_CHATS - NUM_CHATS, 8 * NUM_CHATS)  # the long ones
    first = loads.answers(server, reference, chats, "chat")
    assert [record.token_ids for record in first] == [reference.tokens[n] for n in chats]
    reference.prompts = [
        [*reference.prompts[n], *reference.tokens[n], *reference.prompts[n][:40]] for n in chats
    ]
    model = small_model.resolve().path_or_id
    wanted = reference_tokens(fork_server, model, reference.prompts, {"it": loads.SAMPLING})["it"]
    lies_there = sum((len(prompt) - 41) // BLOCK_TOKENS for prompt in reference.prompts)
    before = server.metric("vllm:prefix_cache_hits_total")
    second = loads.answers(server, reference, range(NUM_CHATS)[::-1], "chat")
    assert [record.token_ids for record in second] == wanted[::-1]
    hits = server.metric("vllm:prefix_cache_hits_total") - before
    assert lies_there > 2 * NUM_CHATS
    assert hits >= lies_there * BLOCK_TOKENS
    assert server.end() == 0
