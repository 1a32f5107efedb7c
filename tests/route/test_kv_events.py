"""KV cache events on real sockets: order, replay, restarts, and what cannot be read."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import (
    BalancerSettings,
    HealthSettings,
    PolicySettings,
    ReplicaSettings,
)
from banaserve_route.balancer.targets.kv_events.reader import MAX_BATCH_BYTES, KvEventReader
from banaserve_route.command import parse
from banaserve_route.policies.caches.known_caches import CacheState, KnownCaches
from banaserve_route.policies.interface import ReplicaId
from kv_publisher import BLOCK, CLEARED, Publisher, batch, keys_of, removed, stored
from ports import held_port

TOKENS = list(range(1000, 1400))
DEFAULT = PolicySettings()
EXACT = {CacheState.EXACT: 1}


class Read:
    """A reader with all that it has reported."""

    def __init__(self) -> None:
        self.caches, self.faults, self.num_emptied = KnownCaches(), [], 0
        (self.view,) = self.caches.add(ReplicaId("a"), 1)
        self.reader = KvEventReader(self.view, self.caches, self.faults.append, self._empty)

    def _empty(self) -> None:
        self.num_emptied += 1

    def take(self, seq: int, payload: bytes) -> None:
        self.reader.take(seq, self.reader.decode(payload))

    def held(self, tokens: list[int] = TOKENS, **how: Any) -> int:
        return self.view.num_held(keys_of(tokens, **how), {})


def test_events_make_the_view():
    read = Read()
    read.take(0, batch(stored(TOKENS[:8], extra_keys=[None, None], session_id="new field")))
    read.take(1, batch(stored(TOKENS[8:12], parent=b"h1", name="i"), {"type": "AllBlocksCleared"}))
    assert (read.held(), read.num_emptied) == (0, 1)
    read.take(2, batch(stored(TOKENS[:8])))
    read.take(3, batch(stored(TOKENS[8:12], parent=b"h1", name="i"), removed(b"i0")))
    assert (read.held(), read.view.is_whole, read.faults) == (2, True, [])
    # A group of another kind of attention says nothing of whole prefixes.
    read.take(4, batch(removed(b"h0", group_idx=1), stored(TOKENS[:8], name="z", group_idx=1)))
    assert read.held() == 2


def test_hashes_may_be_numbers_and_blocks_have_adapters_and_salts():
    read = Read()
    read.take(0, batch(stored(TOKENS[:4], block_hashes=[7], lora_name="fr")))
    assert read.held(extras=[["fr"]]) == 1
    assert read.caches.adapters == {"fr"}
    read.take(1, batch(stored(TOKENS[:4], name="s", extra_keys=[["salt"]])))
    read.take(2, batch(stored(TOKENS[4:8], parent=7, lora_name="fr", extra_keys=[["fr"]])))
    assert read.held(extras=[["fr"]] * 2) == 2
    assert read.held(extras=[["salt"]]) == 1
    assert read.held() == 0


BAD = {
    "no msgpack": (b"\xc1", "unreadable"),
    "no batch": (msgspec.msgpack.encode({"a": 1}), "unreadable"),
    "too large": (batch(stored(TOKENS)) + bytes(MAX_BATCH_BYTES), "unreadable"),
    "events of an older version": (batch(["BlockStored", [b"h"], None, [1], 1]), "unreadable"),
    "an unknown event": (batch({"type": "BlockMoved"}), "unreadable"),
    "a missing field": (batch({"type": "BlockStored", "block_hashes": []}), "unreadable"),
    "a token beyond 32 bits": (batch(stored([2**40] * BLOCK)), "unreadable"),
    "a very long hash": (batch(stored(TOKENS[:4], block_hashes=[bytes(99)])), "unreadable"),
    "an unknown parent": (batch(stored(TOKENS[:4], parent=b"?")), "unknown_parents"),
    "another block size": (batch(stored(TOKENS[:8], name="x", block_size=8)), "wrong_sizes"),
    "fewer tokens": (batch(stored(TOKENS[:4], token_ids=[1])), "wrong_sizes"),
}


@pytest.mark.parametrize(("payload", "kind"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_counted_and_named_once(payload, kind):
    read = Read()
    read.take(0, batch(stored(TOKENS[:8])))
    read.take(1, payload)
    read.take(2, payload)
    assert read.caches.counts[kind] == 2
    assert len(read.faults) == 1
    # What a batch may have removed is not claimed; an event that only adds is left out.
    adds = kind != "unreadable" or "hash" in read.faults[0]
    assert (read.held(), read.view.is_whole) == ((2, True) if adds else (0, False))
    read.take(3, batch(CLEARED, stored(TOKENS[:12])))
    assert (read.held(), read.view.is_whole) == (3, True)


def test_an_earlier_number_is_a_duplicate_or_a_restart_by_its_time():
    read, old = Read(), batch(stored(TOKENS[:4]))
    read.take(0, old)
    read.take(1, batch(stored(TOKENS[4:8], parent=b"h0", name="i")))
    read.take(0, old)
    assert (read.held(), read.caches.counts["duplicates"]) == (2, 1)
    read.take(0, batch(stored(TOKENS[:4])))
    assert (read.held(), read.view.is_whole) == (1, True)
    assert (read.num_emptied, read.caches.counts["restarts"]) == (1, 1)


@pytest.fixture
def ports():
    with ExitStack() as stack:
        yield held_port(stack), held_port(stack)


@pytest.fixture
def publish(ports):
    with ExitStack() as stack:

        def start(replays=True, kept=None):
            made = Publisher(ports[0], ports[1] if replays else 0)
            for events in kept or []:
                made.lose(*events)
            return stack.enter_context(made)

        yield start


def states(balancer):
    return balancer.fleet.caches.states()


def counts(balancer):
    return balancer.fleet.caches.counts


async def follow(house, publisher, **settings):
    """Start a balancer that follows ``publisher`` as the second of two replicas."""
    replicas = [await house.replica() for _ in range(2)]
    told = [
        ReplicaSettings(url=replicas[0].url),
        ReplicaSettings(url=replicas[1].url, **publisher.settings),
    ]
    balancer = await house.balance(*told, policy=DEFAULT, **settings)
    return balancer, replicas


def held(balancer, tokens=TOKENS):
    (view,) = next(iter(balancer.fleet.caches._replicas.values())).views
    return view.num_held(keys_of(tokens), {})


async def test_a_prompt_goes_to_the_replica_whose_events_say_that_it_is_there(house, publish):
    publisher = publish()
    balancer, (first, second) = await follow(house, publisher)
    await publisher.subscribed()
    await house.until(lambda: states(balancer) == EXACT)
    await publisher.publish(stored(TOKENS[:396]))
    await house.until(lambda: held(balancer))
    body = msgspec.json.encode({"model": "m", "prompt": TOKENS})
    for _ in range(5):
        assert (await house.ask(body=body)).status == 200
    assert (len(first.asked), len(second.asked)) == (0, 5)
    assert balancer._prompts.counts == {"read": 5}
    await publisher.publish(CLEARED)
    await house.until(lambda: not held(balancer))
    page = (await house.ask("/metrics", method="GET")).body.decode()
    assert 'banaserve_route_kv_views{state="exact"} 1.0' in page
    assert 'banaserve_route_prompts_total{outcome="read"} 5.0' in page
    assert 'banaserve_route_kv_events_total{kind="batches"} 2.0' in page


async def test_other_bodies_go_on_as_before(house, publish):
    publisher = publish(kept=[[stored(TOKENS[:8])]])
    balancer, _ = await follow(house, publisher)
    await house.until(lambda: held(balancer))
    bodies = [b"", b"no json", b'{"prompt": "text"}', b'{"prompt": [[1], [2]]}', b'{"prompt": []}']
    bodies += [
        b'{"messages": [{"role": "user", "content": "hi"}]}',
        b'{"prompt": [99999999999, 1]}',
    ]
    bodies += [b'{"prompt": [' + b"1," * 2**20 + b"1]}"]
    for body in bodies:
        assert (await house.ask(body=body)).status == 200
    assert (await house.ask("/v1/models", method="GET")).status == 200
    assert balancer._prompts.counts == {"other": len(bodies) + 1}


async def test_a_balancer_that_comes_late_has_all_batches_replayed(house, publish):
    publisher = publish(kept=[[stored(TOKENS[:8])], [stored(TOKENS[8:12], b"h1", "i")]])
    balancer, _ = await follow(house, publisher)
    await house.until(lambda: held(balancer) == 3)
    assert (states(balancer), publisher.asked) == (EXACT, [0])


async def test_missed_batches_are_replayed(house, publish):
    publisher = publish()
    balancer, _ = await follow(house, publisher)
    await publisher.subscribed()
    await house.until(lambda: states(balancer) == EXACT)
    await publisher.publish(stored(TOKENS[:4]))
    publisher.lose(stored(TOKENS[4:8], b"h0", "i"))
    await publisher.publish(stored(TOKENS[8:12], b"i0", "j"))
    await house.until(lambda: held(balancer) == 3 and counts(balancer)["replays"] == 2)
    assert counts(balancer)["gaps"] == 1
    assert states(balancer) == EXACT


@pytest.mark.parametrize("how", ["none is offered", "no longer kept", "no answer"])
async def test_what_cannot_be_replayed_leaves_an_estimate_until_all_is_cleared(
    how, house, publish, monkeypatch
):
    monkeypatch.setattr("banaserve_route.balancer.targets.kv_events.subscriber._ANSWER_S", 0.1)
    publisher = publish(replays=how != "none is offered")
    balancer, _ = await follow(house, publisher)
    await publisher.subscribed()
    await publisher.publish(stored(TOKENS[:8]))
    await house.until(lambda: states(balancer) == EXACT and held(balancer))
    publisher.lose(removed(b"h0"))
    publisher.is_silent = how == "no answer"
    if how == "no longer kept":
        publisher.kept.clear()
    await publisher.publish(stored(TOKENS[100:104], name="i"))
    await house.until(lambda: held(balancer, TOKENS[100:]) == 1)
    assert held(balancer) == 0
    assert states(balancer) == {CacheState.ESTIMATED: 1}
    assert counts(balancer)["lost"] == 1
    assert sum("are lost" in line for line in house.log) == 1
    await publisher.publish(CLEARED, stored(TOKENS[:12]))
    await house.until(lambda: held(balancer) == 3)
    assert states(balancer) == EXACT


async def test_a_replica_that_restarts_loses_its_blocks(house, publish, ports):
    with Publisher(*ports) as before:
        for _ in range(3):
            before.lose(stored(TOKENS[:8]))
        balancer, _ = await follow(house, before)
        await before.subscribed()
        await house.until(lambda: held(balancer) == 2)
        before.lose()
    # It publishes more than the one before it did, while the connection is being made again.
    after = publish(kept=[[stored(TOKENS[100:104])]] + [[] for _ in range(6)])
    await after.subscribed()
    await after.publish(stored(TOKENS[104:108], b"h0", "i"))
    await house.until(lambda: held(balancer, TOKENS[100:]) == 2)
    assert held(balancer) == 0
    assert (states(balancer), counts(balancer)["restarts"]) == (EXACT, 1)


@pytest.mark.parametrize("failures", [1, 1000])
async def test_a_replica_found_by_probes_to_have_restarted_loses_its_blocks(
    house, publish, failures
):
    publisher = publish(kept=[[stored(TOKENS[:8])]])
    health = HealthSettings(interval_s=0.05, failures=failures)
    balancer, (_, second) = await follow(house, publisher, health=health)
    await house.until(lambda: held(balancer) == 2)
    publisher.kept.clear()
    second.stop()
    await house.until(lambda: balancer.targets[second.id].was_refused)
    await house.replica(port=second.port)
    await house.until(lambda: held(balancer) == 0)
    await house.until(lambda: states(balancer) == EXACT)


async def test_a_message_that_is_no_batch_changes_nothing(house, publish):
    publisher = publish()
    balancer, _ = await follow(house, publisher)
    await publisher.subscribed()
    await publisher._events.send_multipart([b"hello"])
    await publisher._events.send_multipart([b"", b"short", b""])
    await publisher.publish(stored(TOKENS[:8]))
    await house.until(lambda: held(balancer) == 2 and counts(balancer)["unreadable"] == 2)


async def test_settings_of_events_change_while_serving(house, publish):
    publisher = publish(kept=[[stored(TOKENS[:8])]])
    balancer, (first, second) = await follow(house, publisher)
    await house.until(lambda: held(balancer) == 2)
    plain = tuple(ReplicaSettings(url=one.url) for one in (first, second))
    told = balancer.settings
    balancer.change(msgspec.structs.replace(told, replicas=plain))
    assert not states(balancer)
    balancer.change(told)
    await house.until(lambda: held(balancer) == 2)
    with pytest.raises(UserError, match="tokenizer cannot change while serving"):
        balancer.change(msgspec.structs.replace(told, tokenizer="/elsewhere"))


URL = "http://h:1"
WRONG = [
    ({"kv_events": "h:5557"}, "write tcp://HOST:PORT"),
    ({"kv_events": "tcp://h:0"}, "write tcp://HOST:PORT"),
    ({"kv_events": "tcp://h:65535", "kv_ranks": 2}, "write tcp://HOST:PORT"),
    ({"kv_replay": "tcp://h:5558"}, "has kv_replay alone: give kv_events too"),
    ({"kv_events": "tcp://h:5557", "kv_ranks": 0}, "kv_ranks is 0: give 1 to 256"),
    (
        {"kv_events": "tcp://h:5557", "url": "dns+http://h:1"},
        "is several servers: write tcp://*:5557",
    ),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_mistakes_in_settings_are_named(fields, words):
    with pytest.raises(UserError) as failed:
        ReplicaSettings(**({"url": URL} | fields)).check()
    assert words in str(failed.value)


def test_events_need_a_policy_and_a_tokenizer_its_file(tmp_path):
    events = ReplicaSettings(url=URL, kv_events="tcp://*:5557")
    settings = BalancerSettings(replicas=(events,), policy=PolicySettings(name="round_robin"))
    with pytest.raises(UserError, match="round_robin does not use kv_events"):
        Balancer(settings, print)
    with pytest.raises(UserError, match=r"tokenizer: cannot read .*tokenizer\.json"):
        Balancer(BalancerSettings(replicas=(events,), tokenizer=str(tmp_path)), print)


def test_addresses_of_ranks_and_of_the_replica_s_own_host():
    one = ReplicaSettings(
        url="http://[::1]:8000", kv_events="tcp://*:5557", kv_replay="tcp://[::2]:6000", kv_ranks=2
    )
    one.check()
    assert one.kv_endpoints is not None
    assert one.kv_endpoints.of_rank(0) == ("tcp://[::1]:5557", "tcp://[::2]:6000")
    assert one.kv_endpoints.of_rank(1) == ("tcp://[::1]:5558", "tcp://[::2]:6001")
    words = ["--replica", "http://a:1", "--replica", "http://b:1", "--kv-events", "tcp://*:5557"]
    first, second = parse(words).settings().replicas
    assert first.kv_endpoints is not None
    assert second.kv_endpoints is not None
    assert (first.kv_endpoints.events, second.kv_endpoints.events) == (
        "tcp://a:5557",
        "tcp://b:5557",
    )
    assert not second.kv_endpoints.of_rank(0)[1]
