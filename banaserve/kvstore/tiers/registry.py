"""Tiers by name. Each is imported only when it is opened, since some need much."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from banaserve.errors import UserError
from banaserve.kvstore.tiers.interface import StoreTier
from banaserve.names import check_known


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


Factory = Callable[[TierSpec], StoreTier]
_factories: dict[str, Factory] = {}
_schemes: dict[str, Callable[[str], object]] = {}


def register(
    name: str, factory: Factory, *, check_url: Callable[[str], object] | None = None
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
    if name in _factories:
        raise ValueError(f"there is a tier named {name} already")
    _factories[name] = factory
    if check_url is not None:
        _schemes[name] = check_url


def check_name(name: str) -> None:
    """Returns if there is a tier ``name``.

    Raises:
        UserError: There is none; lists those there are.
    """
    check_known("tier", name, _factories)


def open_tier(spec: TierSpec) -> StoreTier:
    """The tier that ``spec`` describes. Raises what its factory raises, and ``check_name``."""
    check_name(spec.name)
    return _factories[spec.name](spec)


def distributed_spec(url: str) -> TierSpec:
    """The tier that a URL stands for, chosen by its scheme.

    Raises:
        UserError: No tier has this scheme (lists those that have one), or an option is wrong.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        known = ", ".join(f"{name}://" for name in sorted(_schemes))
        raise UserError(f"{url!r} is no URL of a distributed store: it begins with one of {known}")
    check_known("scheme of a distributed store", scheme, _schemes)
    _schemes[scheme](url)
    return TierSpec(scheme, url)


def _attribute(module: str, name: str) -> Any:
    return getattr(import_module(f"banaserve.kvstore.tiers.{module}"), name)


register(
    "ssd", lambda spec: _attribute("ssd.tier", "SsdTier")(Path(spec.place), spec.capacity_bytes)
)
register("dictionary", lambda spec: _attribute("dictionary", "DictionaryTier")(spec.capacity_bytes))
register(
    "mooncake",
    lambda spec: _attribute("mooncake", "MooncakeTier").from_url(spec.place),
    check_url=lambda url: _attribute("mooncake_config", "parse_url")(url),
)
