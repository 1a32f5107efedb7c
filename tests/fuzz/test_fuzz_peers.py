"""What balancers tell each other: taken in, or the documented error; memory stays bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given

from banaserve.base.errors import ProtocolError
from banaserve_route.balancer.config import HealthSettings, PeerSettings
from banaserve_route.balancer.targets.adoption import adoptable
from banaserve_route.balancer.targets.peers import PeerProber
from banaserve_route.policies.interface import ReplicaId
from banaserve_route.policies.prefixes.peers import MAX_TREE_BYTES, PeerPrefixes
from corpus import attempt, ends, fuzzed, kept, spoiled

PEER = PeerSettings(region="us", url="http://10.1.0.1:8080", adopt=("10.1.0.0/16",))
prefixes = PeerPrefixes("secret")


@fuzzed
@given(spoiled("snapshots"))
def test_a_snapshot_is_taken_in_or_a_protocol_error(data: bytes) -> None:
    peer = ReplicaId("region:us")
    num_prefixes, error = attempt(lambda: prefixes.take(peer, data), ProtocolError)
    assert str(error).isprintable()
    assert num_prefixes is None or num_prefixes >= 0
    assert prefixes._theirs.target_bytes(ReplicaId("region:us")) <= MAX_TREE_BYTES


@fuzzed
@given(spoiled("states"))
def test_a_state_is_taken_in_or_one_line_in_the_log(body: bytes) -> None:
    log: list[str] = []
    view = SimpleNamespace(id="region:us")
    target: Any = SimpleNamespace(name="peer", view=view)
    prober = PeerProber(
        PEER,
        target,
        SimpleNamespace(),
        HealthSettings(),
        print,
        print,
        log.append,  # type: ignore[arg-type]
    )
    with ends():
        state = prober._read(200, body)
    if state is None:
        assert len(log) == 1
        assert log[0].isprintable()
        return
    assert log == []
    assert len(state.replicas) <= 256
    found, refused = adoptable(PEER, state.replicas)
    assert len(found) + len(refused) <= 256
    for one in found:
        assert one.replica.url.isprintable()
        assert one.replica.id.isprintable()
        assert one.takes_keys or one.replica.url.startswith(("http://10.1.0.1", "https://10.1.0.1"))


def test_what_is_kept_is_told_and_taken() -> None:
    assert any(_takes(data) for data in kept("snapshots"))


def _takes(data: bytes) -> bool:
    try:
        return PeerPrefixes("secret").take(ReplicaId("region:us"), data) > 0
    except ProtocolError:
        return False
