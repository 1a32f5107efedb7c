"""State of a server as its page shows it: values that go to browsers as JSON."""

from __future__ import annotations

import msgspec

from banaserve.contracts.control_api import ControllerStatus, InstanceStatus
from banaserve.contracts.trace_events import RequestSummary

PAGE_VERSION = 1
"""Version of the data for the page's script, by which an open page notices a replaced server."""


class ShownLayers(msgspec.Struct, frozen=True):
    """Layers ``first_layer`` to ``end_layer``, without ``end_layer``.

    Attributes:
        heads: KV heads of each layer; empty for whole layers.
    """

    first_layer: int
    end_layer: int
    heads: list[int] = []


class ModulesAway(msgspec.Struct, frozen=True):
    """Modules of an instance that run beside another instance.

    Attributes:
        kind: ``layers``, ``heads``, ``experts``, or ``context`` for older KV blocks.
        at: Instance beside which the modules run.
    """

    kind: str
    at: str
    words: str
    spans: list[ShownLayers]


class InstancePanel(msgspec.Struct, frozen=True):
    """An instance and its modules that are away; all other modules are at home."""

    status: InstanceStatus
    away: list[ModulesAway] = []


class MoveProgress(msgspec.Struct, frozen=True):
    """A move under way, or one of the last that ended.

    Attributes:
        kind: ``layers``, ``heads``, ``context``, ``return``, or ``other`` if no modules move.
        source: Instance whose modules move; empty if no modules move.
        target: Instance beside which the modules will run; empty for home.
        phase: Phase of the unit that is being moved.
        num_bytes: KV and weights copied so far.
        total_bytes: KV and weights to copy, growing as blocks are written meanwhile; 0 before
            copying has begun.
        predicted_bytes: Maximum of KV and weights to copy; 0 if not known.
    """

    id: str
    kind: str
    state: str
    what: str
    source: str = ""
    target: str = ""
    phase: str = ""
    seconds: float = 0.0
    num_bytes: int = 0
    total_bytes: int = 0
    predicted_bytes: int = 0
    stall_s: float = 0.0
    error: str = ""
    spans: list[ShownLayers] = []


class Figures(msgspec.Struct, frozen=True):
    """Figures of the whole server at one moment; None if not known.

    Attributes:
        ttft_p50_s, ttft_p99_s: Time to first token, of requests with a recent first token.
        tpot_p50_s, tpot_p99_s: Time per output token, of requests that have decoded recently.
        tokens_per_s: Output tokens per second.
        kv_mean_fraction, kv_max_fraction: Fraction of KV blocks in use, over instances.
        compute_mean_fraction: Mean compute load over instances.
        gpu_fraction: Mean fraction of time with a kernel running, over GPUs.
        cpu_fraction: Fraction of the machine's processors in use.
    """

    num_running: int = 0
    num_waiting: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    tokens_per_s: float | None = None
    requests_per_s: float | None = None
    kv_mean_fraction: float | None = None
    kv_max_fraction: float | None = None
    compute_mean_fraction: float | None = None
    gpu_fraction: float | None = None
    cpu_fraction: float | None = None


class StoreLevel(msgspec.Struct, frozen=True):
    """Memory of the store, or a tier below it.

    Attributes:
        capacity_bytes: Capacity; 0 if the tier has none of its own.
        hits: Number of blocks that the level has delivered since its start.
        problem: Reason why the tier is not available; empty if it is.
    """

    name: str
    used_bytes: int
    capacity_bytes: int
    num_blocks: int
    hits: int
    evictions: int
    problem: str = ""


class StorePanel(msgspec.Struct, frozen=True):
    """The KV cache store.

    Attributes:
        hits, misses: Numbers of blocks that were, and were not, in memory or a tier when a
            request asked for them, since the store's start. Hand-overs do not count: each
            finds all its blocks.
    """

    hits: int
    misses: int
    num_leases: int
    lent_bytes: int
    levels: list[StoreLevel]


class PageSnapshot(msgspec.Struct, frozen=True):
    """State of a server at one moment, without decisions, which are sent when they change.

    Attributes:
        at_s: Time in seconds since 1970.
        num_layers, num_kv_heads: Numbers of the model's layers and KV heads; 0 if not known.
        store: State of the store; None without a store, or if it does not answer.
        requests: Last requests, the oldest first.
    """

    at_s: float
    num_layers: int
    num_kv_heads: int
    controller: ControllerStatus
    instances: list[InstancePanel]
    moves: list[MoveProgress]
    figures: Figures
    store: StorePanel | None = None
    requests: list[RequestSummary] = []
    routing: str = ""
    version: int = PAGE_VERSION


class PageCode(msgspec.Struct, frozen=True):
    """A code that opens the page once.

    Attributes:
        valid_s: Time for which the code is valid, in seconds.
    """

    code: str
    valid_s: float


class PageToken(msgspec.Struct, frozen=True):
    """Token that a browser tab keeps instead of the admin key."""

    token: str


def page_link(url: str, code: str) -> str:
    """Return the address that opens the page of the server at ``url`` with a code.

    A browser does not send the fragment, so the code is in no log of a server or a proxy.
    """
    return f"{url}/ui/#code={code}"


class PageInfo(msgspec.Struct, frozen=True):
    """Purpose of the page, which its script reads first.

    Attributes:
        mode: ``live``, or ``replay`` of a decision log.
        time: Description of modelled time; empty in real time.
        title: Name of the model or the file.
    """

    mode: str
    title: str
    time: str = ""
    version: int = PAGE_VERSION
