"""The scheduler's side of the connector: which blocks to fetch, which to save, and the leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput

from banaserve.engine.vllm import compat
from banaserve.engine.vllm.handover import Handover
from banaserve.engine.vllm.keys import TailHasher, chain
from banaserve.engine.vllm.transfer_plan import BlockCopy, Counters, StepPlan
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.interface import Lease, Slot


@dataclass(frozen=True, slots=True)
class _Save:
    """A reserved slot: block ``index`` goes there once ``end_tokens`` have been computed."""

    index: int
    end_tokens: int
    slot: Slot


@dataclass
class _Tracked:
    """What the connector remembers of one request from its first match to its end.

    Attributes:
        lease: Holds the fetched blocks in the store until they have been copied.
        hits: Slots of the fetched blocks, from block ``first_hit`` on.
        num_claimed: Full blocks below this index have been offered to the store.
    """

    request: compat.Request
    lease: Lease | None = None
    first_hit: int = 0
    hits: list[Slot] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)
    num_claimed: int = 0


class SchedulerSide:
    """One per engine; called from the scheduler's thread only."""

    def __init__(self, client: StoreClient, tails: TailHasher, block_size: int) -> None:
        self._client = client
        self._tails = tails
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._matched: set[str] = set()
        self._loads: list[tuple[_Tracked, list[int], int]] = []
        self._leases_by_step: dict[int, list[Lease]] = {}
        self._step = 0
        self.stats = Counters()

    # ---- before a request is scheduled

    def match(self, request: compat.Request, num_computed_tokens: int) -> int:
        """Tokens beyond ``num_computed_tokens`` that the store holds; leases their blocks."""
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        self._let_go(tracked)
        self._matched.add(request.request_id)
        handover = Handover.of(request.kv_transfer_params)
        covered = self._tokens_to_look_up(request, handover)
        keys = list(request.block_hashes[: covered // self._block_size])
        tail = self._tails.key(request, covered)
        first = num_computed_tokens // self._block_size
        wanted = [] if request.skip_reading_prefix_cache else [*keys, *([tail] if tail else [])]
        offered = self._offer(tracked, first, tail, handover)
        answer = self._client.exchange(
            acquire=wanted[first:], reserve=[(key, parent) for _, _, key, parent in offered]
        )
        self._keep_reserved(tracked, offered, answer.reserved)
        tracked.lease, tracked.hits, tracked.first_hit = answer.lease, list(answer.slots), first
        num_hit = first + len(answer.slots) if answer.slots else 0
        tokens = covered if num_hit > len(keys) else num_hit * self._block_size
        return max(0, min(tokens, request.num_tokens - 1) - num_computed_tokens)

    @staticmethod
    def _tokens_to_look_up(request: compat.Request, handover: Handover) -> int:
        """A decode leg knows how far the prefill leg has got; others look up all they have."""
        if handover.tokens is None or request.num_output_tokens:
            return request.num_tokens
        return min(handover.tokens, request.num_tokens)

    def _offer(
        self, tracked: _Tracked, first: int, tail: bytes | None, handover: Handover
    ) -> list[tuple[int, int, bytes, bytes | None]]:
        """Blocks to save if the store lacks them: (index, end_tokens, key, parent).

        A prefill leg offers the blocks of its local prefix cache too, because the decode leg
        can only read the store; others offer what they are about to compute.
        """
        hashes = tracked.request.block_hashes
        start = 0 if handover.leaves_tail else first
        tracked.num_claimed = len(hashes)
        offered = [
            (i, (i + 1) * self._block_size, key, parent)
            for i, (key, parent) in enumerate(chain(hashes))
        ][start:]
        if handover.leaves_tail and tail is not None:
            num_tokens = tracked.request.num_tokens
            offered.append((len(hashes), num_tokens, tail, hashes[-1] if hashes else None))
        return offered

    @staticmethod
    def _keep_reserved(
        tracked: _Tracked,
        offered: list[tuple[int, int, bytes, bytes | None]],
        reserved: Sequence[Slot | None],
    ) -> None:
        for (index, end_tokens, _, _), slot in zip(offered, reserved, strict=False):
            if slot is not None:
                tracked.saves.append(_Save(index, end_tokens, slot))

    def _let_go(self, tracked: _Tracked) -> None:
        """Give back what an earlier match holds: the request was not scheduled after all."""
        self._release_hits(tracked)
        if tracked.saves:
            self._client.abandon([save.slot for save in tracked.saves])
            tracked.saves = []

    def _release_hits(self, tracked: _Tracked) -> None:
        if tracked.lease is not None:
            self._client.release(tracked.lease)
        tracked.lease, tracked.hits = None, []

    # ---- when it is scheduled

    def allocated(
        self, request: compat.Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The scheduler has given the request its blocks: plan the fetch."""
        self._matched.discard(request.request_id)
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        if num_external_tokens == 0:
            self._release_hits(tracked)
            return
        first = tracked.first_hit
        block_ids = blocks.get_block_ids()[0][first:]
        self._loads.append((tracked, block_ids, first * self._block_size + num_external_tokens))

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The copies of this step."""
        self._step += 1
        self._count(output)
        plan = StepPlan(step=self._step)
        self._plan_loads(plan)
        self._claim_decoded(output)
        self._plan_saves(plan, output)
        self._drop_unscheduled()
        return plan

    def _plan_loads(self, plan: StepPlan) -> None:
        leases = []
        for tracked, block_ids, first_computed_token in self._loads:
            copies = [
                BlockCopy(block_id, slot)
                for block_id, slot in zip(block_ids, tracked.hits, strict=False)
            ]
            num_settled = first_computed_token // self._block_size - tracked.first_hit
            plan.loads += copies[:num_settled]
            plan.early_loads += copies[num_settled:]
            if tracked.lease is not None:
                leases.append(tracked.lease)
            tracked.lease, tracked.hits = None, []
        self._loads.clear()
        if leases:
            self._leases_by_step[plan.step] = leases

    def _claim_decoded(self, output: SchedulerOutput) -> None:
        """Reserve slots for full blocks whose hash has become known since: those of decode."""
        owners: list[tuple[_Tracked, int]] = []
        wanted: list[tuple[bytes, bytes | None]] = []
        for request_id in output.scheduled_cached_reqs.req_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.num_claimed >= len(tracked.request.block_hashes):
                continue
            hashes = tracked.request.block_hashes
            owners += [(tracked, i) for i in range(tracked.num_claimed, len(hashes))]
            wanted += chain(hashes)[tracked.num_claimed :]
            tracked.num_claimed = len(hashes)
        if not wanted:
            return
        reserved = self._client.exchange(reserve=wanted).reserved
        for (tracked, index), slot in zip(owners, reserved, strict=False):
            if slot is not None:
                tracked.saves.append(_Save(index, (index + 1) * self._block_size, slot))

    def _plan_saves(self, plan: StepPlan, output: SchedulerOutput) -> None:
        state = output.kv_connector_block_state
        assert state is not None
        for request_id, num_computed in _computed_after(output):
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.saves:
                continue
            ready = [save for save in tracked.saves if save.end_tokens <= num_computed]
            if not ready:
                continue
            tracked.saves = [save for save in tracked.saves if save.end_tokens > num_computed]
            block_ids = state.get_block_ids(request_id)
            assert block_ids is not None
            plan.saves += [BlockCopy(block_ids[0][save.index], save.slot) for save in ready]

    def _count(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            num_prompt = self._tracked[new.req_id].request.num_prompt_tokens
            computed = max(0, num_prompt - new.num_computed_tokens)
            self.stats.add(
                scheduled_requests=1,
                prompt_tokens_computed=computed,
                prompt_tokens_cached=num_prompt - computed,
            )

    def _drop_unscheduled(self) -> None:
        """A request that was matched but not scheduled holds nothing until it is tried again."""
        for request_id in self._matched:
            if tracked := self._tracked.get(request_id):
                self._let_go(tracked)
        self._matched.clear()

    # ---- afterwards

    def step_done(self, step: int) -> None:
        """All copies up to ``step`` have ended: their leases go back."""
        for done in [planned for planned in self._leases_by_step if planned <= step]:
            for lease in self._leases_by_step.pop(done):
                self._client.release(lease)

    def finished(self, request_id: str) -> None:
        """The request has ended, however it did: nothing of it stays reserved."""
        self._matched.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._let_go(tracked)
            self._loads = [load for load in self._loads if load[0] is not tracked]


def _computed_after(output: SchedulerOutput) -> list[tuple[str, int]]:
    """Tokens of each scheduled request whose KV exists when the step has run."""
    cached = output.scheduled_cached_reqs
    before = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(rid, computed + output.num_scheduled_tokens[rid]) for rid, computed in before]
