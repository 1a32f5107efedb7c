"""A store with room for a quarter of the prompts under way: nothing is computed twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import small_model
from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from fork_server import ForkServer
from node_run import NodeRun
from observing import until
from reference import reference_tokens
from server_run import Run
from streams import asked_all, greedy

pytestmark = pytest.mark.e2e

NUM_PROMPTS, OUTPUT_TOKENS = 16, 24
# Of blocks of 128 tokens each prompt has three, all of them 48: in this store there are twelve.
# How often it is read must not depend on whether computing is faster on this machine now.
STORE = ("--kv-store-size", "70MiB", "--kv-store-fetch", "always")
# A decode instance that runs two requests at a time: the others wait for it.
FEW = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", str(60 << 20))


@pytest.mark.parametrize("num_sequences", [pytest.param(1, marks=pytest.mark.spine), 3])
def test_prefill_waits_until_decode_has_read_what_the_store_holds(
    serve: Callable[..., Run], fork_server: ForkServer, num_sequences: int
) -> None:
    words = ("--pd", "1:1", "--dtype", "float32", "--max-model-len", "1024")
    server = serve(*words, *STORE, *FEW, "--skip-prefill-below-tokens", "0")
    kinds = greedy(NUM_PROMPTS, 3000, OUTPUT_TOKENS)
    for kind in kinds.values():
        if num_sequences > 1:  # vLLM refuses several that are greedy by name
            kind.body.update(n=num_sequences, temperature=1.0, top_k=1, seed=1)
    answers = asyncio.run(asked_all(server, kinds))
    assert [answer.error for answer in answers.values()] == [""] * NUM_PROMPTS

    num_legs = NUM_PROMPTS * num_sequences
    assert server.metric("banaserve_prompt_tokens_computed_total", instance_id="d0") <= num_legs
    assert server.metric("banaserve_waited_for_room_total", instance_id="p0") > 0
    assert server.metric("banaserve_room_wait_seconds_total", instance_id="p0") > 0
    assert server.metric("banaserve_prompts_waiting_for_room", instance_id="p0") == 0
    assert server.metric("banaserve_kvstore_num_slots") * 4 <= 3 * NUM_PROMPTS
    until(lambda: server.metric("banaserve_kvstore_leased_slots") == 0, "nothing is held")
    assert server.metric("banaserve_kvstore_num_holds") == 0

    prompts = [kind.body["prompt"] for kind in kinds.values()]
    greedily = {"": {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}}
    wanted = reference_tokens(fork_server, small_model.options()[1], prompts, greedily)[""]
    for number in range(num_sequences):
        assert [answer.tokens[number] for answer in answers.values()] == wanted


@pytest.mark.room
def test_a_decode_leg_on_another_machine_computes_no_prompt_again(
    serve: Callable[..., Run], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """What its store has no room for stays at the prefill leg's until it has been fetched."""
    key = tmp_path / "key"
    key.write_text("a-key-of-two-machines")
    nodes = [
        NodeRun(tmp_path / name, f"127.0.0.1:{free_port()}", key.read_text()) for name in ("a", "b")
    ]
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.callback(node.close)
            node.wait_for("takes a server's engines")
        words = ("--pd", "1:1", "--dtype", "float32", "--max-model-len", "1024")
        words += tuple(f"--node={node.address}" for node in nodes)
        words += ("--cluster-key-file", str(key), "--skip-prefill-below-tokens", "0")
        server = serve(*words, *STORE, *FEW)
        instances = AdminClient(*find_admin(server.run_dir)).status().instances
        assert len({one.node for one in instances}) == 2
        answers = asyncio.run(asked_all(server, greedy(NUM_PROMPTS, 5000, OUTPUT_TOKENS)))
        assert [answer.error for answer in answers.values()] == [""] * NUM_PROMPTS
        computed = server.metric("banaserve_prompt_tokens_computed_total", instance_id="d0")
        assert computed <= NUM_PROMPTS
        waited = [
            server.metric("banaserve_waited_for_room_total", instance_id=name)
            for name in ("p0", "d0")
        ]
        assert sum(waited) > 0
