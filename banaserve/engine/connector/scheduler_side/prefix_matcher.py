"""Prefix matching of waiting requests against the store, and the gate: how much to fetch of each.

``PrefixMatcher`` asks the store about each waiting request and never blocks on a tier.
``EngineCostGate`` decides, and learns from the steps that the worker has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from banaserve.base.clock import Clock
from banaserve.contracts.trace_events import GateDecided, PromotionEnded, StoreAsked
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.connector.block_hash import TailHasher
from banaserve.engine.connector.cache_groups import block_ends, state_keys
from banaserve.engine.connector.metadata import ConnectorCounters, StepResult
from banaserve.engine.connector.scheduler_side.request_notes import ConnectorNotes
from banaserve.engine.connector.scheduler_side.request_state import (
    LONGEST_WAIT_S,
    PendingPromotion,
    PromotionOutcome,
    RequestState,
    SaveCandidate,
    full_block_offers,
)
from banaserve.engine.connector.scheduler_side.step_ahead import StepAhead
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.client.cost_gate import CostGate, FetchWork, HeldPrefix, Verdict
from banaserve.kvstore.leases import Exchanged, Lookup
from banaserve.kvstore.wire import MAX_KEYS

_KEPT_STEPS = 64
"""Number of planned steps kept until the worker answers; there are never more under way."""
ASK_AGAIN_S = 0.005
"""Time a tier gets to hear from its peers before the store is asked again, in seconds."""
ASK_FOR_ROOM_S = 0.02
"""Time a leg waits before it asks the store for room again, in seconds."""
ROOM_S = 60.0
"""Maximum time a leg waits for room in the store, in seconds.

A prefill leg is then computed without room; decode computes the blocks that it does not find.
"""
UNDECIDED_FOR_S = 0.1
"""Maximum time to ask the tiers about undecided blocks, in seconds; then they count as missing."""
WRITER_PATIENCE = 2.0
"""Maximum wait for blocks that another leg is computing, as a multiple of their own compute time.

