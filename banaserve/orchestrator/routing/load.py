"""Load of an instance: a few numbers from its report and the router's own counts.

Staleness. A report older than ``stale_after_s``, like one that never came, is not read at all.
What is left are the router's own counts of that instance, which are live: they stay high while
an instance hangs, so it is sent no more than its share and nothing once its share is unanswered.
A stale instance is therefore not pushed behind the fresh ones in general. That would starve a
healthy instance in one long forward pass, which is when reports come late. It ranks behind a
fresh one only where all estimates are equal: then the fresh one is as good and known to be alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.types import InstanceReport, InstanceView

STALE_AFTER_S = 2.0
"""A few report periods: one lost report is not yet a silent instance."""

MAX_RUNNING_REQUESTS = 128
"""vLLM's default ``max_num_seqs``: where its batch is full and further requests wait."""

FULL_LOAD_S = 1.0
"""Prefill work ahead that counts as a load of 1; a choice of ours, about the time to first
token that people put up with."""


def fresh_report(view: InstanceView, now_s: float, stale_after_s: float) -> InstanceReport | None:
    """Returns the report of ``view``, or None where there is none or it is too old to read."""
    report = view.report
    if report is None or now_s - report.at_s > stale_after_s:
        return None
    return report


def published_load(report: InstanceReport) -> float:
    """BanaServe Eq. 37, in [0, 2]: U_p = C_p / C_p^max + M_p / M_p^max.

    C is compute (the share of wall time in forward passes), M memory (the share of KV blocks).
    """
    return report.busy_fraction + report.kv_used_fraction


class LoadModel(NamedTuple):
    """Load estimates over one set of candidates at one moment.

    What an instance has not told is assumed from its peers: a prefill speed not measured yet is
    the mean of the measured ones (1 token/s where none is, so that tokens are compared), and the
    KV share of a request is the mean of the fresh reports.

    Attributes:
        assumed_tokens_per_s: Prefill speed of an instance that has none measured.
        assumed_kv_fraction: KV share of one request on an instance that reports no running one.
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
        """Returns the model of ``views``, its assumptions taken from all of them."""
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
        """Returns the report of ``view`` where it is fresh."""
        return fresh_report(view, self.now_s, self.stale_after_s)

    def tokens_per_s(self, view: InstanceView) -> float:
        """Returns the measured prefill speed of ``view``, or the assumed one; above 0."""
        speed = view.prefill_tokens_per_s
        return speed if speed > 0 else self.assumed_tokens_per_s

    def queue_requests(self, view: InstanceView) -> int:
        """Requests ahead on a prefill instance.

        The router's own, or the reported waiting ones where those are more: then others send
        there too. The two are not added, because the reported ones contain the router's own.
        """
        report = self.report(view)
        return max(view.inflight_requests, report.num_waiting if report else 0)

    def present_requests(self, view: InstanceView) -> int:
        """Requests that a decode instance runs or will run.

        The router's own, or all reported, and those that are still prefilled elsewhere: without
        them a burst would go where the first of it went.
        """
        report = self.report(view)
        reported = report.num_running + report.num_waiting if report else 0
        return max(view.inflight_requests, reported) + view.coming_requests

    def decode_load(self, view: InstanceView) -> float:
        """The greatest of three shares: KV memory, places in the batch, prefill work ahead.

        A vector judged by its maximum, not Eq. 37's sum: a sum calls an instance with full
        memory and idle compute half loaded. The third share is zero on an instance that is
        handed its prompts ready, and counts where one instance serves both legs.

        Requests that the report does not show as running yet are charged the mean KV share of
        the running ones.
        """
        return self.decode_rank(view)[0]

    def request_share(self, view: InstanceView) -> float:
        """What one more request that decodes adds to ``decode_load``, at most; above 0."""
        report = self.report(view)
        running = report.num_running if report is not None else 0
        own_share = report.kv_used_fraction / running if report is not None and running else 0.0
        return max(own_share or self.assumed_kv_fraction, 1 / self.max_running_requests)

    def decode_rank(self, view: InstanceView) -> tuple[float, int, bool]:
        """Returns ``decode_load``, ``present_requests`` and whether there is no fresh report."""
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
