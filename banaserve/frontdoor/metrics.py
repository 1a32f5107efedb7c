"""``/metrics``: vLLM's metrics for each instance, banaserve's own, and the store's.

The format is Prometheus' text format, or OpenMetrics, which has exemplars, if the scraper asks for
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import REGISTRY, Collector
from starlette.requests import Request
from starlette.responses import Response

from banaserve.base.errors import StoreUnavailableError
from banaserve.base.platform.processes import in_daemon_thread
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.stats import StoreStats

_STORE = "banaserve_kvstore_"
_OPEN_METRICS = "application/openmetrics-text"


Registries = Sequence[tuple[Mapping[str, str], CollectorRegistry]]
"""Registries of vLLM's series, each with the labels that its series get."""


class _Samples(Collector):
    """The default registry, the registries of instances with their labels, then the store's page.

    Args:
        names: Names of the samples to collect; empty for all samples.
    """

    def __init__(self, registries: Registries, names: Sequence[str], store: str) -> None:
        self._registries = registries
        self._names = names
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield from self._of(REGISTRY)
        yield from _together((labels, self._of(one)) for labels, one in self._registries)
        yield from text_string_to_metric_families(self._store)

    def _of(self, registry: CollectorRegistry) -> Iterable[Metric]:
        chosen: Any = registry.restricted_registry(self._names) if self._names else registry
        found: Iterable[Metric] = chosen.collect()
        return found


def _together(
    labelled: Iterable[tuple[Mapping[str, str], Iterable[Metric]]],
) -> Iterator[Metric]:
    """Yield the families, those of one name merged into one family."""
    found: dict[str, Metric] = {}
    for labels, families in labelled:
        for family in families:
            samples = [one._replace(labels={**one.labels, **labels}) for one in family.samples]
            if (known := found.get(family.name)) is not None:
                known.samples.extend(samples)
            else:
                family.samples = samples
                found[family.name] = family
    yield from found.values()


class _Page(NamedTuple):
    """Page of metrics that a scraper asks for.

    Attributes:
        names: Names of samples; empty for all samples.
        is_open: True for OpenMetrics.
    """

    names: tuple[str, ...]
    is_open: bool


class StoreStatsReader:
    """Reader of the store's statistics in a separate thread: a hanging store blocks no other work.

    Args:
        ask: Returns the store's statistics; may block, may raise StoreUnavailableError.
        patience_s: Maximum time to wait for an answer, in seconds.
    """

    def __init__(self, ask: Callable[[], StoreStats], patience_s: float = 3.0) -> None:
        self._ask = ask
        self._patience_s = patience_s
        self._asked: asyncio.Future[StoreStats] | None = None

    async def stats(self) -> StoreStats | None:
        """Return the store's statistics; None if it does not answer."""
        if self._asked is None or self._asked.done():
            self._asked = in_daemon_thread(self._ask)
            self._asked.add_done_callback(lambda one: one.cancelled() or one.exception())
        asked = self._asked
        try:
            async with asyncio.timeout(self._patience_s):
                return await asyncio.shield(asked)
        except (TimeoutError, StoreUnavailableError):
            return None


class MetricsPage:
    """Endpoint of metrics; asks the store at each scrape, off the event loop.

    ``?name[]=NAME``, which may be repeated, selects samples by name, as Prometheus' own servers do.
    For any number of scrapers, pages take at most a fifth of one processor and one dedicated
    thread.

    Args:
        registries: Called in the event loop at each scrape: brings the metrics up to date, and
            returns the registries of vLLM's series of instances, with labels for each.
        store_stats: Returns the store's statistics, may block and may raise
            StoreUnavailableError; None without a store.
    """

    def __init__(
        self,
        registries: Callable[[], Registries],
        store_stats: Callable[[], StoreStats] | None,
    ) -> None:
        self._store = StoreStatsReader(store_stats) if store_stats is not None else None
        self._registries = registries
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._pages: SharedCalls[_Page, bytes] = SharedCalls(self._made)

    async def answer(self, request: Request) -> Response:
        """Return a page; 429 if too many different pages are asked for at once."""
        names = tuple(sorted(set(request.query_params.getlist("name[]"))))
        accepted = request.headers.get("accept", "").split(",")
        is_open = any(one.split(";")[0].strip() == _OPEN_METRICS for one in accepted)
        try:
            page = await self._pages.get(_Page(names, is_open))
        except TooManyCallsError:
            return refuse(
                "metrics",
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many different pages of metrics are asked for at once: try again shortly",
                {"Retry-After": "1"},
            )
        kind = openmetrics.CONTENT_TYPE_LATEST if is_open else exposition.CONTENT_TYPE_LATEST
        return Response(page, headers={"Content-Type": kind})

    async def _made(self, page: _Page) -> bytes:
        store = ""
        is_asked = not page.names or any(name.startswith(_STORE) for name in page.names)
        if self._store is not None and is_asked:
            store = _store_page(await self._store.stats())
        samples = _Samples(self._registries(), page.names, store)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._written, page, samples)

    def _written(self, page: _Page, samples: _Samples) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(samples)
        # The library's other escaping schemes replace the colon in vLLM's names.
        written: bytes = (
            openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
            if page.is_open
            else exposition.generate_latest(registry)
        )
        return written


def _store_page(stats: StoreStats | None) -> str:
    if stats is None:
        return "# TYPE banaserve_kvstore_up gauge\nbanaserve_kvstore_up 0\n"
    return "# TYPE banaserve_kvstore_up gauge\nbanaserve_kvstore_up 1\n" + prometheus_text(stats)


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_LONGEST_REST_S = 1.0


class TooManyCallsError(Exception):
    """Error: too many different calls are waiting; ask again later."""


class SharedCalls(Generic[K, T]):
    """Queue of calls: makes one call at a time, and pauses after each in proportion to its time.

    All callers that ask for the same waiting call share its result. A result is never older than
    the question.

    Args:
        make: Makes a call.
        max_waiting: Maximum number of different calls that wait.
        rest: Length of the pause after a call, as a multiple of the call's time.
    """

    def __init__(
        self, make: Callable[[K], Awaitable[T]], max_waiting: int = 16, rest: float = 4.0
    ) -> None:
        self._make = make
        self._max_waiting = max_waiting
        self._rest = rest
        self._waiting: dict[K, asyncio.Future[T]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def get(self, key: K) -> T:
        """Return the result of a call that begins after this question.

        Raises:
            TooManyCallsError: The call would have to wait for too many others.
        """
        answer = self._waiting.get(key)
        if answer is None:
            if len(self._waiting) >= self._max_waiting:
                raise TooManyCallsError
            answer = self._waiting[key] = asyncio.get_running_loop().create_future()
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work())
        return await asyncio.shield(answer)

    async def _work(self) -> None:
        now = asyncio.get_running_loop().time
        while self._waiting:
            key = next(iter(self._waiting))
            answer, began_s = self._waiting.pop(key), now()
            try:
                answer.set_result(await self._make(key))
            except Exception as failure:
                answer.set_exception(failure)
                answer.exception()  # marked as retrieved: all callers may have been cancelled
            await asyncio.sleep(min(_LONGEST_REST_S, self._rest * (now() - began_s)))
