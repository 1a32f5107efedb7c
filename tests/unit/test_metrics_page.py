"""The page of metrics: all of it, or the samples of some names; however many ask."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("starlette")

from starlette.requests import Request
from starlette.responses import Response

from banaserve.api import metrics
from banaserve.api.edge.refusals import REFUSED
from banaserve.api.metrics import MetricsPage, StoreAsker
from banaserve.api.shared_calls import SharedCalls, TooManyCallsError
from banaserve.errors import StoreUnavailableError
from waiting import until


@pytest.fixture
def names() -> Iterator[SimpleNamespace]:
    """A counter as vLLM has it, in a registry of each instance, and one of our own."""
    tag = uuid.uuid4().hex
    registries = {name: CollectorRegistry() for name in ("p0", "d0")}
    for number, registry in enumerate(registries.values()):
        theirs = Counter(f"vllm:a_{tag}", "Theirs", ["engine"], registry=registry)
        theirs.labels(str(number)).inc(number + 1)
    ours = Counter(f"banaserve_b_{tag}", "Ours", ["instance_id"])
    ours.labels("p0").inc(5)
    yield SimpleNamespace(
        theirs=f"vllm:a_{tag}_total", ours=f"banaserve_b_{tag}_total", registries=registries
    )
    REGISTRY.unregister(ours)


async def answered(page: MetricsPage, query: str) -> Response:
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": []}
    return await page.answer(Request({**scope, "query_string": query.encode()}))


async def asked(page: MetricsPage, query: str) -> dict[str, dict[str, float]]:
    """``{name: {instance: value}}`` of the answer."""
    answer = await answered(page, query)
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(bytes(answer.body).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels.get("instance_id", "")] = sample.value
    return found


def unavailable() -> metrics.StoreStats:
    raise StoreUnavailableError("it is away")


async def test_some_names_are_the_samples_that_the_whole_page_has(names: SimpleNamespace) -> None:
    page = MetricsPage(lambda: names.registries, unavailable)
    whole = await asked(page, "")
    assert whole[names.theirs] == {"p0": 1.0, "d0": 2.0}
    assert whole[names.ours] == {"p0": 5.0}
    for name in (names.theirs, names.ours):
        assert await asked(page, f"name[]={name}") == {name: whole[name]}
    both = await asked(page, f"name[]={names.theirs}&name%5B%5D={names.ours}")
    assert both.keys() == {names.theirs, names.ours}
    assert await asked(page, "name[]=nothing_of_this_name") == {}


async def test_the_store_is_asked_only_for_its_own_names(names: SimpleNamespace) -> None:
    num_asked = 0

    def counting() -> metrics.StoreStats:
        nonlocal num_asked
        num_asked += 1
        return unavailable()

    page = MetricsPage(dict, counting)
    await asked(page, f"name[]={names.ours}")
    assert num_asked == 0
    found = await asked(page, "name[]=banaserve_kvstore_leased_slots")
    assert (num_asked, found["banaserve_kvstore_up"]) == (1, {"": 0.0})


# ---- many who ask


async def test_many_scrapes_are_one() -> None:
    num_asked = 0

    def counting() -> metrics.StoreStats:
        nonlocal num_asked
        num_asked += 1
        return unavailable()

    page = MetricsPage(dict, counting)
    answers = await asyncio.gather(*(answered(page, "") for _ in range(24)))
    assert (num_asked, len({bytes(one.body) for one in answers})) == (1, 1)


async def test_a_store_that_hangs_takes_one_thread_and_none_of_others() -> None:
    lets_go, num_asked = threading.Event(), 0

    def hanging() -> metrics.StoreStats:
        nonlocal num_asked
        num_asked += 1
        lets_go.wait()
        return unavailable()

    asker = StoreAsker(hanging, patience_s=0.01)
    assert await asyncio.gather(*(asker.stats() for _ in range(40))) == [None] * 40
    assert await asker.stats() is None
    assert num_asked == 1
    assert await asyncio.to_thread(lambda: "free") == "free"
    lets_go.set()
    await until(lambda: asker._asked is not None and asker._asked.done())
    assert await asker.stats() is None
    assert num_asked == 2


class Calls:
    """Calls that end when they may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = asyncio.Semaphore(0)

    async def make(self, key: str) -> int:
        self.begun.append(key)
        number = len(self.begun)
        await self.may_end.acquire()
        if key == "wrong":
            raise ValueError(key)
        return number


async def test_who_asks_while_a_call_is_made_gets_a_later_one() -> None:
    calls = Calls()
    shared = SharedCalls(calls.make, rest=0.0)
    first = asyncio.create_task(shared.get("a"))
    await until(lambda: calls.begun == ["a"])
    later = [asyncio.create_task(shared.get("a")) for _ in range(5)]
    other = asyncio.create_task(shared.get("wrong"))
    await asyncio.sleep(0)
    later[0].cancel()
    calls.may_end.release()
    calls.may_end.release()
    calls.may_end.release()
    assert await first == 1
    assert await asyncio.gather(*later[1:]) == [2] * 4
    with pytest.raises(ValueError, match="wrong"):
        await other
    assert calls.begun == ["a", "a", "wrong"]


async def test_too_many_different_calls_are_refused() -> None:
    calls = Calls()
    shared = SharedCalls(calls.make, max_waiting=2, rest=0.0)
    tasks = [asyncio.create_task(shared.get("a"))]
    await until(lambda: calls.begun == ["a"])
    tasks += [asyncio.create_task(shared.get(name)) for name in "bc"]
    await asyncio.sleep(0)
    with pytest.raises(TooManyCallsError):
        await shared.get("d")
    for _ in range(3):
        calls.may_end.release()
    assert await asyncio.gather(*tasks) == [1, 2, 3]


async def test_too_many_different_pages_are_429_and_counted() -> None:
    page = MetricsPage(dict, None)
    counted = REFUSED.labels("metrics", "429")._value
    before = counted.get()
    answers = await asyncio.gather(*(answered(page, f"name[]=n{i}") for i in range(18)))
    assert {one.status_code for one in answers} == {200, 429}
    refused = [one for one in answers if one.status_code == 429]
    assert refused[0].headers["Retry-After"] == "1"
    assert counted.get() == before + len(refused)
