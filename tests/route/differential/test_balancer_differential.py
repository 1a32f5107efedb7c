"""The balancer beside nginx and HAProxy, before and behind each: nobody reads requests otherwise.

BANASERVE_DIFFERENTIAL_CASES says how many changed requests, BANASERVE_DIFFERENTIAL_SEED which; a
seed is drawn, and told where a test fails, for a number alone: ``make test-differential``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import HealthSettings, LimitSettings
from banaserve_route.balancer.http.request import ClientRequest
from corpus import kept
from depth import num_examples
from front_proxies import MAX_BODY_BYTES, missing, start_haproxy, start_nginx
from hostile_requests import ORDINARY, OWN_FIELDS, Ordinary, changed, hostile, with_fields
from raw_client import exchange, read_answers
from recording_origin import PROBES, STAMP, Meaning, Recorded, RecordingOrigin

pytestmark = [
    pytest.mark.one_process,  # it notes what a balancer has read
    pytest.mark.skipif(
        bool(missing()), reason=f"apt-get install {' '.join(missing())}: compared with the balancer"
    ),
]

_CASES = os.environ.get("BANASERVE_DIFFERENTIAL_CASES", "")
_SEED = os.environ.get("BANASERVE_DIFFERENTIAL_SEED", "")
NUM_CASES = int(_CASES or num_examples(400))
SEED = int(_SEED or (random.SystemRandom().randrange(10**6) if _CASES else 1))
LAST_MEANING = Meaning(b"GET", b"/v1/last", b"")
HEALTH = HealthSettings(interval_s=5.0, timeout_s=60.0)


@dataclass(frozen=True)
class Taken:
    """A request as the balancer has understood it."""

    meaning: Meaning
    stamps: tuple[bytes, ...]


@dataclass(frozen=True)
class Passage:
    """What became of the bytes of one client.

    Attributes:
        taken: By the balancer.
        records: Of the origin, up to one whose meaning was not certain.
        is_certain: There was none.
    """

    taken: list[Taken]
    records: list[Recorded]
    is_certain: bool

    @property
    def meanings(self) -> list[Meaning]:
        return [one.meaning for one in self.records]

    @property
    def taken_meanings(self) -> list[Meaning]:
        return [one.meaning for one in self.taken]


class Way:
    """One way from a client to the origin; ``notes`` are those of the balancer on it, if any."""

    def __init__(self, port: int, origin: RecordingOrigin, notes: list[Taken] | None) -> None:
        self._port, self._origin, self._notes = port, origin, notes
        self._num_victims = 0

    async def pass_on(self, data: bytes) -> Passage:
        """Send ``data`` and the request of a second client after it, which has its own answer."""
        found = await self._pass_on(data)
        self._num_victims += 1
        body = b"victim %d" % self._num_victims
        head = b"POST /v1/victim HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n\r\n" % len(body)
        victim = await self._pass_on(head + body)
        assert victim.meanings == [Meaning(b"POST", b"/v1/victim", body), LAST_MEANING]
        return found

    async def _pass_on(self, data: bytes) -> Passage:
        origin = self._origin
        num_before = len(origin.records)
        if self._notes is not None:
            self._notes.clear()
        raw = await exchange(self._port, data)
        answers = read_answers(raw, lambda serial: origin.records[serial])
        # A proxy alone may pass on what has no certain meaning; with a balancer it may not.
        assert self._notes is None or origin.broken == []
        records = origin.records[num_before:]
        num_certain, is_certain = origin.forget_broken()
        # Every request that has reached the origin has its answer here, in their order.
        serials = [one.serial for one in answers if one.serial is not None]
        assert serials == [one.serial for one in records]
        return Passage(list(self._notes or ()), records[: num_certain - num_before], is_certain)


@dataclass(frozen=True)
class Ways:
    """All ways, by what is on them in the order of a client's bytes."""

    balancer: Way
    nginx: Way
    haproxy: Way
    nginx_balancer: Way
    haproxy_balancer: Way
    balancer_nginx: Way
    balancer_haproxy: Way

    async def check(self, data: bytes) -> dict[str, Passage]:
        """Send ``data`` on every way; returns the passages, of which no two disagree.

        Raises:
            AssertionError: Two do, or a client has another one's answer, or none.
        """
        found = {name: await getattr(self, name).pass_on(data) for name in Ways.__annotations__}
        alone = found["balancer"]
        assert alone.meanings == alone.taken_meanings
        for name in ("nginx", "haproxy"):
            other = found[name]
            pairs = zip(_asked(alone.taken_meanings), _asked(other.meanings), strict=False)
            assert all(ours == theirs for ours, theirs in pairs), (name, alone, other)
            behind = found[f"{name}_balancer"]
            assert behind.meanings == behind.taken_meanings, name
            if other.is_certain:
                assert is_part(behind.taken_meanings, other.meanings), (name, behind, other)
            # One that was cut out of another's body would have none, or the same.
            stamps = [stamp for one in behind.taken for stamp in one.stamps]
            assert len(set(stamps)) == len(stamps) == len(behind.taken), (name, behind)
            before = found[f"balancer_{name}"]
            assert is_part(before.meanings, before.taken_meanings), (name, before)
        return found


