"""State of a server as its page shows it: values that go to browsers as JSON."""

from __future__ import annotations

import msgspec

from banaserve.controller.schemas import ControllerStatus, InstanceStatus
from banaserve.engine.vllm.tracing.events import RequestSummary

PAGE_VERSION = 1
"""Of what the page's script reads; a page that stays open while the server is replaced sees it."""


class ShownLayers(msgspec.Struct, frozen=True):
    """Layers ``first_layer`` to ``end_layer``, without ``end_layer``.

    Attributes:
        heads: KV heads of each of them; empty for whole layers.
    """

    first_layer: int
    end_layer: int
    heads: list[int] = []


class ModulesAway(msgspec.Struct, frozen=True):
    """Modules of an instance that run beside another one.

    Attributes:
        kind: layers, heads, or context for older KV blocks.
        at: The instance beside which they run.
    """

    kind: str
    at: str
    words: str
    spans: list[ShownLayers]


class InstancePanel(msgspec.Struct, frozen=True):
    """One instance and where its modules are; what is not away is at home."""

    status: InstanceStatus
    away: list[ModulesAway] = []


class MoveProgress(msgspec.Struct, frozen=True):
    """A move under way, or one of the last that ended.

    Attributes:
        kind: layers, heads, context, return, or other for what moves no modules.
        source: The instance whose modules move; empty where none do.
        target: The instance beside which they will run; empty for home.
        phase: Of the unit that is on its way.
        num_bytes: KV and weights that have travelled so far.
        total_bytes: KV and weights that have to travel, more as blocks are written meanwhile; 0
            before copies have begun.
        predicted_bytes: The most that may have to travel; 0 where that is not known.
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
    """Figures of the whole server at one moment; None is not known.

    Attributes:
        ttft_p50_s, ttft_p99_s: Time to first token, of requests whose first token came lately.
        tpot_p50_s, tpot_p99_s: Time per output token, of requests that have decoded lately.
        tokens_per_s: Output tokens.
        kv_mean_fraction, kv_max_fraction: KV blocks in use, over instances.
        compute_mean_fraction: Load of compute, over instances.
        gpu_fraction: Share of time with a kernel running, over GPUs.
        cpu_fraction: Share of the machine's processors in use.
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
        capacity_bytes: 0 where it has none of its own.
        hits: Blocks that it gave since it started.
        problem: Why it takes and gives nothing; empty where it does.
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
        hits, misses: Blocks asked for that were in memory, and that were not, since it started.
    """

    hits: int
    misses: int
    num_leases: int
    lent_bytes: int
    levels: list[StoreLevel]


class PageSnapshot(msgspec.Struct, frozen=True):
    """Everything of one moment but decisions, which are sent when they change.

    Attributes:
        at_s: Seconds since 1970.
        num_layers, num_kv_heads: Of the model; 0 where they are not known.
        store: None where there is none, or it does not answer.
        requests: The last ones, the oldest first.
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
        valid_s: Seconds in which it does.
    """

    code: str
    valid_s: float


class PageToken(msgspec.Struct, frozen=True):
    """What a tab keeps instead of the admin key."""

    token: str


def page_link(url: str, code: str) -> str:
    """Return the address that opens the page of the server at ``url`` with a code.

    A fragment is not sent, so the code is in no log of a server or a proxy.
    """
    return f"{url}/ui/#code={code}"


class PageInfo(msgspec.Struct, frozen=True):
    """What the page is for, asked for before anything else.

    Attributes:
        mode: ``live``, or ``replay`` of a decision log.
        time: How time passes, in words; empty where it is real.
        title: The model or the file.
    """

    mode: str
    title: str
    time: str = ""
    version: int = PAGE_VERSION
