"""Registry of store tiers. Each of banaserve's own is imported only when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from banaserve.errors import UserError
from banaserve.kvstore.tiers.interface import StoreTier
from banaserve.names import check_known
from banaserve.registry import Registry, check_call, check_class


class TierSpec(NamedTuple):
    """Which tier to open.

    Attributes:
        name: In the registry.
        place: A folder or a URL; empty where the tier needs none.
        capacity_bytes: Its budget; 0 where it has none of its own.
    """

    name: str
    place: str = ""
    capacity_bytes: int = 0


class TierEntry(NamedTuple):
    """How a tier is opened.

    Attributes:
        open: May raise anything.
        check_url: For a tier that users ask for as ``name://...``; see ``UrlTier``.
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


TIERS: Registry[TierEntry] = Registry("tier", _check)


def register(
    name: str,
    factory: Callable[[TierSpec], StoreTier],
    *,
    check_url: Callable[[str], object] | None = None,
) -> None:
    """Make a tier known.

    Args:
        name: Short and stable.
        factory: Opens it; may raise anything.
        check_url: Where ``name://...`` is how users ask for it: raises ``UserError`` for a URL
            that makes no sense, and reaches for nothing.

    Raises:
        ValueError: The name is taken.
    """
    TIERS.add(name, TierEntry(factory, check_url))


def open_tier(spec: TierSpec) -> StoreTier:
    """The tier that ``spec`` describes. Raises what its factory raises.

    Raises:
        UserError: There is none of this name; lists those there are.
    """
    return TIERS.get(spec.name).open(spec)


def distributed_spec(url: str) -> TierSpec:
    """The tier that a URL stands for, chosen by its scheme.

    Raises:
        UserError: No tier has this scheme (lists those that have one), or an option is wrong.
    """
    schemes = {name: check for name in TIERS.names() if (check := TIERS.get(name).check_url)}
    scheme = urlsplit(url).scheme
    if not scheme:
        known = ", ".join(f"{name}://" for name in schemes)
        raise UserError(f"{url!r} is no URL of a distributed store: it begins with one of {known}")
    check_known("scheme of a distributed store", scheme, schemes, TIERS.refused)
    schemes[scheme](url)
    return TierSpec(scheme, url)


def _attribute(module: str, name: str) -> Any:
    return getattr(import_module(f"banaserve.kvstore.tiers.{module}"), name)


register(
    "ssd", lambda spec: _attribute("ssd.tier", "SsdTier")(Path(spec.place), spec.capacity_bytes)
)
register(
    "mooncake",
    lambda spec: _attribute("mooncake", "MooncakeTier").from_url(spec.place),
    check_url=lambda url: _attribute("mooncake_config", "parse_url")(url),
)
