"""Load of an instance: a few numbers from its report and the router's own counts.

Staleness. A report older than ``stale_after_s`` is ignored, like a missing one. Then only the
router's own counts of that instance remain, which are live: they stay high while an instance hangs,
so that it gets no more than its share of requests, and none while its share is unanswered. A stale
instance is therefore not ranked behind the fresh ones in general. That would starve a healthy
instance during one long forward pass, when reports are late. It ranks behind a fresh instance only
if all estimates are equal: then the fresh one is as good and known to be alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.base.types import InstanceReport, InstanceView
from banaserve.orchestrator.control.measure import STALE_AFTER_S

MAX_RUNNING_REQUESTS = 128
"""Size of a full batch, vLLM's default ``max_num_seqs``: further requests wait."""

FULL_LOAD_S = 1.0
"""Waiting prefill work that counts as a load of 1, in seconds: about the time to first token that
users accept (our choice)."""


def fresh_report(view: InstanceView, now_s: float, stale_after_s: float) -> InstanceReport | None:
    """Return the report of ``view``; None if it is missing or stale."""
    report = view.report
    if report is None or now_s - report.at_s > stale_after_s:
        return None
    return report


def published_load(report: InstanceReport) -> float:
    """Return the load of BanaServe Eq. 37, in [0, 2]: U_p = C_p / C_p^max + M_p / M_p^max.

    C is compute (the share of wall time in forward passes), M memory (the share of KV blocks).
    """
    return report.busy_fraction + report.kv_used_fraction


class LoadModel(NamedTuple):
    """Load estimates over one set of candidates at one moment.

    Unknown values of an instance are taken from its peers: a prefill speed not measured yet is the
    mean of the measured ones (1 token/s without any, so that tokens are compared), and the KV share
    of a request is the mean of the fresh reports.

    Attributes:
        assumed_tokens_per_s: Prefill speed of an instance without a measured one.
        assumed_kv_fraction: KV share of one request on an instance that reports no running request.
    """

    now_s: float
    stale_after_s: float
    max_running_requests: int
    full_load_s: float
    assumed_tokens_per_s: float
    assumed_kv_fraction: float

    @classmethod
    def of(
        cls,
        views: Sequence[InstanceView],
        now_s: float,
        *,
        stale_after_s: float = STALE_AFTER_S,
        max_running_requests: int = MAX_RUNNING_REQUESTS,
        full_load_s: float = FULL_LOAD_S,
    ) -> LoadModel:
        """Return the model of ``views``, its assumptions taken from all of them."""
        speeds = [view.prefill_tokens_per_s for view in views if view.prefill_tokens_per_s > 0]
        known_shares = [
            report.kv_used_fraction / report.num_running
            for view in views
            if (report := view.report) is not None
            and now_s - report.at_s <= stale_after_s
            and report.num_running
            and report.kv_used_fraction > 0
        ]
        return cls(
            now_s,
            stale_after_s,
            max_running_requests,
            full_load_s,
            assumed_tokens_per_s=sum(speeds) / len(speeds) if speeds else 1.0,
            assumed_kv_fraction=sum(known_shares) / len(known_shares) if known_shares else 0.0,
        )

    def report(self, view: InstanceView) -> InstanceReport | None:
        """Return the report of ``view`` if it is fresh, else None."""
        return fresh_report(view, self.now_s, self.stale_after_s)

    def tokens_per_s(self, view: InstanceView) -> float:
        """Return the measured prefill speed of ``view``, or the assumed one; above 0."""
        speed = view.prefill_tokens_per_s
        return speed if speed > 0 else self.assumed_tokens_per_s

    def queue_requests(self, view: InstanceView) -> int:
        """Return the number of requests ahead on a prefill instance.

        It is the router's own count, or the number of reported waiting requests if that is larger:
        then other front doors send there too. The two are not added, since the reported requests
        include the router's own.
        """
        report = self.report(view)
        return max(view.inflight_requests, report.num_waiting if report else 0)

    def present_requests(self, view: InstanceView) -> int:
        """Return the number of requests that a decode instance runs or will run.

        It is the larger of the router's own count and the number of reported requests, plus those
        still in prefill elsewhere: without these, a whole burst would follow its first request.
        """
        report = self.report(view)
        reported = report.num_running + report.num_waiting if report else 0
        return max(view.inflight_requests, reported) + view.coming_requests

    def decode_load(self, view: InstanceView) -> float:
        """Return the greatest of three shares: KV memory, places in the batch, prefill work ahead.

        The maximum replaces Eq. 37's sum: by a sum, an instance with full memory and idle compute
        is half loaded. The third share is 0 on an instance that only gets computed prompts, and
        counts if one instance serves both legs.

        Requests that the report does not show as running yet count with the mean KV share of the
        running ones.
        """
        return self.decode_rank(view)[0]

    def request_share(self, view: InstanceView) -> float:
        """Return the maximum that one more decoding request adds to ``decode_load``; above 0."""
        report = self.report(view)
        running = report.num_running if report is not None else 0
        own_share = report.kv_used_fraction / running if report is not None and running else 0.0
        return max(own_share or self.assumed_kv_fraction, 1 / self.max_running_requests)

    def decode_rank(self, view: InstanceView) -> tuple[float, int, bool]:
        """Return ``decode_load``, ``present_requests`` and whether there is no fresh report."""
        report = self.report(view)
        present = view.inflight_requests
        kv_share = own_share = 0.0
        running = 0
        if report is not None:
            running, kv_share = report.num_running, report.kv_used_fraction
            present = max(present, running + report.num_waiting)
            own_share = kv_share / running if running else 0.0
        present += view.coming_requests
        tokens = view.inflight_prefill_tokens
        load = max(
            kv_share + (present - running) * (own_share or self.assumed_kv_fraction),
            present / self.max_running_requests,
            tokens / self.tokens_per_s(view) / self.full_load_s if tokens else 0.0,
        )
        return load, present, report is None
