"""KV cache events of a real vLLM engine: what its cache holds is known to a balancer."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack

import httpx
import msgspec
import pytest

import small_model
from banaserve_bench.loadgen.servers import Server, vllm_server
from banaserve_route.balancer.config import HealthSettings, PolicySettings, ReplicaSettings
from banaserve_route.policies.caches.known_caches import CacheState
from ports import free_port
from waiting import until

pytestmark = pytest.mark.e2e

BLOCK = 32
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager"),
    *("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(256 << 20)),
    "--enable-prompt-tokens-details",
)
WORDS = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 12
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
JSON = "Content-Type: application/json\r\n"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
ASKED = {
    "tokens": ("/v1/completions", {"prompt": list(range(500, 900))}),
    "text": ("/v1/completions", {"prompt": f"Once upon a time. {WORDS}"}),
    "salt": ("/v1/completions", {"prompt": f"With a salt. {WORDS}", "cache_salt": "s"}),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": f"You know this: {WORDS}"},
                {"role": "user", "content": [{"type": "text", "text": "And what is that?"}]},
                {"role": "assistant", "content": "A fox.", "tool_calls": [CALL]},
                {"role": "user", "content": "What else?"},
            ],
            "tools": [TOOL],
            "tool_choice": "none",
        },
    ),
}


async def test_a_prefix_is_known_without_having_been_routed_until_the_replica_restarts(
    house, tmp_path
) -> None:
    model, ports = small_model.resolve(), [free_port() for _ in range(3)]
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[1]}",
        "replay_endpoint": f"tcp://*:{ports[2]}",
    }
    options = (*OPTIONS, "--kv-events-config", json.dumps(events))

    async def start(stack: ExitStack) -> Server:
        serving = vllm_server(model.path_or_id, "m", *options, port=ports[0])
        return await asyncio.to_thread(stack.enter_context, serving)

    with ExitStack() as stack:
        server = await start(stack)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for path, body in ASKED.values():
                asked = {"model": "m", "max_tokens": 2, "temperature": 0} | body
                (await client.post(path, json=asked)).raise_for_status()
        log = tmp_path / "decisions"
        balancer = await house.balance(
            await house.replica(),
            ReplicaSettings(
                id="real",
                url=server.url,
                kv_events=f"tcp://*:{ports[1]}",
                kv_replay=f"tcp://*:{ports[2]}",
            ),
            policy=PolicySettings(),
            health=HealthSettings(interval_s=0.2),
            tokenizer=model.path_or_id,
            decision_log=str(log),
        )
        caches = balancer.fleet.caches
        # The balancer comes late: it has the batches replayed.
        await until(lambda: caches.states() == {CacheState.EXACT: 1} and caches.block_sizes)
        for path, body in ASKED.values():
            asked = {"model": "m", "max_tokens": 2, "temperature": 0} | body
            reply = await house.ask(path, msgspec.json.encode(asked), JSON)
            assert reply.status == 200, reply.body
            usage = reply.json["usage"]
            # What the balancer expects is what the engine finds in its cache, to the token.
            expected = (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected > 150
            (attempt,) = json.loads(log.read_text().splitlines()[-1])["attempts"]
            assert (attempt["target"], attempt["hit_tokens"]) == ("real", expected)
        stack.close()
        await until(lambda: not balancer.targets["real"].is_healthy)
        await start(stack)
        await until(lambda: balancer.targets["real"].is_healthy)
        await until(lambda: caches.states() == {CacheState.EXACT: 1})
        assert not caches.block_sizes