def _asked(meanings: Iterable[Meaning]) -> list[Meaning]:
    """Without what the balancer answers by itself."""
    return [one for one in meanings if one.target.partition(b"?")[0] not in PROBES]


def is_part(some: Sequence[Meaning], of: Sequence[Meaning]) -> bool:
    """Whether ``some`` are among ``of``, in their order."""
    left = iter(of)
    return all(any(one == other for other in left) for one in some)


def noted(balancer: Balancer) -> list[Taken]:
    """A list of what ``balancer`` takes from here on."""
    notes: list[Taken] = []
    take = balancer.take

    def note(client: Any, message: ClientRequest) -> Any:
        meaning = Meaning(message.method, message.target, b"".join(message.body))
        if message.path not in PROBES:
            notes.append(Taken(meaning, tuple(_stamps(message))))
        return take(client, message)

    balancer.take = note  # type: ignore[method-assign]
    return notes


def _stamps(message: ClientRequest) -> Iterable[bytes]:
    for line in message.fields:
        name, _, value = line.partition(b":")
        if name.lower() == STAMP:
            yield value.strip()


@pytest.fixture
async def ways(house: Any, tmp_path: Path, stack: ExitStack) -> Ways:
    origin = await RecordingOrigin().start()
    stack.callback(origin.stop)
    limits = LimitSettings(max_body=f"{MAX_BODY_BYTES}B")

    async def balancer(port: int) -> tuple[int, list[Taken]]:
        made = await house.balance(f"http://127.0.0.1:{port}", health=HEALTH, limits=limits)
        return house.port, noted(made)

    alone, notes = await balancer(origin.port)
    nginx = start_nginx(tmp_path, alone, origin.port, stack)
    haproxy = start_haproxy(tmp_path, alone, origin.port, stack)
    return Ways(
        balancer=Way(alone, origin, notes),
        nginx=Way(nginx.to_origin, origin, None),
        haproxy=Way(haproxy.to_origin, origin, None),
        nginx_balancer=Way(nginx.to_balancer, origin, notes),
        haproxy_balancer=Way(haproxy.to_balancer, origin, notes),
        balancer_nginx=Way(*await _over(balancer, nginx.to_origin, origin)),
        balancer_haproxy=Way(*await _over(balancer, haproxy.to_origin, origin)),
    )


async def _over(balancer: Any, port: int, origin: RecordingOrigin) -> Any:
    front, notes = await balancer(port)
    return front, origin, notes


def expected(ordinary: Ordinary) -> list[Meaning]:
    return [*ordinary.meanings, *([] if ordinary.closes else [LAST_MEANING])]


async def test_ordinary_requests_mean_the_same_on_every_way(ways: Ways) -> None:
    for name, ordinary in ORDINARY.items():
        for way, passage in (await ways.check(ordinary.data)).items():
            assert passage.meanings == expected(ordinary), (name, way)


async def test_fields_for_the_server_reach_it_as_they_were_sent(ways: Ways) -> None:
    sent = [(ORDINARY[name].data, fields) for name, fields in OWN_FIELDS.items()]
    sent += with_fields(SEED, num_examples(60))
    for data, fields in sent:
        for way in (ways.balancer, ways.haproxy_balancer, ways.balancer_haproxy):
            passage = await way.pass_on(data)
            assert passage.records[0].fields == fields, data


async def test_hostile_requests_leave_as_one_request_each_or_not_at_all(ways: Ways) -> None:
    num_passed = 0
    for data in hostile():
        found = await checked(ways, data)
        num_passed += any(one.records for one in found.values())
    assert num_passed > 20


async def test_changed_requests_leave_as_one_request_each_or_not_at_all(ways: Ways) -> None:
    num_taken = 0
    for data in changed(SEED, NUM_CASES, kept("framing")):
        found = await checked(ways, data)
        num_taken += len(found["balancer"].taken)
    assert num_taken > NUM_CASES // 8


async def checked(ways: Ways, data: bytes) -> dict[str, Passage]:
    try:
        return await ways.check(data)
    except AssertionError as error:
        error.add_note(f"seed {SEED}: keep this in tests/fuzz/corpus/framing: {data!r}")
        raise


def test_the_same_seed_makes_the_same_changes() -> None:
    once, again = (list(changed(3, 50, [b"seed"])) for _ in range(2))
    assert once == again != list(changed(4, 50, [b"seed"]))
    assert len(set(once)) > 45
