"""Requests of an operator to a running store: statistics, clearing and peers; no fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from banaserve.base.errors import ProtocolError, StoreUnavailableError, UserError
from banaserve.kvstore import wire
from banaserve.kvstore.client.channel import StoreChannel
from banaserve.kvstore.stats import StoreStats


def fetch_stats(socket_path: Path, timeout_s: float = 5.0) -> StoreStats:
    """Return the counters and gauges of the store on ``socket_path``.

    Raises:
        StoreUnavailableError: There is no answer.
    """
    with _operator_channel(socket_path, timeout_s) as channel:
        seq = channel.next_seq()
        return channel.call(seq, wire.GetStats(seq), wire.Stats).stats


class ClearedBlocks(NamedTuple):
    """Numbers of blocks dropped by ``clear_store``; one in memory and in a tier counts in both."""

    from_memory: int
    from_tiers: int


def clear_store(socket_path: Path, timeout_s: float = 5.0) -> ClearedBlocks:
    """Drop every block that is not in use, from memory and tiers.

    Raises:
        StoreUnavailableError: There is no answer.
    """
    with _operator_channel(socket_path, timeout_s) as channel:
        seq = channel.next_seq()
        reply = channel.call(seq, wire.Clear(seq), wire.Cleared)
        return ClearedBlocks(reply.num_dropped, reply.num_dropped_from_tiers)


def set_peers(socket_path: Path, peers: Sequence[str], timeout_s: float = 5.0) -> None:
    """Let a store fetch blocks from the stores at ``peers``, and from no others.

    Args:
        peers: ``HOST:PORT`` of each store.

    Raises:
        StoreUnavailableError: There is no answer.
        UserError: An address is invalid, or the store was started without a key of peers.
    """
    with _operator_channel(socket_path, timeout_s) as channel:
        seq = channel.next_seq()
        reply = channel.call(seq, wire.SetPeers(seq, list(peers)), wire.PeersSet)
    if reply.problem:
        raise UserError(reply.problem)


@contextmanager
def _operator_channel(socket_path: Path, timeout_s: float) -> Iterator[StoreChannel]:
    channel = StoreChannel(socket_path, "operator", None, timeout_s, on_late=lambda _: None)
    try:
        yield channel
    except (OSError, ProtocolError) as error:
        message = f"the KV cache store on {socket_path} does not answer: {error}"
        raise StoreUnavailableError(message) from error
    finally:
        channel.close()
