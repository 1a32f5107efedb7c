"""The Mooncake tier against a real master and other processes, some of which fail."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, Completion, TierOutcome
from banaserve_mooncake import supervisor as mooncake_supervisor
from banaserve_mooncake.config import parse_url
from banaserve_mooncake.process import KEY_PREFIX
from banaserve_mooncake.tier import MooncakeTier
from mooncake_master import Peer, missing_mooncake, mooncake_master
from mooncake_peer import pid_of
from waiting import eventually

pytestmark = pytest.mark.deep

needs_mooncake = pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake()))
PEER = Path(__file__).with_name("mooncake_peer.py")
DEADLINE_S = 60.0
MIB = 2**20
SIZES = [4096, 49152, MIB + 4096, 3 * MIB]


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 24


def random_block(seed: int, num_bytes: int) -> BlockBytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), np.uint8).copy()


def wait(tier: MooncakeTier, holds: Callable[[], bool]) -> list[Completion]:
    """Poll until ``holds``; what has ended meanwhile."""
    ended: list[Completion] = []
    while not holds():
        assert select.select([tier.fd], [], [], DEADLINE_S)[0], "nothing happens any more"
        ended += tier.poll()
        tier.check()
    return ended


def end_of(tier: MooncakeTier, ticket: int | None) -> Completion:
    assert ticket is not None
    ended: list[Completion] = []
    while not ended:
        assert select.select([tier.fd], [], [], DEADLINE_S)[0], "it never ends"
        ended = tier.poll()
        tier.check()
    assert [one.ticket for one in ended] == [ticket]
    return ended[0]


def store(tier: MooncakeTier, name: bytes, block: BlockBytes) -> TierOutcome:
    return end_of(tier, tier.submit_store(BlockName(name, None), block)).outcome


def load(tier: MooncakeTier, name: bytes, num_bytes: int) -> tuple[TierOutcome, BlockBytes]:
    target = np.zeros(num_bytes, np.uint8)
    return end_of(tier, tier.submit_load(name, target)).outcome, target


def look(tier: MooncakeTier, name: bytes) -> Lookup:
    found = [Lookup.PENDING]

    def is_known() -> bool:
        found[:] = tier.lookup([name])
        return found != [Lookup.PENDING]

    wait(tier, is_known)
    return found[0]


class OtherProcess:
    """``mooncake_peer.py`` at the same master."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return next(iter(json.loads(self._process.stdout.readline()).values()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(autouse=True)
