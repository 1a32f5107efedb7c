"""Requests of an operator to a running store: statistics, clearing and peers; no fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from banaserve.base.errors import ProtocolError, StoreUnavailableError, UserError
from banaserve.kvstore import wire
from banaserve.kvstore.client.channel import StoreChannel
from banaserve.kvstore.stats import StoreStats

R = TypeVar("R", bound=wire.Reply)


def fetch_stats(socket_path: Path, timeout_s: float = 5.0) -> StoreStats:
    """Return the counters and gauges of the store on ``socket_path``.

    Raises:
        StoreUnavailableError: There is no answer.
    """
    return _ask(socket_path, wire.GetStats, wire.Stats, timeout_s).stats


def clear_store(socket_path: Path, timeout_s: float = 5.0) -> wire.Cleared:
    """Drop every block that is not in use, from memory and tiers; return the numbers of each.

    Raises:
        StoreUnavailableError: There is no answer.
    """
    return _ask(socket_path, wire.Clear, wire.Cleared, timeout_s)


def set_peers(socket_path: Path, peers: Sequence[str], timeout_s: float = 5.0) -> None:
    """Let a store fetch blocks from the stores at ``peers``, and from no others.

    Args:
        peers: ``HOST:PORT`` of each store.

    Raises:
        StoreUnavailableError: There is no answer.
        UserError: An address is invalid, or the store was started without a key of peers.
    """
    reply = _ask(socket_path, lambda seq: wire.SetPeers(seq, list(peers)), wire.PeersSet, timeout_s)
    if reply.problem:
        raise UserError(reply.problem)


def _ask(
    socket_path: Path, build: Callable[[int], wire.Request], reply_type: type[R], timeout_s: float
) -> R:
    """Send the request that ``build`` makes from its seq and return the reply."""
    channel = StoreChannel(socket_path, "operator", None, 0, timeout_s, on_late=lambda _: None)
    try:
        return channel.call(build, reply_type)
    except (OSError, ProtocolError) as error:
        message = f"the KV cache store on {socket_path} does not answer: {error}"
        raise StoreUnavailableError(message) from error
    finally:
        channel.close()
