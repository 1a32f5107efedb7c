"""Registry of the store tiers of other packages, which users choose by the scheme of a URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from banaserve.base.errors import UserError
from banaserve.base.plugins.implementation_checks import check_call, check_class
from banaserve.base.plugins.registry import Registry
from banaserve.base.text.names import check_known
from banaserve.kvstore.stats import PEERS
from banaserve.kvstore.tiers.interface import StoreTier, UrlTier

SSD = "ssd"
OFFERED_BY = {"mooncake": "banaserve-mooncake"}
"""Packages to install for tiers that banaserve lacks without them."""


def _check(name: str, found: object) -> type[UrlTier]:
    if urlsplit(f"{name}://place").scheme != name:
        raise UserError(f"{name} is no scheme of a URL: give it lower-case letters, digits and -")
    if name in (SSD, PEERS):
        raise UserError("the name is taken by banaserve: it needs another one")
    tier = check_class(found, StoreTier)
    for function in ("check_url", "from_url"):
        check_call(getattr(tier, function, None), f"{tier.__name__}.{function}", ["url"])
    return tier


TIERS: Registry[type[UrlTier]] = Registry("tier", _check)


def distributed_tier(url: str) -> type[UrlTier]:
    """Return the tier that a URL selects by its scheme, after its check of the URL.

    Raises:
        UserError: No tier has this scheme (the message lists known ones), or an option is wrong.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        known = ", ".join(f"{name}://" for name in sorted({*TIERS.names(), *OFFERED_BY}))
        raise UserError(f"{url!r} is no URL of a distributed store: it begins with one of {known}")
    missing = {name: f"install the wheel of {package}" for name, package in OFFERED_BY.items()}
    refused = {**missing, **TIERS.refused}
    check_known("scheme of a distributed store", scheme, TIERS.names(), refused)
    tier = TIERS.get(scheme)
    tier.check_url(url)
    return tier