def _no_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters end right after their clients, who need not take leave of them for two seconds."""
    monkeypatch.setattr(mooncake_supervisor, "_LEAVE_TIMEOUT_S", 0.1)


@pytest.fixture
def master(stack: ExitStack) -> Peer:
    return stack.enter_context(mooncake_master())


def url_of(master: Peer, timeout_s: int = 30) -> str:
    lent = f"segment=64MiB&block=3MiB&depth=4&timeout={timeout_s}"
    return f"mooncake://127.0.0.1:{master.port}?{lent}"


def connected(stack: ExitStack, url: str, clock: Callable[[], float] = lambda: 0.0) -> MooncakeTier:
    """A tier whose answers do not grow old, however slow the machine is, but by ``clock``."""
    tier = MooncakeTier(parse_url(url), clock=clock)
    stack.callback(tier.close)
    wait(tier, lambda: tier.stats().available)
    return tier


@pytest.fixture
def tier(stack: ExitStack, master: Peer) -> MooncakeTier:
    return connected(stack, url_of(master))


@pytest.fixture
def hasty(stack: ExitStack, master: Peer) -> MooncakeTier:
    """It waits for a second, which may be over on a machine that stands still: then it fails."""
    return connected(stack, url_of(master, timeout_s=1), time.monotonic)


@pytest.fixture
def other(stack: ExitStack, master: Peer) -> OtherProcess:
    other = OtherProcess(url_of(master))
    stack.callback(other.close)
    return other


@needs_mooncake
class TestExchange:
    def test_blocks_stored_by_one_process_are_loaded_by_another(self, tier, other):
        for number, num_bytes in enumerate(SIZES):
            name = key(number).hex()
            assert other(store=name, seed=number, num_bytes=num_bytes) == "done"
        for number, num_bytes in enumerate(SIZES):
            assert look(tier, key(number)) is Lookup.HIT
            outcome, target = load(tier, key(number), num_bytes)
            assert outcome is TierOutcome.DONE
            assert np.array_equal(target, random_block(number, num_bytes))
        stats = tier.stats()
        assert (stats.loads, stats.loaded_bytes) == (len(SIZES), sum(SIZES))
        assert stats.load_bytes_per_s > 0

    def test_several_at_once_and_no_more_than_its_depth(self, tier):
        blocks = [random_block(number, MIB) for number in range(5)]
        os.kill(pid_of(tier), signal.SIGSTOP)  # else the first may be done before the last is asked
        submit = [tier.submit_store(BlockName(key(i), None), b) for i, b in enumerate(blocks)]
        os.kill(pid_of(tier), signal.SIGCONT)
        assert submit[4] is None
        ended = wait(tier, lambda: not tier.stats().in_flight) + tier.poll()
        assert {one.ticket for one in ended} == set(submit[:4])
        assert all(one.outcome is TierOutcome.DONE for one in ended)
        assert tier.lookup([key(i) for i in range(4)]) == [Lookup.HIT] * 4
        assert tier.stats().used_bytes == 4 * MIB

    def test_what_is_there_is_not_stored_again_and_what_is_not_is_missing(self, tier):
        block = random_block(0, 4096)
        assert store(tier, key(0), block) is TierOutcome.DONE
        assert tier.submit_store(BlockName(key(0), None), block) is None
        assert tier.submit_load(key(0), np.zeros(8192, np.uint8)) is None
        assert tier.submit_store(BlockName(key(1), None), random_block(1, 3 * MIB + 4096)) is None
        assert tier.submit_load(key(2), np.zeros(4096, np.uint8)) is None
        assert look(tier, key(2)) is Lookup.MISS
        assert tier.submit_load(key(2), np.zeros(4096, np.uint8)) is None

    def test_what_another_has_removed_is_missing(self, tier, other):
        assert store(tier, key(0), random_block(0, 4096)) is TierOutcome.DONE
        assert other(remove=KEY_PREFIX + key(0).hex()) == 0
        assert tier.lookup([key(0)]) == [Lookup.HIT]
        assert load(tier, key(0), 4096)[0] is TierOutcome.MISSING
        assert tier.lookup([key(0)]) == [Lookup.MISS]
        assert (tier.stats().missing, tier.stats().num_blocks) == (1, 0)

    def test_clear_forgets_for_everybody(self, stack, master, other):
        now_s = [0.0]
        tier = MooncakeTier(parse_url(url_of(master)), clock=lambda: now_s[0])
        stack.callback(tier.close)
        wait(tier, lambda: tier.stats().available)
        for number in range(3):
            assert store(tier, key(number), random_block(number, 4096)) is TierOutcome.DONE
        assert tier.clear() == 3
        assert (tier.stats().num_blocks, tier.stats().used_bytes) == (0, 0)
        for number in range(3):
            assert other(store=key(number).hex(), seed=number + 10, num_bytes=4096) == "done"
        assert tier.lookup([key(number) for number in range(3)]) == [Lookup.MISS] * 3
        now_s[0] += 10.0
        for number in range(3):
            assert look(tier, key(number)) is Lookup.HIT
            outcome, target = load(tier, key(number), 4096)
            assert outcome is TierOutcome.DONE
            assert np.array_equal(target, random_block(number + 10, 4096))


@needs_mooncake
class TestForeignBytes:
    def test_wrong_bytes_are_corrupt_and_go(self, tier, other, stack, master):
        assert other(store=key(1).hex(), seed=1, num_bytes=4096) == "done"
        cases = {
            2: {"raw": KEY_PREFIX + key(2).hex(), "hex": bytes(4096 + 32).hex()},
            3: {"raw": KEY_PREFIX + key(3).hex(), "hex": bytes(100).hex()},
            4: {"raw": KEY_PREFIX + key(4).hex(), "hex": bytes(9000).hex()},
            5: {"copy": KEY_PREFIX + key(1).hex(), "to": KEY_PREFIX + key(5).hex()},
        }
        for number, order in cases.items():
            assert other(**order) == 0
            assert look(tier, key(number)) is Lookup.HIT
            assert load(tier, key(number), 4096)[0] is TierOutcome.CORRUPT, order
            assert tier.lookup([key(number)]) == [Lookup.MISS]
        assert tier.stats().corrupt == len(cases)
        assert look(tier, key(1)) is Lookup.HIT
        assert load(tier, key(1), 4096)[0] is TierOutcome.DONE
        # The removal has reached the master: another tier does not find them either.
        fresh = connected(stack, url_of(master))
        assert [look(fresh, key(number)) for number in cases] == [Lookup.MISS] * len(cases)


def loaded(tier: MooncakeTier, name: bytes, num_bytes: int) -> TierOutcome | None:
    """How a load ends, or None where the tier is away; one that fails is asked again."""
    until_s, outcome = time.monotonic() + DEADLINE_S, TierOutcome.FAILED
    while outcome is TierOutcome.FAILED:
        assert time.monotonic() < until_s
        wait(tier, lambda: tier.stats().available)
        ticket = tier.submit_load(name, np.zeros(num_bytes, np.uint8))
        if ticket is None:
            return None
        outcome = end_of(tier, ticket).outcome
    return outcome


def serves_again(tier: MooncakeTier) -> None:
    """The lent memory is mounted again a moment after the master is back; nothing tells when.

    A block that comes before may find the tier away again.
    """
    until_s, outcome = time.monotonic() + DEADLINE_S, None
    while outcome is not TierOutcome.DONE:
        assert time.monotonic() < until_s
        wait(tier, lambda: tier.stats().available)
        ticket = tier.submit_store(BlockName(key(2), None), random_block(2, 4096))
        if ticket is not None:
            end_of(tier, ticket)
        outcome = loaded(tier, key(2), 4096)


@needs_mooncake
class TestFailures:
    def test_a_master_that_goes_and_comes_back(self, tier, master):
        assert store(tier, key(0), random_block(0, 4096)) is TierOutcome.DONE
        master.kill()
        wait(tier, lambda: not tier.stats().available)
        assert str(master.port) in tier.stats().problem
        assert "\n" not in tier.stats().problem
        assert tier.lookup([key(0)]) == [Lookup.MISS]
        assert tier.submit_store(BlockName(key(1), None), random_block(1, 4096)) is None
        assert tier.submit_load(key(0), np.zeros(4096, np.uint8)) is None
        master.start()
        wait(tier, lambda: tier.stats().available)
        serves_again(tier)

    def test_a_master_that_hangs(self, hasty, master):
        ticket = None
        while ticket is None:
            master.resume()
            serves_again(hasty)
            master.pause()
            ticket = hasty.submit_store(BlockName(key(1), None), random_block(1, 4096))
        assert end_of(hasty, ticket).outcome is TierOutcome.FAILED
        wait(hasty, lambda: not hasty.stats().available)
        master.resume()
        eventually(
            lambda: (
                look(hasty, key(2)) is Lookup.HIT
                and loaded(hasty, key(2), 4096) is TierOutcome.DONE
            )
        )
        serves_again(hasty)

    def test_a_peer_that_hangs_and_dies_with_its_blocks(self, hasty, other):
        assert other(store=key(0).hex(), seed=0, num_bytes=MIB) == "done"
        os.kill(other(pid=True), signal.SIGSTOP)
        ticket = None
        while ticket is None:
            eventually(lambda: look(hasty, key(0)) is Lookup.HIT)
            ticket = hasty.submit_load(key(0), np.zeros(MIB, np.uint8))
        assert end_of(hasty, ticket).outcome is TierOutcome.FAILED
        assert hasty.lookup([key(0)]) != [Lookup.HIT]
        assert hasty.stats().failures
        serves_again(hasty)

    def test_mooncakes_process_ends_with_a_daemon_that_is_killed(self, other):
        ended = os.pidfd_open(other(pid=True))
        other.close()
        assert select.select([ended], [], [], DEADLINE_S)[0]
        os.close(ended)

    def test_mooncakes_process_dies_under_way(self, tier):
        os.kill(pid_of(tier), signal.SIGSTOP)
        ticket = tier.submit_store(BlockName(key(0), None), random_block(0, MIB))
        os.kill(pid_of(tier), signal.SIGKILL)
        assert end_of(tier, ticket).outcome is TierOutcome.FAILED
        wait(tier, lambda: not tier.stats().available)
        assert "signal 9" in tier.stats().problem
        wait(tier, lambda: tier.stats().available)
        assert store(tier, key(0), random_block(0, MIB)) is TierOutcome.DONE

    def test_a_master_that_never_answers_holds_nobody_up(self):
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            port = deaf.getsockname()[1]
            tier = MooncakeTier.from_url(f"mooncake://127.0.0.1:{port}?segment=0&timeout=1")
            assert tier.lookup([key(0)]) == [Lookup.MISS]
            assert not tier.stats().available
            assert tier.stats().problem
            tier.close()

    def test_close_finishes_what_is_under_way(self, tier, master):
        leaving = MooncakeTier.from_url(url_of(master).replace("segment=64MiB", "segment=0"))
        wait(leaving, lambda: leaving.stats().available)
        pid = pid_of(leaving)
        for number in range(4):
            block = random_block(number, MIB)
            assert leaving.submit_store(BlockName(key(number), None), block) is not None
        leaving.close()
        assert not Path(f"/proc/{pid}").exists()
        assert [look(tier, key(number)) for number in range(4)] == [Lookup.HIT] * 4