The writer began earlier, but its step may compute more than these blocks. A leg that waits until
the limit and then computes them takes three times as long, and not longer.
"""
UNKNOWN_PATIENCE_S = 3.0
"""Maximum wait for such blocks while their cost is unknown, in seconds, as on an engine that has
just started: then the first prompts would all compute the prefix that they share."""
_WRITER_LOOKS = 16
"""Number of times the store is asked during such a wait."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """Work of a planned step, and the predicted times of its forward pass and its fetches."""

    work: FetchWork
    compute_s: float | None
    fetch_s: float | None


class EngineCostGate:
    """Cost gate of one engine, which learns from the steps that have run."""

    def __init__(self, costs: CostGate, block_size: int, stats: ConnectorCounters) -> None:
        self.costs = costs
        self._block_size = block_size
        self._stats = stats
        self._planned: dict[int, _Planned] = {}

    def block_budget_s(self, first_block: int, num_tokens: int) -> float:
        """Return the seconds to compute one block of the prompt, for the tiers; 0 if unknown."""
        num_before = first_block * self._block_size
        num_blocks = -(-(num_tokens - num_before) // self._block_size)
        if num_blocks <= 0:
            return 0.0
        return self.costs.block_budget_s(
            num_blocks, FetchWork.of(num_tokens - num_before, num_before)
        )

    def count(self, verdict: Verdict, num_found: int) -> None:
        """Count a scheduled request by its verdict on the ``num_found`` blocks in the store."""
        declined = num_found - verdict.fetched_blocks
        self._stats.add(**{f"decided_{verdict.decision.value}": 1}, declined_blocks=declined)
        if verdict.spared_s:
            self._stats.add(avoided_compute_seconds=verdict.spared_s)

    def planned(self, step: int, computes: Iterable[tuple[int, int]], num_loads: int) -> None:
        """Keep the work and the predictions of a planned step.

        Args:
            computes: Tokens computed before the step and in it, for each request.
        """
        work = FetchWork()
        for num_before, num_tokens in computes:
            work += FetchWork.of(num_tokens, num_before)
        if not work.tokens:
            return
        compute_s = self.costs.compute.predict_pass(work)
        fetch_s = self.costs.fetch.predict(num_loads) if num_loads else None
        self._planned[step] = _Planned(work, compute_s, fetch_s)
        while len(self._planned) > _KEPT_STEPS:
            del self._planned[next(iter(self._planned))]

    def done(self, done: StepResult) -> None:
        """Learn from a step that has run."""
        planned = self._planned.pop(done.step, None)
        if planned is None:
            return
        if done.compute_s is not None:
            taught = self.costs.compute.observe(planned.work, done.compute_s)
            if taught and planned.compute_s is not None:
                self._stats.add(
                    predicted_compute_seconds=planned.compute_s,
                    measured_compute_seconds=done.compute_s,
                )
        if done.fetched_blocks:
            self.costs.fetch.observe(done.fetched_blocks, done.fetch_s)
            if planned.fetch_s is not None:
                self._stats.add(
                    predicted_fetch_seconds=planned.fetch_s, measured_fetch_seconds=done.fetch_s
                )


class PrefixMatcher:
    """Matcher that asks the store about waiting requests, and never blocks on a tier.

    It asks again about a request after ``ASK_AGAIN_S`` or more while a block is undecided or
    another leg computes it, and after ``ASK_FOR_ROOM_S`` while the store has no room.

    Args:
        num_states: Number of layer groups that keep states; a prefix is fetched with all of its
            states or not at all.
    """

    def __init__(
        self,
        client: StoreClient,
        tails: TailHasher,
        block_size: int,
        num_states: int,
        gate: EngineCostGate,
        ahead: StepAhead,
        clock: Clock,
        stats: ConnectorCounters,
        notes: ConnectorNotes,
    ) -> None:
        self._client = client
        self._notes = notes
        self._tails = tails
        self._block_size = block_size
        self._num_states = num_states
        self._gate = gate
        self._ahead = ahead
        self._clock = clock
        self._stats = stats
        self._matched: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}
        self._asked_about: set[str] = set()
        self._for_room: dict[str, RequestState] = {}
        self._num_held = 0

    def match(self, tracked: RequestState, num_computed_tokens: int) -> int | None:
        """Lease a request's blocks and decide how many of their tokens to fetch from the store.

        Returns:
            Number of tokens beyond ``num_computed_tokens`` to fetch; None while blocks are being
            promoted from a tier: the request waits and others go on. Asking again meanwhile takes
            no round trip.
        """
        request_id = tracked.request.request_id
        first = num_computed_tokens // self._block_size
        now_s = self._clock.now()
        if tracked.promotion is None or tracked.first_hit != first:
            self.let_go(tracked)
            self._ask(tracked, first, now_s, until_s=None)
        elif tracked.ask_again_at_s is not None and now_s >= tracked.ask_again_at_s:
            self._ask(tracked, first, now_s, until_s=tracked.undecided_until_s)
        self._asked_about.add(request_id)
        if self._must_wait(tracked, now_s):
            self._waiting[request_id] = tracked
            return None
        self._waiting.pop(request_id, None)
        self._matched[request_id] = tracked
        return self._take(tracked, num_computed_tokens, now_s)

    def _must_wait(self, tracked: RequestState, now_s: float) -> bool:
        if tracked.ask_again_at_s is not None:
            return True
        assert tracked.promotion is not None
        return tracked.promotion.look(self._client.arrivals, now_s) is None

    def _tokens_to_look_up(self, tracked: RequestState) -> int:
        """Return the number of tokens of the prefix to look up.

        A decode leg knows the tokens that its prefill leg computed; other requests look up all
        their tokens. With states, the prefix ends where the store has a state, before the last
        token, which is always computed.
        """
        request, handed_over = tracked.request, tracked.handed_over
        if not self._num_states:
            return min(handed_over or request.num_tokens, request.num_tokens)
        if handed_over is not None and handed_over < request.num_tokens:
            return handed_over
        ends = block_ends(request.num_tokens, self._block_size)[-MAX_KEYS:]
        hashes = request.block_hashes
        keys = [state_keys(hashes[end // self._block_size - 1], 1)[0] for end in ends]
        known = self._client.lookup(keys) if keys else []
        kept = (end for end, one in zip(ends, known, strict=True) if one is not Lookup.MISS)
        return next(kept, 0)

    def _keys(self, request: compat.Request, num_tokens: int, tail: bytes | None) -> list[bytes]:
        """Return the keys of a prefix's blocks in chain order, then the keys of its states."""
        keys = [*request.block_hashes[: num_tokens // self._block_size], *([tail] if tail else [])]
        return [*keys, *state_keys(keys[-1], self._num_states)] if keys else []

    def _ask(self, tracked: RequestState, first: int, now_s: float, until_s: float | None) -> None:
        """Lease the blocks that the store has and reserve slots for the others, in one round trip.

        Args:
            until_s: Time after which the store is not asked again about undecided blocks; None for
                the first question.
        """
        request = tracked.request
        covered = self._tokens_to_look_up(tracked)
        tail = self._tails.key(request, covered)
        keys = self._keys(request, covered, tail)
        tracked.prefix_tokens, tracked.prefix_blocks = covered, len(keys) - first
        # Where a prompt has more blocks than one call takes, the last ones are computed.
        keys = keys[first : first + MAX_KEYS]
        if tracked.handover.leaves_tail and covered != request.num_tokens:
            tail = self._tails.key(request, request.num_tokens)
        offers = self._offers(tracked, first, tail)[:MAX_KEYS]
        held = tracked.lease
        # Blocks that were computed for this request are fetched at any cost, also from a tier.
        is_owed = tracked.is_owed
        block_s = 0.0 if is_owed else self._gate.block_budget_s(first, covered)
        reads = not request.skip_reading_prefix_cache
        answer = self._client.exchange(
            acquire=keys if reads else [],
            reserve=[(offer.key, offer.parent) for offer in offers],
            tenant=tracked.tenant,
            compute_block_s=block_s,
            hold=tracked.own_hold,
            num_readers=tracked.handover.num_readers,
            # A leg before this one has asked for the blocks that it has left for this one.
            is_repeated=tracked.is_counted or tracked.goes_on or tracked.handed_over is not None,
        )
        tracked.is_counted |= not answer.undecided
        tracked.has_hold = tracked.own_hold != 0
        if held is not None:
            self._client.release(held)
        tracked.lease, tracked.hits, tracked.first_hit = answer.lease, list(answer.slots), first
        pending_s = block_s * (len(answer.slots) - answer.num_ready)
        if not self._gate.costs.enabled:  # all is fetched, whatever the cost
            pending_s = LONGEST_WAIT_S
        tracked.promotion = PendingPromotion(
            answer.slots, answer.num_ready, now_s, answer.wait_s, pending_s
        )
        if until_s is None:
            until_s = now_s + UNDECIDED_FOR_S
        waits_for_writer = False
        # Blocks are useless without the states of their layers, which are not waited for.
        if reads and (tracked.waits_long or not self._num_states):
            num_written = self._num_being_written(keys, offers, answer)
            waits_for_writer = self._waits_for_writer(tracked, num_written, block_s, now_s)
        asked = StoreAsked(
            asked_blocks=len(keys),
            found_blocks=len(answer.slots),
            ready_blocks=answer.num_ready,
            reserved_blocks=sum(slot is not None for slot in answer.reserved),
            is_undecided=answer.undecided or waits_for_writer,
            took_s=self._clock.now() - now_s,
        )
        self._notes.note(request.request_id, asked)
        tracked.offers, tracked.undecided_until_s = offers, until_s
        tracked.keep(offers, answer.reserved)
        tracked.ask_again_at_s = None
        self._end_room_wait(tracked, now_s)
        if self._waits_for_room(tracked, answer, now_s):
            tracked.ask_again_at_s = now_s + ASK_FOR_ROOM_S
            tracked.refused_s = now_s
            self._for_room[request.request_id] = tracked
            self._num_held = answer.num_held
            self._give_back(tracked)
        elif waits_for_writer or (answer.undecided and now_s < until_s):
            tracked.ask_again_at_s = now_s + max(ASK_AGAIN_S, tracked.writer_look_s)
            self._abandon_saves(tracked)
        elif answer.num_declined:
            self._stats.add(tier_declined_blocks=answer.num_declined)

    def _waits_for_room(self, tracked: RequestState, answer: Exchanged, now_s: float) -> bool:
        """Return whether a leg waits for room until decode has read the prompts of other requests.

        A prefill leg waits, since without room for all of its blocks decode would compute them
        again; so does a decode leg whose blocks are at another store and find no room in this one.
        A waiting leg holds no slots: if two legs each held a part, neither would get the rest.
        """
        fits_at_all = len(tracked.offers) <= self._client.num_slots
        is_prefill = answer.num_refused > 0 and tracked.has_hold
        is_decode = answer.num_unfetched > 0 and bool(tracked.handover.pushed_from)
        if not ((is_prefill or is_decode) and fits_at_all):
            return False
        if tracked.room_until_s is None:
            tracked.room_until_s = now_s + ROOM_S
            self._stats.add(waited_for_room=1)
        return now_s < tracked.room_until_s

    def _end_room_wait(self, tracked: RequestState, now_s: float) -> None:
        if self._for_room.pop(tracked.request.request_id, None) is not None:
            self._stats.add(room_wait_seconds=now_s - tracked.refused_s)

    def _report_back_pressure(self, now_s: float) -> None:
        """Report to the front door which prompts wait for room in the store."""
        waiting = self._for_room.values()
        until_s = [one.room_until_s for one in waiting if one.room_until_s is not None]
        tokens = (one.request.num_tokens - one.first_hit * self._block_size for one in waiting)
        self._stats.set(
            room_prompts=len(waiting),
            room_tokens=sum(tokens),
            room_longest_s=now_s + ROOM_S - min(until_s) if until_s else 0.0,
            room_held_blocks=self._num_held if waiting else 0,
            room_blocks=self._client.num_slots if waiting else 0,
            room_block_bytes=self._client.slot_bytes if waiting else 0,
        )

    def _num_being_written(
        self, keys: list[bytes], offers: list[SaveCandidate], answer: Exchanged
    ) -> int:
        """Return how many blocks, from the first that was not found on, another leg computes."""
        missing = keys[len(answer.slots) :]
        granted = {o.key for o, slot in zip(offers, answer.reserved, strict=False) if slot}
        if not missing or missing[0] in granted:
            return 0
        missing = list(takewhile(lambda key: key not in granted, missing))
        states = self._client.lookup(missing)
        return sum(1 for _ in takewhile(lambda state: state is Lookup.PENDING, states))

    def _waits_for_writer(
        self, tracked: RequestState, num_written: int, block_s: float, now_s: float
    ) -> bool:
        """Return whether a leg waits for the blocks of its prefix that another leg is computing.

        It waits at most ``WRITER_PATIENCE`` times as long as computing them takes, or
        ``UNKNOWN_PATIENCE_S``, once in its life, and holds no slots meanwhile. If the writer dies,
        its blocks are missing, and the first leg that asks computes them.

        Two legs wait longer. One whose prefix was computed for it: two prefill instances that
        compute one prefix at the same time save it once, and the decode leg of the faster of them
        waits for the other's last step. And one that goes on after the death of an instance:
        otherwise it could not save the block, and later requests would find no block after it.
        """
        if not num_written:
            self._end_writer_wait(tracked, now_s)
            return False
        if tracked.writer_until_s is None:
            patience_s = WRITER_PATIENCE * block_s * num_written or UNKNOWN_PATIENCE_S
            tracked.writer_look_s = min(patience_s / _WRITER_LOOKS, UNDECIDED_FOR_S)
            if tracked.waits_long:
                patience_s, tracked.writer_look_s = LONGEST_WAIT_S, ASK_AGAIN_S
            tracked.writer_until_s = now_s + patience_s
            tracked.writer_since_s = now_s
            self._stats.add(waited_for_prefix=1)
        if now_s < tracked.writer_until_s:
            return True
        self._end_writer_wait(tracked, now_s)
        return False

    def _end_writer_wait(self, tracked: RequestState, now_s: float) -> None:
        if tracked.writer_since_s is not None:
            self._stats.add(prefix_wait_seconds=now_s - tracked.writer_since_s)
            tracked.writer_since_s = None

    def _offers(self, tracked: RequestState, first: int, tail: bytes | None) -> list[SaveCandidate]:
        """Return the blocks to save if the store lacks them.

        A prefill leg offers the blocks of its local prefix cache too, because the decode leg
        can only read the store; other requests offer the blocks that they are about to compute.
        """
        request = tracked.request
        leaves_tail = tracked.handover.leaves_tail
        hashes = request.block_hashes
        tracked.num_claimed = len(hashes)
        offers = full_block_offers(hashes, 0 if leaves_tail else first, self._block_size)
        if leaves_tail and tail is not None:
            parent = hashes[-1] if hashes else None
            offers.append(SaveCandidate(len(hashes), request.num_tokens, tail, parent))
        return offers

    def prompt_keys(self, request: compat.Request) -> list[bytes]:
        """Return the keys of all blocks of a prompt, the partial last one included."""
        tail = self._tails.key(request, request.num_tokens)
        return [*request.block_hashes, *([tail] if tail else [])][:MAX_KEYS]

    def _fetchable_tokens(self, tracked: RequestState) -> int:
        """Return the number of tokens, from the request's first on, whose blocks are readable."""
        covered = tracked.prefix_tokens
        if self._num_states:
            return covered if len(tracked.hits) == tracked.prefix_blocks else 0
        num_hit = tracked.first_hit + len(tracked.hits) if tracked.hits else 0
        return covered if num_hit > covered // self._block_size else num_hit * self._block_size

    def _take(self, tracked: RequestState, num_computed_tokens: int, now_s: float) -> int:
        """Settle on the blocks readable by now; return how many of their tokens to fetch."""
        self._settle(tracked, now_s)
        tokens = self._fetchable_tokens(tracked)
        extra = min(tokens, tracked.request.num_tokens - 1) - num_computed_tokens
        if extra <= 0:
            return 0
        num_found = len(tracked.hits)
        num_after = tracked.request.num_tokens - num_computed_tokens - extra
        prefix = HeldPrefix(
            num_found,
            self._block_size,
            extra,
            num_computed_tokens,
            num_after,
            is_whole=bool(self._num_states),
        )
        verdict = self._gate.costs.decide(prefix, self._ahead.beside(), handed_over=tracked.is_owed)
        self._notes.note(
            tracked.request.request_id,
            GateDecided(
                decision=verdict.decision.value,
                fetched_blocks=verdict.fetched_blocks,
                blocks=num_found,
                tokens=extra,
                fetch_s=verdict.fetch_s,
                compute_s=verdict.compute_s,
                step_s=verdict.step_s,
            ),
        )
        tracked.verdict, tracked.num_found = verdict, num_found
        if verdict.fetched_blocks == 0:
            self.release_hits(tracked)
        # The lease also covers the blocks that are cut off, and ends once the others are copied.
        del tracked.hits[verdict.fetched_blocks :]
        return prefix.tokens_of(verdict.fetched_blocks)

    def _settle(self, tracked: RequestState, now_s: float) -> None:
        """Give up on blocks whose promotion has not ended, and reserve slots to compute them."""
        promotion = tracked.promotion
        assert promotion is not None
        self._count_promotion(tracked.request.request_id, promotion, now_s)
        if promotion.outcome is PromotionOutcome.ARRIVED:
            return
        del tracked.hits[promotion.num_ready :]
        if not tracked.hits:
            self.release_hits(tracked)
        known = {save.index for save in tracked.saves}
        end = tracked.first_hit + promotion.num_ready
        offers = [o for o in tracked.offers if o.index >= end and o.index not in known]
        if offers:
            pairs = [(offer.key, offer.parent) for offer in offers]
            reserved = self._client.exchange(
                reserve=pairs,
                tenant=tracked.tenant,
                hold=tracked.own_hold,
                num_readers=tracked.handover.num_readers,
            ).reserved
            tracked.keep(offers, reserved)

    def _count_promotion(self, request_id: str, promotion: PendingPromotion, now_s: float) -> None:
        if promotion.num_pending and promotion.outcome is not None:
            ended = PromotionEnded(
                promotion.outcome.value,
                promotion.num_pending,
                promotion.num_arrived,
                now_s - promotion.began_s,
                promotion.predicted_s,
            )
            self._notes.note(request_id, ended)
            self._stats.add(
                promoted_blocks=promotion.num_arrived,
                promotion_wait_seconds=now_s - promotion.began_s,
                promotion_predicted_seconds=promotion.predicted_s,
                **{f"promotion_{promotion.outcome.value}": 1},
            )

    def let_go(self, tracked: RequestState) -> None:
        """Give back the lease, slots and hold of an earlier match that was not scheduled."""
        self._matched.pop(tracked.request.request_id, None)
        self._waiting.pop(tracked.request.request_id, None)
        promotion = tracked.promotion
        if promotion is not None and promotion.num_pending and promotion.outcome is None:
            self._stats.add(promotion_abandoned=1)
        tracked.promotion = tracked.ask_again_at_s = tracked.verdict = None
        self._end_room_wait(tracked, self._clock.now())
        self._end_writer_wait(tracked, self._clock.now())
        self._give_back(tracked)

    def _give_back(self, tracked: RequestState) -> None:
        self.release_hits(tracked)
        self._abandon_saves(tracked)
        self._end_hold(tracked)

    def _end_hold(self, tracked: RequestState) -> None:
        if tracked.has_hold:
            tracked.has_hold = False
            self._client.end_hold(tracked.handover.hold, None, tracked.handover.push_to)

    def _abandon_saves(self, tracked: RequestState) -> None:
        if tracked.saves:
            self._client.abandon([save.slot for save in tracked.saves])
            tracked.saves = []

    def release_hits(self, tracked: RequestState) -> None:
        """Release the lease on the blocks that would have been fetched."""
        if tracked.lease is not None:
            self._client.release(tracked.lease)
        tracked.lease, tracked.hits = None, []

    def scheduled(self, tracked: RequestState) -> None:
        """Hand the match's lease and slots to the caller: the scheduler has taken the request."""
        self._matched.pop(tracked.request.request_id, None)
        if tracked.verdict is not None:
            self._gate.count(tracked.verdict, tracked.num_found)
        tracked.promotion = tracked.verdict = None

    def end_step(self) -> None:
        """Let go of requests that were matched but not scheduled in the step just planned.

        Also let go of requests that the scheduler passed over until their wait for a tier expired.
        """
        now_s = self._clock.now()
        passed_over = [self._waiting[id_] for id_ in self._waiting.keys() - self._asked_about]
        late = [t for t in passed_over if t.promotion and now_s >= t.promotion.deadline_s]
        for tracked in [*self._matched.values(), *late]:
            self.let_go(tracked)
        self._asked_about.clear()
        self._report_back_pressure(now_s)
