"""Cache salts: what the front door writes is what the KV connector reads."""

from __future__ import annotations

import pytest

from banaserve.base.access.cache_salt import TenantSalt, own_prompt, own_salt, tenant
from banaserve.base.access.tenants import tenant_name

KEY = "0123456789abcdef"
"""As a server names the holder of a key."""
NAMED = tenant_name("replica-key", "client-key")
"""As a balancer names its client."""


def owned(name: str | None, cache_salt: str | None) -> str | None:
    before = tenant.set(name)
    try:
        return own_salt(cache_salt)
    finally:
        tenant.reset(before)


@pytest.mark.parametrize("name", [KEY, NAMED])
@pytest.mark.parametrize("salt", ["", "mine", "a:b", f"{KEY[::-1]}:stolen", "two\nlines"])
def test_a_salt_says_at_the_other_end_who_sent_it(name: str, salt: str) -> None:
    written = owned(name, salt)
    assert TenantSalt.of(written) == TenantSalt(name, salt)
    assert owned(name, written) == written


@pytest.mark.parametrize("salt", [None, "", "mine", "a:b", "0123:x", f"{KEY}0:x"])
def test_without_keys_a_salt_stays_as_it_is(salt: str | None) -> None:
    assert owned(None, salt) == salt
    assert TenantSalt.of(salt) == TenantSalt("", salt or "")


@pytest.mark.parametrize("name", [KEY, NAMED])
def test_the_holder_of_a_key_pays_for_every_salt_it_sends(name: str) -> None:
    accounts = {TenantSalt.of(owned(name, salt)).account for salt in (None, "mine", "another")}
    others = {TenantSalt.of(salt).account for salt in (None, "mine", owned(KEY[::-1], "mine"))}
    assert (len(accounts), len(others)) == (1, 3)
    assert not accounts & others


def test_an_account_does_not_tell_the_salt() -> None:
    accounts = {TenantSalt.of(salt).account for salt in (None, "a", "b", "a:")}
    assert len(accounts) == 4
    assert all(len(one) in (0, 16) and one != b"a" for one in accounts)
    assert TenantSalt.of("").account == TenantSalt.of(None).account == b""


def test_the_salt_of_a_prompt_is_owned_in_place() -> None:
    before = tenant.set(KEY)
    try:
        prompt = {"cache_salt": "mine"}
        own_prompt(prompt)
        own_prompt("text")
    finally:
        tenant.reset(before)
    assert prompt == {"cache_salt": f"{KEY}:mine"}
