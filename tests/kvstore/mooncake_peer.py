"""Another process at a Mooncake Store, ordered about by JSON lines on its standard input.

Usage: python mooncake_peer.py URL

    {"store": KEY, "seed": N, "num_bytes": N}   as a tier would; answers {"outcome": ...}
    {"pid": true}                               answers {"pid": of Mooncake's process}
    {"raw": NAME, "hex": BYTES}                 past the tier; answers {"code": ...}
    {"copy": NAME, "to": NAME}                  past the tier; answers {"code": ...}
    {"remove": NAME}                            past the tier; answers {"code": ...}
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import numpy as np

from banaserve.kvstore.tiers.interface import BlockName
from banaserve_mooncake.config import parse_url
from banaserve_mooncake.tier import MooncakeTier


def main(url: str) -> None:
    tier: MooncakeTier | None = None
    raw: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if order.keys() & {"raw", "copy", "remove"}:
            raw = raw or raw_client(url)
            answer = {"code": past_the_tier(raw, order)}
        else:
            tier = tier or joined(url)
            answer = {"pid": pid_of(tier)} if "pid" in order else {"outcome": store(tier, order)}
        print(json.dumps(answer), flush=True)
    if tier is not None:
        tier.close()


def joined(url: str) -> MooncakeTier:
    tier = MooncakeTier.from_url(url)
    while not tier.stats().available:
        select.select([tier.fd], [], [])
        tier.poll()
    return tier


def pid_of(tier: MooncakeTier) -> int:
    """The pid of the process that runs Mooncake's client."""
    child = tier._link._supervisor._child
    assert child is not None
    return child._process.pid


def store(tier: MooncakeTier, order: dict[str, Any]) -> str:
    data = np.random.default_rng(order["seed"]).bytes(order["num_bytes"])
    block = np.frombuffer(data, np.uint8)
    name = BlockName(bytes.fromhex(order["store"]), None)
    while tier.submit_store(name, block) is None:  # it has just lost its master
        select.select([tier.fd], [], [])
        tier.poll()
    while not (ended := tier.poll()):
        select.select([tier.fd], [], [])
    return str(ended[0].outcome.value)


def past_the_tier(client: Any, order: dict[str, Any]) -> int:
    if "remove" in order:
        return int(client.remove(order["remove"], True))
    if "copy" in order:
        return int(client.put(order["to"], client.get(order["copy"])))
    return int(client.put(order["raw"], bytes.fromhex(order["hex"])))


def raw_client(url: str) -> Any:
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    size = 64 * 2**20
    master = parse_url(url).master
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", size, size, "tcp", "", master) == 0
    return client


if __name__ == "__main__":
    main(sys.argv[1])
