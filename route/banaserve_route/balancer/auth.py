"""Admission of requests: keys of clients and peers, allowed paths and regions."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from banaserve_route.balancer.config import TenantSettings
from banaserve_route.balancer.http.request import ClientRequest, RequestRefusedError

OPEN_PATHS = frozenset((b"/health", b"/ready", b"/ping", b"/metrics"))
"""Paths that the balancer itself answers, without a key."""

STATE_PATH = b"/_banaserve/state"
PREFIXES_PATH = b"/_banaserve/prefixes"
PEER_PATHS = frozenset((STATE_PATH, PREFIXES_PATH))
"""Paths that the balancer itself answers, to peers only."""

MODELS_PATH = b"/v1/models"
"""Path that the balancer itself answers if its replicas serve different models."""

PASSED_PREFIXES = (b"/v1/", b"/v2/")
PASSED_PATHS = frozenset(
    (b"/tokenize", b"/detokenize", b"/pooling", b"/classify", b"/score", b"/rerank", b"/generate",
     b"/version")
)  # fmt: skip
_NOT_PASSED = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")


PEER_FIELD = b"x-banaserve-peer"
"""Header field with a balancer's own key: the request comes from another region and is not
forwarded again."""

REGIONS_FIELD = b"x-banaserve-regions"
"""Header field with the regions in which a request may be served, separated by commas; clients may
send it, too, to narrow their regions."""

_MAX_REGIONS = 64


class Keys:
    """API keys that clients may show; if there are none, no key is needed."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, header: bytes) -> bool:
        """Return whether an Authorization header names a known key, in constant time."""
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        known = [secrets.compare_digest(given, digest) for digest in self._digests]
        return any(known) and scheme.lower() == b"bearer"


def check_path(path: bytes) -> None:
    """Check that requests for ``path`` are passed on to a replica.

    Administrative paths are not passed on: clients may use the model but not stop it.

    Raises:
        RequestRefusedError: Requests for ``path`` are not passed on.
    """
    is_known = path.startswith(PASSED_PREFIXES) or path in PASSED_PATHS
    if is_known and path.rstrip(b"/") not in _NOT_PASSED:
        return
    shown = path[:100].decode("ascii", "replace")
    raise RequestRefusedError(404, f"there is no {shown} here: the API is below /v1")


def check_key(keys: Keys, message: ClientRequest) -> None:
    """Check that ``message`` shows a known key, or that no key is needed.

    Raises:
        RequestRefusedError: ``message`` shows no known key.
    """
    if keys and not keys.admits(message.seen.get(b"authorization", b"")):
        raise RequestRefusedError(
            401, "no valid API key: send the header 'Authorization: Bearer KEY'"
        )


def check_peer(keys: Keys, message: ClientRequest) -> None:
    """Check that ``message`` shows the key that balancers share.

    Raises:
        RequestRefusedError: ``message`` shows another key, or this balancer has none.
    """
    if not keys.admits(b"Bearer " + message.seen[PEER_FIELD]):
        raise RequestRefusedError(401, "the key of a peer is needed: peer_key is not the same")


class Regions:
    """Regions where requests may be served: as the tenant allows, narrowed by the request."""

    def __init__(self, tenants: Sequence[TenantSettings]) -> None:
        self._by_digest = {
            _digest(one.key.encode()): frozenset(one.regions) for one in tenants if one.regions
        }

    def allowed(self, message: ClientRequest, was_forwarded: bool) -> frozenset[str] | None:
        """Return the allowed regions, or None for all; a forwarded request brings its own."""
        asked = message.seen.get(REGIONS_FIELD)
        wanted = None
        if asked is not None:
            names = asked.decode("latin-1").split(",")[:_MAX_REGIONS]
            wanted = frozenset(name.strip() for name in names)
        if was_forwarded or not self._by_digest:
            return wanted
        key = message.seen.get(b"authorization", b"").partition(b" ")[2].strip()
        granted = self._by_digest.get(_digest(key))
        if granted is None or wanted is None:
            return wanted if granted is None else granted
        return granted & wanted


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
