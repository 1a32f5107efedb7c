"""``/metrics``: vLLM's per instance, banaserve's own, and the store's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import REGISTRY, Collector
from starlette.requests import Request
from starlette.responses import Response

from banaserve.errors import StoreUnavailableError
from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.stats import StoreStats
from banaserve.types import InstanceId

_STORE = "banaserve_kvstore_"


Registries = Mapping[InstanceId, CollectorRegistry]
"""Series of vLLM's, by instance."""


class _Labelled(Collector):
    """The default registry, and those of the instances with the instance's id as a label."""

    def __init__(self, registries: Callable[[], Registries]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        yield from REGISTRY.collect()
        theirs = {name: one.collect() for name, one in self._registries().items()}
        yield from _together(theirs)

    def of(self, names: Sequence[str]) -> Iterator[Metric]:
        """The samples of these names alone, without making the others."""
        yield from REGISTRY.restricted_registry(names).collect()
        theirs = {
            name: one.restricted_registry(names).collect()
            for name, one in self._registries().items()
        }
        yield from _together(theirs)


def _together(by_instance: Mapping[InstanceId, Iterable[Metric]]) -> Iterator[Metric]:
    """Families of one name as one family."""
    found: dict[str, Metric] = {}
    for name, families in by_instance.items():
        for family in families:
            samples = [_with_id(sample, name) for sample in family.samples]
            if (known := found.get(family.name)) is not None:
                known.samples.extend(samples)
            else:
                family.samples = samples
                found[family.name] = family
    yield from found.values()


def _with_id(sample: Any, name: InstanceId) -> Any:
    return sample._replace(labels={**sample.labels, "instance_id": name})


class _Chosen(Collector):
    """All of a page, or the samples of some names."""

    def __init__(self, page: _Labelled, names: Sequence[str]) -> None:
        self._page = page
        self._names = names

    def collect(self) -> Iterator[Metric]:
        return self._page.of(self._names) if self._names else self._page.collect()


class MetricsPage:
    """The endpoint; asks the store at each scrape, off the event loop.

    ``?name[]=NAME``, which may be repeated, asks for samples of some names, as it does of
    Prometheus' own servers.

    Args:
        registries: Returns vLLM's series, by instance.
        store_stats: Asks the store, None where there is none; may block, may raise
            StoreUnavailableError.
    """

    def __init__(
        self,
        registries: Callable[[], Registries],
        store_stats: Callable[[], StoreStats] | None,
    ) -> None:
        self._store_stats = store_stats
        self._labelled = _Labelled(registries)

    async def answer(self, request: Request) -> Response:
        page = await asyncio.to_thread(self._page, request.query_params.getlist("name[]"))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def _page(self, names: Sequence[str]) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Chosen(self._labelled, names))
        page: bytes = generate_latest(registry)
        if names and not any(name.startswith(_STORE) for name in names):
            return page
        return page + self._store_page().encode()

    def _store_page(self) -> str:
        if self._store_stats is None:
            return ""
        try:
            stats = self._store_stats()
        except StoreUnavailableError:
            return "# TYPE banaserve_kvstore_up gauge\nbanaserve_kvstore_up 0\n"
        return "# TYPE banaserve_kvstore_up gauge\nbanaserve_kvstore_up 1\n" + prometheus_text(
            stats
        )
