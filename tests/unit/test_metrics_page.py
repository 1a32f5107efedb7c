"""The page of metrics: all of it, or the samples of some names."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("starlette")

from starlette.requests import Request

from banaserve.api import metrics
from banaserve.api.metrics import MetricsPage
from banaserve.errors import StoreUnavailableError


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


async def asked(page: MetricsPage, query: str) -> dict[str, dict[str, float]]:
    """``{name: {instance: value}}`` of the answer."""
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": []}
    answer = await page.answer(Request({**scope, "query_string": query.encode()}))
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
