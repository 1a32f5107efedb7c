"""Events of one request on its way through the front door and the engines, and its trace.

Imports neither torch nor vllm: the command that prints traces reads these structs from JSON.
"""

from __future__ import annotations

import msgspec

# ---- noted by the front door


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The body has been read, checked and rendered, and the prompt tokenised."""


class LookedUp(msgspec.Struct, frozen=True, tag=True):
    """The front door asked the store how much of the prompt it holds.

    Attributes:
        cached_tokens: In whole blocks, stored or being stored.
        took_s: Of the question.
    """

    cached_tokens: int
    took_s: float


class NoInstance(msgspec.Struct, frozen=True, tag=True):
    """No instance could serve a leg: the request waits for a restart."""

    why: str


class RouteCandidate(msgspec.Struct, frozen=True):
    """A ready instance as the policy saw it.

    Attributes:
        inflight_requests: Legs that it had been sent and that had not ended.
        inflight_prefill_tokens: Of their prompts, neither cached nor computed yet.
    """

    instance: str
    role: str
    inflight_requests: int
    inflight_prefill_tokens: int


class Routed(msgspec.Struct, frozen=True, tag=True):
    """The routing policy chose.

    Attributes:
        policy: Its name, with the package of one that is not banaserve's own.
        prefill: None where one instance serves the whole request.
        reason: Of the policy, for the number of legs.
        split_blocker: Why the request cannot be split; None where it can. In JSON it keeps the name
            that readers of traces know.
        candidates: All that were ready.
    """

    policy: str
    prefill: str | None
    decode: str
    reason: str
    split_blocker: str | None = msgspec.field(default=None, name="one_leg_because")
    candidates: list[RouteCandidate] = []


class LegBegan(msgspec.Struct, frozen=True, tag=True):
    """A leg was sent to an engine.

    Attributes:
        leg: ``prefill``, ``decode``, or ``whole`` where one instance computes prompt and output.
        engine_request_id: Under which the engine's log and notes know it.
        resumed_tokens: Output tokens that had been sent before, from another instance.
    """

    leg: str
    instance: str
    engine_request_id: str
    resumed_tokens: int = 0


class LegOutput(msgspec.Struct, frozen=True, tag=True):
    """The first output came that has tokens which a decode or whole leg computed itself."""

    leg: str
    instance: str


class LegEnded(msgspec.Struct, frozen=True, tag=True):
    """A leg came to its end.

    Attributes:
        finish_reason: As vLLM says it: ``length``, ``stop`` or ``abort``.
        cached_tokens: Of the prompt, that the leg had not to compute; None where it does not say.
    """

    leg: str
    instance: str
    finish_reason: str | None
    cached_tokens: int | None = None


class LegFailed(msgspec.Struct, frozen=True, tag=True):
    """An instance died under a leg.

    Attributes:
        num_deaths: Instances that have died under the request since it last came further.
        next_step: ``tried again``, ``tried again when it is its turn`` or ``given up``.
    """

    leg: str
    instance: str
    why: str
    num_deaths: int
    next_step: str


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The answer's first token was there; an answer that is not streamed goes out with the last.

    Attributes:
        source: ``prefill`` where the prefill leg's token was used, else ``decode``.
        blocker: Why the prefill leg's token could not be; None where it could.
    """

    source: str
    blocker: str | None = None


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """The request left the front door.

    Attributes:
        how: vLLM's finish reason, ``closed`` by the client or by an abort, or ``error``.
        error: Error for the client; empty where there is none.
        output_tokens: That went to the client.
    """

    how: str
    output_tokens: int
    error: str = ""


class MoveCommitted(msgspec.Struct, frozen=True, tag=True):
    """Modules of an instance changed their place while a leg ran there: its steps stood still.

    Attributes:
        instance: Whose modules they are.
        move_id: As ``banaserve placement`` names the move.
        modules: In words.
        to: The instance beside which they run from now on; None: home.
        stall_s: That the engine stood still, until the event.
    """

    instance: str
    move_id: str
    modules: str
    to: str | None
    stall_s: float


# ---- noted by the scheduler's side of an engine's connector


class EngineReceived(msgspec.Struct, frozen=True, tag=True):
    """The engine's scheduler looked at the request for the first time.

    Attributes:
        leaves_tail: It is a prefill leg: all of its prompt is to be saved.
        handed_over_tokens: It is a decode leg: so many tokens lie in the store. None where not.
    """

    prompt_tokens: int
    leaves_tail: bool
    handed_over_tokens: int | None


class StoreAsked(msgspec.Struct, frozen=True, tag=True):
    """The connector leased the blocks that the store holds and reserved slots for the others.

    Attributes:
        found_blocks: Leased; the first ``ready_blocks`` of them can be read at once.
        reserved_blocks: To be saved once they have been computed.
        is_undecided: A tier could not say yet: the store is asked again.
        took_s: Of the round trip.
    """

    asked_blocks: int
    found_blocks: int
    ready_blocks: int
    reserved_blocks: int
    is_undecided: bool
    took_s: float


class PromotionEnded(msgspec.Struct, frozen=True, tag=True):
    """Blocks on their way up from a tier were waited for.

    Attributes:
        outcome: ``arrived``, ``failed`` or ``late``.
        predicted_s: By the store, when it was asked.
    """

    outcome: str
    pending_blocks: int
    arrived_blocks: int
    wait_s: float
    predicted_s: float


