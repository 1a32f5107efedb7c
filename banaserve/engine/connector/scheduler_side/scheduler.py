"""Scheduler side of the connector: which blocks to fetch, which to save, and the leases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from banaserve.base.clock import Clock
from banaserve.engine.compat.kv_cache import KVCacheBlocks
from banaserve.engine.compat.scheduler import Request, SchedulerOutput
from banaserve.engine.connector.block_hash import TailHasher
from banaserve.engine.connector.cache_groups import CacheGroups, state_keys
from banaserve.engine.connector.metadata import BlockCopy, ConnectorCounters, StepPlan, StepResult
from banaserve.engine.connector.scheduler_side.prefix_matcher import EngineCostGate, PrefixMatcher
from banaserve.engine.connector.scheduler_side.request_notes import ConnectorNotes
from banaserve.engine.connector.scheduler_side.request_state import (
    RequestState,
    SaveCandidate,
    full_block_offers,
)
from banaserve.engine.connector.scheduler_side.step_ahead import StepAhead
from banaserve.engine.continuation import output_of
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.client.cost_gate import CostGate
from banaserve.kvstore.leases import Lease
from banaserve.kvstore.wire import MAX_KEYS
from banaserve.orchestrator.control.model.learnt_time import StepWork


class StoreConnectorScheduler:
    """Connector side of one engine's scheduler.

    Called from the scheduler's thread only. Never waits for a tier.

    Args:
        clock: Clock that bounds the waits for promoted blocks and for room.

    Attributes:
        notes: Events of the engine's last requests, for ``banaserve trace``.
    """

    def __init__(
        self,
        client: StoreClient,
        tails: TailHasher,
        block_size: int,
        gate: CostGate,
        clock: Clock,
        step_tokens: int,
        groups: CacheGroups = CacheGroups(),  # noqa: B008 - it is frozen
    ) -> None:
        self._client = client
        self._block_size = block_size
        self._tails = tails
        self._groups = groups
        self._tracked: dict[str, RequestState] = {}
        self._loads: list[tuple[RequestState, list[int], int]] = []
        self._leases_by_step: dict[int, list[Lease]] = {}
        self._holds_by_step: dict[int, list[tuple[int, int, str]]] = {}
        self._step = 0
        self._last_done = 0
        self.stats = ConnectorCounters()
        self._gate = EngineCostGate(gate, block_size, self.stats)
        self.notes = ConnectorNotes(clock)
        self.ahead = StepAhead(self._tracked, step_tokens)
        self._matcher = PrefixMatcher(
            client,
            tails,
            block_size,
            len(groups.states),
            self._gate,
            self.ahead,
            clock,
            self.stats,
            self.notes,
        )

    # ---- before a request is scheduled

    def match(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return the tokens to fetch beyond ``num_computed_tokens``; None to be asked again."""
        return self._matcher.match(self._track(request), num_computed_tokens)

    def _track(self, request: Request) -> RequestState:
        request_id = request.request_id
        if (tracked := self._tracked.get(request_id)) is None:
            tracked = self._tracked[request_id] = RequestState.of(request)
            if self._groups.states:
                self._tails.rehash(request)  # vLLM's hashes cover as many tokens as a state does
            handover = tracked.handover
            self.notes.received(
                request_id, request.num_tokens, handover.leaves_tail, handover.tokens
            )
        return tracked

    # ---- when it is scheduled

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the fetch of a request that the scheduler has given its blocks."""
        tracked = self._track(request)
        self._matcher.scheduled(tracked)
        if not self._groups.states:
            self._push(tracked, self._matcher.prompt_keys(request))
        self._keep(tracked)
        first = tracked.first_hit
        has_tokens = first * self._block_size + num_external_tokens
        fetched_blocks = len(tracked.hits) if num_external_tokens else 0
        self.ahead.admit(has_tokens, request.num_tokens, fetched_blocks)
        if num_external_tokens == 0:
            self._matcher.release_hits(tracked)
            if tracked.hold_to_end:
                self._client.end_hold(*self._read_of(tracked))
            return
        end = first + len(tracked.hits) - len(self._groups.states)
        block_ids = self._groups.with_states(blocks.get_block_ids(), first, end)
        self._loads.append((tracked, block_ids, has_tokens))

    def _keep(self, tracked: RequestState) -> None:
        """Ask the store to keep the request's blocks so far, if the request asks for it.

        Once before they are computed, and once more when it ends, with the blocks of its answer:
        the time begins again then.
        """
        if keep_s := tracked.handover.keep_s:
            hashes, num_states = tracked.request.block_hashes, len(self._groups.states)
            keys = [*hashes, *(key for one in hashes for key in state_keys(one, num_states))]
            self._client.keep(keys[:MAX_KEYS], keep_s)

    @staticmethod
    def _read_of(tracked: RequestState) -> tuple[int, int, str]:
        """Return the arguments that end the hold of a decode leg that has read the blocks."""
        handover = tracked.handover
        return handover.hold, handover.reader, handover.pushed_from

    def _push(self, tracked: RequestState, keys: Sequence[bytes]) -> None:
        """Announce a prompt that is about to be computed to the store of its decode leg.

        Not earlier than scheduling: a request that is matched and not scheduled gives its slots
        back, perhaps many times.
        """
        handover = tracked.handover
        if handover.push_to and not tracked.request.num_output_tokens:
            terms = (tracked.tenant, handover.hold, handover.num_readers)
            self._client.push(handover.push_to, keys, *terms)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Plan the copies of this step."""
        self._step += 1
        self._count(output)
        batch = scheduled(output)
        self.notes.planned(self._step, batch)
        self.ahead.planned(batch)
        plan = StepPlan(step=self._step, settled=self._last_done)
        self._plan_loads(plan)
        self._claim_decoded(output)
        self._plan_saves(plan, output, batch)
        if self._groups.states:
            self._plan_states(plan, output, batch)
        self._matcher.end_step()
        computes = [(before, num) for _, before, num in batch]
        plan.work = work_of(computes)
        self._gate.planned(plan.step, computes, len(plan.loads) + len(plan.early_loads))
        return plan

    def _plan_loads(self, plan: StepPlan) -> None:
        leases, holds = [], []
        for tracked, block_ids, first_computed_token in self._loads:
            copies = [
                BlockCopy(block_id, slot)
                for block_id, slot in zip(block_ids, tracked.hits, strict=False)
            ]
            num_settled = first_computed_token // self._block_size - tracked.first_hit
            plan.loads += copies[:num_settled]
            plan.early_loads += copies[num_settled:]
            self.notes.copies(plan.step, tracked.request.request_id, fetched=len(copies))
            if tracked.lease is not None:
                leases.append(tracked.lease)
            if tracked.hold_to_end:
                holds.append(self._read_of(tracked))
            tracked.lease, tracked.hits = None, []
        self._loads.clear()
        if leases:
            self._leases_by_step[plan.step] = leases
        if holds:
            self._holds_by_step[plan.step] = holds

    def _claim_decoded(self, output: SchedulerOutput) -> None:
        """Reserve slots for full blocks whose hash became known after the match, in decode."""
        claims: dict[bytes, list[tuple[RequestState, SaveCandidate]]] = defaultdict(list)
        for request_id in output.scheduled_cached_reqs.req_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.num_claimed >= len(tracked.request.block_hashes):
                continue
            hashes = tracked.request.block_hashes
            offers = full_block_offers(hashes, tracked.num_claimed, self._block_size)
            claims[tracked.tenant] += [(tracked, offer) for offer in offers]
            tracked.num_claimed = len(hashes)
        for tenant, claimed in claims.items():
            pairs = [(offer.key, offer.parent) for _, offer in claimed]
            reserved = self._client.exchange(reserve=pairs, tenant=tenant).reserved
            for (tracked, offer), slot in zip(claimed, reserved, strict=False):
                tracked.keep([offer], [slot])

    def _plan_saves(
        self, plan: StepPlan, output: SchedulerOutput, batch: Sequence[tuple[str, int, int]]
    ) -> None:
        state = output.kv_connector_block_state
        assert state is not None
        for request_id, num_before, num_scheduled in batch:
            tracked = self._tracked.get(request_id)
            ready = tracked.take_ready(num_before + num_scheduled) if tracked else []
            if ready:
                block_ids = state.get_block_ids(request_id)
                assert block_ids is not None
                blocks = block_ids[self._groups.attention]
                plan.saves += [BlockCopy(blocks[save.index], save.slot) for save in ready]
                if tracked is not None and tracked.handover.push_to:
                    plan.pushed += [save.slot for save in ready]
                self.notes.copies(plan.step, request_id, saved=len(ready))

    def _plan_states(
        self, plan: StepPlan, output: SchedulerOutput, batch: Sequence[tuple[str, int, int]]
    ) -> None:
        """Plan to save the states of requests that end this step at the end of a block or prompt.

        A prompt's end counts only if the prompt is handed over. The next step changes the states.
        """
        state = output.kv_connector_block_state
        assert state is not None
        for request_id, num_before, num_scheduled in batch:
            tracked = self._tracked.get(request_id)
            end = num_before + num_scheduled
            if tracked is None or not self._is_kept(tracked, end):
                continue
            request = tracked.request
            prefix = self._tails.prefix(request, end)
            if prefix is None:
                continue
            keys = state_keys(prefix, len(self._groups.states))
            reserved = self._client.exchange(
                reserve=[(key, prefix) for key in keys],
                tenant=tracked.tenant,
                hold=tracked.own_hold,
                num_readers=tracked.handover.num_readers,
            ).reserved
            block_ids = state.get_block_ids(request_id)
            assert block_ids is not None
            copies = [
                BlockCopy(block_id, slot)
                for block_id, slot in zip(self._groups.states_of(block_ids), reserved, strict=False)
                if slot is not None
            ]
            plan.states += copies
            self.notes.copies(plan.step, request_id, saved=len(copies))
            if end == request.num_prompt_tokens:
                self._push(tracked, [*self._matcher.prompt_keys(request), *keys])

    def _is_kept(self, tracked: RequestState, end: int) -> bool:
        """Return whether the states after the first ``end`` tokens of a request are saved."""
        is_handed_over = tracked.handover.leaves_tail and end == tracked.request.num_prompt_tokens
        return is_handed_over or end % self._block_size == 0

    def _count(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if (tracked := self._tracked.get(new.req_id)) is None:
                continue  # it shares no block
            num_prompt = tracked.request.num_prompt_tokens
            computed = max(0, num_prompt - new.num_computed_tokens)
            self.stats.add(
                scheduled_requests=1,
                prompt_tokens_computed=computed,
                prompt_tokens_cached=num_prompt - computed,
            )

    # ---- afterwards

    def step_done(self, done: StepResult) -> None:
        """Release the leases of all steps up to this one, whose copies have ended.

        Also end the holds of prompts that were handed over and have now been read.
        """
        self._gate.done(done)
        self.notes.step_done(done)
        self._last_done = max(self._last_done, done.step)
        for step in [planned for planned in self._leases_by_step if planned <= done.step]:
            for lease in self._leases_by_step.pop(step):
                self._client.release(lease)
        for step in [planned for planned in self._holds_by_step if planned <= done.step]:
            for read in self._holds_by_step.pop(step):
                self._client.end_hold(*read)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended for any reason, and give back its lease and slots."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            request = tracked.request
            num_own = request.num_output_tokens - len(output_of(request.sampling_params))
            self.notes.finished(request_id, num_own)
            if request.num_output_tokens:
                tracked.has_hold = False  # the decode leg ends the hold once it has read the blocks
                self._keep(tracked)
            self._matcher.let_go(tracked)
            self._loads = [load for load in self._loads if load[0] is not tracked]


def work_of(computes: Sequence[tuple[int, int]]) -> StepWork | None:
    """Return the work of a step; None if it computes nothing. A single token counts as decode.

    Args:
        computes: Tokens computed before the step and in it, for each request.
    """
    if not computes:
        return None
    chunks = [(before, num) for before, num in computes if num > 1]
    singles = [before for before, num in computes if num == 1]
    return StepWork(
        prefill_tokens=sum(num for _, num in chunks),
        prefill_pairs=sum(num * (num + 2 * before) for before, num in chunks),
        decode_requests=len(singles),
        context_tokens=sum(singles),
    )


def scheduled(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """Return, for each scheduled request, its id and the tokens computed before and in the step."""
    cached = output.scheduled_cached_reqs
    before = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(rid, computed, output.num_scheduled_tokens[rid]) for rid, computed in before]
