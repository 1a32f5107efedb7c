"""The page of metrics: all of it, or the samples of some names; however many ask."""

from __future__ import annotations

import asyncio
import functools
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("starlette")

from starlette.requests import Request
from starlette.responses import Response

from banaserve.base.errors import StoreUnavailableError
from banaserve.frontdoor import metrics
from banaserve.frontdoor.metrics import (
    MetricsPage,
    SharedCalls,
    StoreStatsReader,
    TooManyCallsError,
)
from banaserve.kvstore.stats import StoreStats
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
        theirs=f"vllm:a_{tag}_total",
        ours=f"banaserve_b_{tag}_total",
        registries=[({"instance_id": name}, one) for name, one in registries.items()],
    )
    REGISTRY.unregister(ours)


async def answered(page: MetricsPage, query: str, accept: str = "") -> Response:
    headers = [(b"accept", accept.encode())] if accept else []
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": headers}
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

    page = MetricsPage(list, counting)
    await asked(page, f"name[]={names.ours}")
    assert num_asked == 0
    found = await asked(page, "name[]=banaserve_kvstore_leased_slots")
    assert (num_asked, found["banaserve_kvstore_up"]) == (1, {"": 0.0})


# ---- OpenMetrics

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


STATS = StoreStats(
    **{
        name: 7 if name == "hits" else 0 for name in StoreStats.__struct_fields__ if name != "tiers"
    },
    tiers=(),
)


@pytest.fixture
def latency() -> Iterator[Histogram]:
    one = Histogram(f"banaserve_latency_{uuid.uuid4().hex}", "Ours", buckets=(1.0, 2.0))
    yield one
    REGISTRY.unregister(one)


def latency_name(latency: Histogram) -> str:
    [family] = latency.describe()
    return family.name


async def test_a_scraper_that_asks_gets_examples_and_the_same_samples(
    names: SimpleNamespace, latency: Histogram
) -> None:
    latency.observe(1.5, {"trace_id": "ab" * 16, "span_id": "cd" * 8})
    page = MetricsPage(lambda: names.registries, lambda: STATS)
    answer = await answered(page, "", PROMETHEUS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    text = bytes(answer.body).decode()
    assert text.endswith("# EOF\n")
    found = {one.name: one for one in open_metrics(text)}
    family = found[latency_name(latency)]
    [told] = [one for one in family.samples if one.exemplar]
    assert told.labels == {"le": "2.0"}
    assert (told.exemplar.value, told.exemplar.labels["trace_id"]) == (1.5, "ab" * 16)
    theirs = found[names.theirs.removesuffix("_total")]
    counted = [one for one in theirs.samples if one.name == names.theirs]
    values = {one.labels["instance_id"]: one.value for one in counted}
    assert values == {"p0": 1.0, "d0": 2.0}
    assert found["banaserve_kvstore_hits"].type == "counter"
    assert found["banaserve_kvstore_hits"].samples[0].value == 7
    plain = await asked(page, "")
    of_store = {name: of for name, of in plain.items() if name.startswith("banaserve_kvstore_")}
    written = {s.name: s.value for one in found.values() for s in one.samples if not s.labels}
    assert of_store["banaserve_kvstore_hits_total"] == {"": 7.0}
    assert all(written[name] == of[""] for name, of in of_store.items())


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4", "text/html", "x" * 9000])
async def test_others_get_the_text_format_without_examples(latency: Histogram, accept: str) -> None:
    latency.observe(1.5, {"trace_id": "ab" * 16})
    answer = await answered(
        MetricsPage(list, None), f"name[]={latency_name(latency)}_bucket", accept
    )
    assert answer.headers["content-type"].startswith("text/plain")
    text = bytes(answer.body).decode()
    assert f'{latency_name(latency)}_bucket{{le="2.0"}} 1.0' in text
    assert "trace_id" not in text


async def test_both_formats_at_once_are_two_pages(latency: Histogram) -> None:
    page = MetricsPage(list, None)
    open_one, plain = await asyncio.gather(answered(page, "", PROMETHEUS), answered(page, ""))
    assert b"# EOF" in bytes(open_one.body)
    assert b"# EOF" not in bytes(plain.body)


# ---- many who ask


async def test_many_scrapes_are_one() -> None:
    num_asked = 0

    def counting() -> metrics.StoreStats:
        nonlocal num_asked
        num_asked += 1
        return unavailable()

    page = MetricsPage(list, counting)
    answers = await asyncio.gather(*(answered(page, "") for _ in range(24)))
    assert (num_asked, len({bytes(one.body) for one in answers})) == (1, 1)


async def test_a_store_that_hangs_takes_one_thread_and_none_of_others() -> None:
    lets_go, num_asked = threading.Event(), 0

    def hanging() -> metrics.StoreStats:
        nonlocal num_asked
        num_asked += 1
        lets_go.wait()
        return unavailable()

    reader = StoreStatsReader(hanging, patience_s=0.01)
    assert await asyncio.gather(*(reader.stats() for _ in range(40))) == [None] * 40
    assert await reader.stats() is None
    await until(lambda: num_asked)  # its thread may begin later than nobody waits for it
    assert await asyncio.to_thread(lambda: "free") == "free"
    assert num_asked == 1
    lets_go.set()
    await until(lambda: reader._asked is not None and reader._asked.done())
    assert await reader.stats() is None
    await until(lambda: num_asked == 2)


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
    page = MetricsPage(list, None)
    counted = functools.partial(
        *(REGISTRY.get_sample_value, "banaserve_refused_total"),
        {"cause": "metrics", "status": "429"},
    )
    before = counted() or 0.0
    answers = await asyncio.gather(*(answered(page, f"name[]=n{i}") for i in range(18)))
    assert {one.status_code for one in answers} == {200, 429}
    refused = [one for one in answers if one.status_code == 429]
    assert refused[0].headers["Retry-After"] == "1"
    assert counted() == before + len(refused)
