"""Quotas of API keys, in virtual time, and lines that clients can cause in a log."""

from __future__ import annotations

import pytest

from banaserve.base.access.tenants import KeyLimits, Quota
from banaserve.base.errors import UserError


def test_without_limits_everything_may_begin() -> None:
    quota = Quota(KeyLimits(), 0.0)
    for _ in range(1_000):
        assert quota.begin(0.0) is None
        quota.spend_tokens(10**9, 0.0)


def test_requests_at_once_are_bounded_until_one_ends() -> None:
    quota = Quota(KeyLimits(max_requests=2), 0.0)
    assert (quota.begin(0.0), quota.begin(0.0)) == (None, None)
    over = quota.begin(0.0)
    assert over is not None
    assert str(over) == "this API key may have 2 requests at once: try again in 1 s"
    quota.end()
    assert quota.begin(0.0) is None
    assert quota.num_requests == 2


def test_requests_a_minute_come_back_evenly() -> None:
    quota = Quota(KeyLimits(requests_per_minute=6), 0.0)
    assert [quota.begin(0.0) for _ in range(6)] == [None] * 6
    over = quota.begin(0.0)
    assert over is not None
    assert (over.limit, over.retry_after_s) == ("requests_per_minute", 10)
    assert quota.begin(9.9) is not None
    assert quota.begin(10.0) is None
    assert quota.begin(10.0) is not None
    assert [quota.begin(1_000.0) for _ in range(7)].count(None) == 6


def test_tokens_beyond_the_minute_are_waited_for() -> None:
    quota = Quota(KeyLimits(tokens_per_minute=600), 0.0)
    assert quota.begin(0.0) is None
    quota.spend_tokens(900, 0.0)
    over = quota.begin(0.0)
    assert over is not None
    assert (over.limit, over.retry_after_s) == ("tokens_per_minute", 30)
    assert quota.begin(29.0) is not None
    assert quota.begin(31.0) is None


def test_a_refused_request_counts_for_nothing() -> None:
    quota = Quota(KeyLimits(max_requests=1, requests_per_minute=2), 0.0)
    assert quota.begin(0.0) is None
    assert [quota.begin(0.0) is None for _ in range(5)] == [False] * 5
    quota.end()
    assert quota.begin(0.0) is None


def test_after_the_time_that_is_told_a_request_may_begin() -> None:
    for limits in (KeyLimits(requests_per_minute=7), KeyLimits(tokens_per_minute=7)):
        quota, now_s = Quota(limits, 0.0), 0.0
        for _ in range(50):
            while (over := quota.begin(now_s)) is None:
                quota.spend_tokens(3, now_s)
            now_s += over.retry_after_s
            assert quota.excess(now_s) is None


def test_other_limits_hold_at_once_and_what_is_under_way_counts() -> None:
    quota = Quota(KeyLimits(), 0.0)
    assert quota.begin(0.0) is None
    quota.take_limits(KeyLimits(max_requests=1), 0.0)
    assert quota.begin(0.0) is not None


@pytest.mark.parametrize("name", KeyLimits.__struct_fields__)
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is -1"):
        KeyLimits(**{name: -1}).check()
