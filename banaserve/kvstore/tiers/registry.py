"""Registry of store tiers. Each tier of banaserve is imported only when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from banaserve.base.errors import UserError
from banaserve.base.implementation_checks import check_call, check_class
from banaserve.base.names import check_known
from banaserve.base.registry import Registry
from banaserve.kvstore.tiers.interface import StoreTier


class TierSpec(NamedTuple):
    """Specification of a tier to open.

    Attributes:
        name: Name of the tier in the registry.
        place: Folder or URL of the tier; empty if it needs none.
        capacity_bytes: Budget of the tier; 0 if it has no budget of its own.
    """

    name: str
    place: str = ""
    capacity_bytes: int = 0


class TierEntry(NamedTuple):
    """Functions that open a tier and check its URL.

    Attributes:
        open: Function that opens the tier; may raise any exception.
        check_url: Check of a URL, for a tier that users choose as ``name://...``, see ``UrlTier``:
            raises ``UserError`` for an invalid URL, and connects to nothing. None for others.
    """

    open: Callable[[TierSpec], StoreTier]
    check_url: Callable[[str], object] | None = None


def _check(name: str, found: object) -> TierEntry:
    if urlsplit(f"{name}://place").scheme != name:
        raise UserError(f"{name} is no scheme of a URL: give it lower-case letters, digits and -")
    tier = check_class(found, StoreTier)
    for function in ("check_url", "from_url"):
        check_call(getattr(tier, function, None), f"{tier.__name__}.{function}", ["url"])
    return TierEntry(lambda spec: tier.from_url(spec.place), tier.check_url)


OFFERED_BY = {"mooncake": "banaserve-mooncake"}
"""Packages to install for tiers that banaserve lacks without them."""
TIERS: Registry[TierEntry] = Registry("tier", _check)


def open_tier(spec: TierSpec) -> StoreTier:
    """Open the tier that ``spec`` describes; raise any exception of its factory.

    Raises:
        UserError: There is no tier of this name; the message lists the known ones.
    """
    return TIERS.get(spec.name).open(spec)


def distributed_spec(url: str) -> TierSpec:
    """Return the specification of the tier that a URL selects by its scheme.

    Raises:
        UserError: No tier has this scheme (the message lists known ones), or an option is wrong.
    """
    schemes = {name: check for name in TIERS.names() if (check := TIERS.get(name).check_url)}
    scheme = urlsplit(url).scheme
    if not scheme:
        known = ", ".join(f"{name}://" for name in sorted({*schemes, *OFFERED_BY}))
        raise UserError(f"{url!r} is no URL of a distributed store: it begins with one of {known}")
    missing = {name: f"pip install {package}" for name, package in OFFERED_BY.items()}
    check_known("scheme of a distributed store", scheme, schemes, {**missing, **TIERS.refused})
    schemes[scheme](url)
    return TierSpec(scheme, url)


def _open_ssd(spec: TierSpec) -> StoreTier:
    from banaserve.kvstore.tiers.ssd.tier import SsdTier

    return SsdTier(Path(spec.place), spec.capacity_bytes)


TIERS.add("ssd", TierEntry(_open_ssd))
