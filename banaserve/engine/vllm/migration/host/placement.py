"""Which units are where, and the proxies in the model that make it so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.migration import checks
from banaserve.engine.vllm.migration.host.units import Unit, UnitLocation
from banaserve.engine.vllm.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.engine.vllm.migration.kv.host_kv import HostKv, KvRun
from banaserve.engine.vllm.migration.kv.remote_kv import RemoteKv
from banaserve.engine.vllm.migration.kv.step_context import StepContext
from banaserve.engine.vllm.migration.microbatch.overlap import Overlap
from banaserve.engine.vllm.migration.modules.context_split import ContextAttention, RemoteContext
from banaserve.engine.vllm.migration.modules.head_split import RemoteHeads, SplitAttention
from banaserve.engine.vllm.migration.modules.layer_proxy import RemoteRange
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.engine.vllm.migration.types import HeadSet, LayerRange
from banaserve.errors import GuestLostError


class PlacementManager:
    """Owner of the model's proxies; changed between two steps, or when a guest is lost in one.

    Args:
        layers: The model's list.
        attentions: By name, in layer order.
        on_lost: Called with the guest that is lost in the middle of a step.
        max_microbatches: That a step is cut into; 1: guests are waited for.

    Attributes:
        overlap: Cuts steps, as things lie.
    """

    def __init__(
        self,
        config: VllmConfig,
        layers: nn.ModuleList,
        attentions: Mapping[str, Any],
        host: HostKv,
        watch: StepContext,
        on_lost: Callable[[GuestClient, GuestLostError], None],
        max_microbatches: int,
    ) -> None:
        self.overlap = Overlap(layers, watch, checks.overlap_blocker(config), max_microbatches)
        self._config = config
        self._layers = layers
        self._attentions = attentions
        self._host = host
        self._watch = watch
        self._on_lost = on_lost
        self._units: dict[str, Unit] = {}
        self._ranges: dict[str, RemoteRange] = {}
        self._splits: dict[str, SplitAttention] = {}
        self._contexts: dict[str, ContextAttention] = {}
        self._runs: dict[str, list[tuple[KvRun, RemoteKv | None]]] = {}

    def __iter__(self) -> Iterator[Unit]:
        return iter(list(self._units.values()))

    def at(self, link: GuestClient) -> list[Unit]:
        """The units that run in a guest."""
        return [u for u in self if u.residence is not None and u.residence.link is link]

    def put(self, unit: Unit, residence: UnitLocation | None) -> None:
        """Let a unit run in ``residence``, or at home."""
        self.overlap.step_aside()
        unit.residence = residence
        if residence is None:
            self._units.pop(unit.unit_id, None)
        else:
            self._units[unit.unit_id] = unit
        if isinstance(unit.modules, LayerRange):
            self._put_layers(unit, unit.modules, residence)
        elif unit.away is not None:
            self._put_context(unit, unit.away, residence)
        else:
            for name in unit.names:
                self._arrange_heads(name)
        self._runs = {name: self._find_runs(name) for name in self._attentions}
        self.overlap.step_in(self._why_wait())

    def set_overlap(self, max_microbatches: int) -> None:
        """Cut steps into at most so many parts from here on; between two steps only.

        Raises:
            MigrationError: Out of range, or steps of this engine cannot be cut.
        """
        self.overlap.allow(max_microbatches)
        self.overlap.step_aside()
        self.overlap.step_in(self._why_wait())

    def _why_wait(self) -> str:
        """Why steps in parts cannot be right as things lie; empty where they can."""
        guests: dict[GuestClient, bool] = {}
        for unit in self:
            assert unit.residence is not None
            link = unit.residence.link
            if self._config.kv_transfer_config is not None and unit.residence.has_landed:
                return "a guest that computes a part cannot take what the store loads for the next"
            if not isinstance(unit.modules, LayerRange | HeadSet):
                return "older blocks of some layers are elsewhere"
            if guests.setdefault(link, unit.is_layers) != unit.is_layers:
                return f"guest {link.guest_id} has layers and heads, whose answers would mix"
        return ""

    def _put_layers(self, unit: Unit, modules: LayerRange, residence: UnitLocation | None) -> None:
        if residence is None:
            self._ranges.pop(unit.unit_id).swap_in()
            return

        def lost(error: GuestLostError) -> None:
            self._on_lost(residence.link, error)

        where = residence.layers(self._watch)
        if unit.unit_id in self._ranges:
            self._ranges[unit.unit_id].redirect(where, lost)
            return
        span = RemoteRange(self._layers, modules.start, modules.end, unit.names, where, lost)
        self._ranges[unit.unit_id] = span
        span.swap_out()

    def _put_context(self, unit: Unit, away: RemoteBlocks, residence: UnitLocation | None) -> None:
        assert unit.pages is not None
        self._watch.written.unfollow(away)
        remote: RemoteContext | None = None
        if residence is None:
            away.set(())
        else:
            self._watch.written.follow(away)
            remote = residence.context_of(away, self._watch)
        for name in unit.names:
            if name not in self._contexts:
                self._contexts[name] = ContextAttention(
                    self._attentions[name], name, self._watch, self._on_lost, unit.pages
                )
            self._contexts[name].arrange(remote)

    def _arrange_heads(self, name: str) -> None:
        remote: dict[Sequence[int], RemoteHeads] = {}
        for unit in self:
            heads = unit.heads(name) if name in unit.names else None
            if heads is not None and unit.residence is not None:
                remote[heads] = unit.residence.heads_of(name, self._watch)
        if name not in self._splits:
            self._splits[name] = SplitAttention(
                self._config, self._attentions[name], name, self._watch, self._on_lost
            )
        self._splits[name].arrange(remote)

    # ---- where a block lies

    def where_is(self, name: str) -> Sequence[tuple[KvRun, RemoteKv | None]]:
        """The runs of an attention's page, each with the guest's KV; None: here.

        What ``older_blocks`` says of single blocks comes before it.
        """
        return self._runs.get(name) or [(KvRun(0, self._host.page_bytes), None)]

    def _find_runs(self, name: str) -> list[tuple[KvRun, RemoteKv | None]]:
        found: list[tuple[KvRun, RemoteKv | None]] = []
        away: set[int] = set()
        for unit in self:
            if name not in unit.names or unit.residence is None or unit.away is not None:
                continue
            heads = unit.heads(name)
            found += [(run, unit.residence.kv) for run in self._host.runs(heads)]
            away.update(range(self._host.num_heads) if heads is None else heads)
        here = [head for head in range(self._host.num_heads) if head not in away]
        return found + [(run, None) for run in self._host.runs(here)]

    def older_blocks(self, name: str) -> tuple[RemoteBlocks, RemoteKv] | None:
        """Which blocks of an attention are in a guest, and where; None: of all alike."""
        for unit in self:
            if unit.away is not None and unit.residence is not None and name in unit.names:
                return unit.away, unit.residence.kv
        return None

    def away_pages(self) -> float:
        """Whole layers' KV that lies elsewhere."""
        return sum(unit.num_pages(self._host.num_heads) for unit in self)

    @property
    def num_layers(self) -> int:
        return len(self._attentions)
