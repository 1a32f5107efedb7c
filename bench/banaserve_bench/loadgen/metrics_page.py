"""Pages of a server, fetched by URL, and the samples of a page of metrics."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from banaserve.frontdoor.admin_client import RedirectHandler

_MOST_BYTES = 16 << 20


def fetch(url: str, api_key: str | None = None, timeout_s: float = 30.0) -> str:
    """Return the text of a page. Blocking.

    Raises:
        urllib.error.HTTPError: The server answers with an error.
        OSError: The server does not answer.
        http.client.HTTPException: The answer is no HTTP.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(RedirectHandler())
    with opener.open(request, timeout=timeout_s) as answer:
        return str(answer.read(_MOST_BYTES).decode(errors="replace"))


def samples_of(page: str, *names: str) -> list[Sample]:
    """Return the samples whose names begin with one of ``names``.

    Other lines are not parsed: those of a whole page would take a while.

    Raises:
        ValueError: The lines are not in Prometheus' text format.
    """
    lines = [line for line in page.splitlines() if line.startswith(names)]
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    return [sample for family in families for sample in family.samples]