class GateDecided(msgspec.Struct, frozen=True, tag=True):
    """The cost gate's verdict on the blocks that were found.

    Attributes:
        fetched_blocks: So many from the first on are fetched; the others are computed.
        blocks: That were found.
        tokens: That would be computed if none were fetched.
        fetch_s, compute_s: Predictions for all blocks; None where nothing was measured yet.
        step_s: For the step as decided, with what others compute in it; None as above.
    """

    decision: str
    fetched_blocks: int
    blocks: int
    tokens: int
    fetch_s: float | None
    compute_s: float | None
    step_s: float | None


class StepsPlanned(msgspec.Struct, frozen=True, tag=True):
    """Engine steps in which the request took part, one after the other.

    Attributes:
        phase: ``prompt`` or ``decode``.
        first_step, last_step: By the connector's count of the engine's steps.
        num_steps: In which it took part; fewer than lie between them where it was passed over.
        took_s: From planning the first to planning the last.
        longest_gap_s: Between planning two of them.
        fetched_blocks, saved_blocks: That the steps were to copy for it.
    """

    phase: str
    first_step: int
    last_step: int
    num_steps: int
    num_tokens: int
    took_s: float
    longest_gap_s: float
    fetched_blocks: int
    saved_blocks: int


class CopiesEnded(msgspec.Struct, frozen=True, tag=True):
    """A step that copied blocks of the prompt has ended, and what it saved is committed.

    Attributes:
        fetched_blocks, saved_blocks: Of this request, as planned.
        fetch_s: Of all fetches of the step.
        compute_s: Of the step's forward pass; None where the worker cannot tell.
        lost_saves: Blocks of the step, of all requests, that could not be committed.
        save_s: Of all saves of the step and their commit, whether or not anything waited.
    """

    step: int
    fetched_blocks: int
    saved_blocks: int
    fetch_s: float
    compute_s: float | None
    lost_saves: int
    save_s: float = 0.0


class EngineFinished(msgspec.Struct, frozen=True, tag=True):
    """The engine's scheduler let the request go."""

    output_tokens: int


EngineEvent = (
    EngineReceived
    | StoreAsked
    | PromotionEnded
    | GateDecided
    | StepsPlanned
    | CopiesEnded
    | EngineFinished
)
FrontEvent = (
    Prepared
    | LookedUp
    | NoInstance
    | Routed
    | LegBegan
    | LegOutput
    | LegEnded
    | LegFailed
    | FirstToken
    | RequestEnded
    | MoveCommitted
)
RequestEvent = FrontEvent | EngineEvent

MAX_EVENTS = 64
"""Of one request in one process; later ones are counted only."""
KEPT_REQUESTS = 1000
"""That have ended, in one process."""


class EngineNotes(msgspec.Struct):
    """What one engine's connector noted of one request.

    Attributes:
        events: With the time of each on the machine's monotonic clock.
        num_dropped: Events beyond ``MAX_EVENTS``.
    """

    request_id: str
    events: list[tuple[float, EngineEvent]]
    num_dropped: int


class EngineAnswer(msgspec.Struct):
    """Notes of one engine on several requests.

    Attributes:
        now_s: The engine's monotonic clock as it answers: that of another machine is another one.
        found: For each name that was asked for, in its order.
    """

    now_s: float
    found: list[list[EngineNotes]]


# ---- what the admin API answers


class RequestSummary(msgspec.Struct):
    """One request in a line.

    Attributes:
        arrived_at_s: Seconds since 1970.
        output_tokens: So far.
        instances: Of its legs, in order.
        ttft_s: From its arrival to its first token, streamed or not; None before that.
        took_s: From its arrival to its end, or until now.
        end: How it ended; empty while it is under way.
        received_s: That its body took to come in, before its arrival.
        answered_s: From its arrival to the last byte of the answer; None before that.
        trace_id: Of the OpenTelemetry trace that it is part of; empty for none.
    """

    id: str
    arrived_at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    instances: list[str]
    ttft_s: float | None
    took_s: float
    end: str
    received_s: float = 0.0
    answered_s: float | None = None
    trace_id: str = ""


class TraceLine(msgspec.Struct):
    """One event.

    Attributes:
        at_s: Since the request's arrival.
        process: ``front door`` or an instance's id.
        leg_id: The engine's id of the leg, or that of its sequence; empty for the whole request.
    """

    at_s: float
    process: str
    event: RequestEvent
    leg_id: str = ""


class TraceSpan(msgspec.Struct):
    """A part of a request's time. Those without a parent follow each other from end to end.

    Attributes:
        start_s, end_s: Since the request's arrival; the body's way in begins before that.
        process: ``front door`` or an instance's id.
        parent: Index of the span that it is part of; -1 for none.
        attributes: By the names that OpenTelemetry gets, without their prefix ``banaserve.``.
        error: Why it ended before its end; empty where it did not.
    """

    name: str
    start_s: float
    end_s: float
    process: str
    parent: int = -1
    attributes: dict[str, str | int | float] = {}
    error: str = ""

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class RequestTrace(msgspec.Struct):
    """All that is known of one request.

    Attributes:
        lines: In the order of time, over all processes.
        missing: What is not known, and why; for people.
        spans: The same as parts of the request's time, each after its parent.
    """

    summary: RequestSummary
    lines: list[TraceLine]
    missing: list[str]
    spans: list[TraceSpan] = []
