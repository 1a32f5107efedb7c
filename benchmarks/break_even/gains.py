"""Gains of moved modules, a role switch and a step size by the cost model, in closed form.

One instance decodes ``batch`` requests of ``context`` tokens; another instance is idle for a share
of its time. The compared quantity is the growth of the first instance's tokens a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from banaserve.base.types import InstanceId, Module
from banaserve.orchestrator.control.costs import modules as costs
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.planner.candidates.modules import has_room, net_relief, step_time_s
from banaserve.orchestrator.planner.candidates.planning import Ledger

PROFILES = ("opt-13b-a100", "llama-3.1-8b-h100", "llama-3.1-70b-h100-tp4")

LINKS_BYTES_PER_S = (12.5e9, 25e9, 50e9, 200e9, 450e9)
"""RDMA of 100 Gbit/s; PCIe 4 or 200 Gbit/s; RDMA of 400 Gbit/s; four such cards; NVLink 4."""

IDLE_FRACTION = 0.5
CHUNK = 512
"""Smallest step size considered, in tokens."""

MAX_REQUESTS = 256
"""Maximum number of requests in a batch that engines run at once."""

_BATCHES = (8, 64, 256)
_CONTEXTS = (500, 2000, 8000, 32_000)
_HOST, _GUEST = InstanceId("host"), InstanceId("guest")
_SHARES = (1 / 8, 1 / 4, 1 / 2)
PROMPT_SHARE = 1 / 4
_WORN = 0.25
"""Mean of min(x, 1 - x) while the share x of a sequence in older blocks falls from 1 to 0."""


class Point(NamedTuple):
    """A batch of decoding requests and their context tokens."""

    batch: int
    context: int

    @property
    def work(self) -> StepWork:
        return StepWork(0, 0, self.batch, self.batch * self.context)

    def __str__(self) -> str:
        return f"{self.batch} of {self.context:,}"


class ModuleGain(NamedTuple):
    """Gain from moving one kind of module.

    Attributes:
        kind: ``layers``, ``heads`` or ``older blocks``.
        share: Share of the layers or heads that leave.
        speed: Gain in tokens a second with the same batch; below 0 it is a loss.
        room: Gain if requests wait for KV memory, so that the batch grows with the freed memory.
    """

    kind: str
    share: float
    speed: float
    room: float


def points(profile: Profile) -> Iterator[Point]:
    """Yield the batches that fit into the memory and the context of ``profile``."""
    for batch in _BATCHES:
        for context in _CONTEXTS:
            fits = batch * context <= profile.memory.kv_tokens
            if fits and context <= profile.model.max_context_tokens:
                yield Point(batch, context)


def full_point(profile: Profile, context: int) -> Point | None:
    """Return the batch that fills the memory; None if the batch or its context is too large."""
    batch = profile.memory.kv_tokens // context
    if not 0 < batch <= MAX_REQUESTS or context > profile.model.max_context_tokens:
        return None
    return Point(batch, context)


def with_link(profile: Profile, bytes_per_s: float) -> Profile:
    """Return ``profile`` with another bandwidth between its instances."""
    return replace(profile, link=replace(profile.link, bytes_per_s=bytes_per_s))


def best_gain(profile: Profile, kind: str, point: Point) -> ModuleGain:
    """Return the largest gain over the shares of layers or heads."""
    return max(_gains(profile, kind, point), key=lambda one: (one.room, one.speed))


def _gains(profile: Profile, kind: str, point: Point) -> list[ModuleGain]:
    """Return the gain of each share for which a guest has memory, as policies see it."""
    found = [_gain(profile, kind, share, point) for share in _SHARES]
    return [one for one in found if one is not None]


def _module(profile: Profile, kind: str, share: float) -> Module:
    """Return a module of ``share`` of the layers or heads."""
    facts = profile.facts
    heads = kind == "heads"
    size = max(1, int(slabs.num_movable(facts, heads) * share))
    module = slabs.free(facts, (), size, heads)
    assert module is not None
    return module


def _gain(profile: Profile, kind: str, share: float, point: Point) -> ModuleGain | None:
    facts, module = profile.facts, _module(profile, kind, share)
    ledger = Ledger(facts, ())
    before = ledger.blocks(_HOST)
    ledger.put(_HOST, _GUEST, module)
    if not has_room(ledger, _GUEST, 0.0):
        return None
    room = ledger.blocks(_HOST) / before
    return ModuleGain(
        kind,
        share,
        _speed(profile, module, point, 1.0),
        _speed(profile, module, point, room),
    )


def _speed(profile: Profile, module: Module, point: Point, room: float) -> float:
    """Return the gain in tokens a second of a larger batch; -inf if a guest lacks the time."""
    grown = Point(min(MAX_REQUESTS, int(point.batch * room)), point.context)
    work = slabs.compute_share(profile.facts, module, costs.attention_fraction(profile, grown.work))
    if work > IDLE_FRACTION + 1e-9:
        return float("-inf")
    step_s = step_time_s(profile, grown.work) * (1 - net_relief(profile, module, grown.work))
    before = point.batch / step_time_s(profile, point.work)
    return grown.batch / step_s / before - 1


def older_gain(profile: Profile, point: Point) -> ModuleGain:
    """Return the gain of all older blocks, as a mean until the present requests have ended.

    In each layer the longer part of a sequence determines the time; blocks that leave free no KV
    blocks; and the part that is away falls from all to nothing.
    """
    step_s = step_time_s(profile, point.work)
    relief = _WORN * costs.attention_fraction(profile, point.work)
    hop_s = _older_hop_s(profile, profile.model.num_layers, point.batch)
    speed = 1 / (1 - relief + hop_s / step_s) - 1
    return ModuleGain("older blocks", 1.0, speed, speed)


def gains(profile: Profile, point: Point) -> list[ModuleGain]:
    """Return the gain of each kind of module."""
    return [
        best_gain(profile, "layers", point),
        best_gain(profile, "heads", point),
        older_gain(profile, point),
    ]


def prompt_gain(profile: Profile, kind: str, tokens: int, share: float = PROMPT_SHARE) -> float:
    """Return the gain in prompt tokens a second of an instance with steps of ``tokens``.

    ``share`` of the instance's layers or heads is away.
    """
    module = _module(profile, kind, share)
    return 1 / (1 - net_relief(profile, module, StepWork(tokens, tokens**2))) - 1


def break_even_bytes_per_s(profile: Profile, kind: str, point: Point | int) -> float | None:
    """Return the bandwidth from which a kind of module gains more speed than its messages cost.

    None if there is none: the time that overlaps is shorter than the latency of the messages.

    Args:
        point: Batch that is decoded, or the prompt tokens of a step.
    """

    def is_worth_it(bytes_per_s: float) -> bool:
        linked = with_link(profile, bytes_per_s)
        if isinstance(point, int):
            return prompt_gain(linked, kind, point) > 0
        if kind == "older blocks":
            return older_gain(linked, point).speed > 0
        return max(one.speed for one in _gains(linked, kind, point)) > 0

    low, high = 1e8, 1e13
    if not is_worth_it(high):
        return None
    if is_worth_it(low):
        return low
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_worth_it(middle) else (middle, high)
    return high


class SwitchGain(NamedTuple):
    """Gain if the idle instance both prefills and decodes.

    Attributes:
        speed: Gain in tokens a second: the instance decodes while it is idle, in steps of its own
            batch.
        step_s: Decode step without prompt tokens, in seconds.
        mixed_step_s: Decode step with the smallest chunk beside the decoding requests, in seconds:
            no lower limit on time per output token can be kept.
    """

    speed: float
    step_s: float
    mixed_step_s: float


def switch_gain(profile: Profile, point: Point) -> SwitchGain:
    """Return the gain if the idle share decodes requests of its own."""
    own = point.work
    small = StepWork(CHUNK, CHUNK**2, own.decode_requests, own.context_tokens)
    return SwitchGain(IDLE_FRACTION, step_time_s(profile, own), step_time_s(profile, small))


def _older_hop_s(profile: Profile, num_layers: int, tokens: int) -> float:
    """Return the time that remote older blocks of ``num_layers`` layers add to a step, in seconds.

    In each layer, queries are sent, and outputs and their log-sum-exp return as float32.
    """
    shape, link = profile.model, profile.link
    head_bytes = shape.head_dim * shape.element_bytes + 4 * (shape.head_dim + 1)
    num_bytes = tokens * shape.num_heads * head_bytes
    return num_layers * (2 * link.hop_s + link.transfer_s(num_bytes))
