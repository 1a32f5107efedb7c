"""Events of one request in the front door and the engines, and its trace.

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
        cached_tokens: Number of prompt tokens in whole blocks that are stored or being stored.
    """

    cached_tokens: int
    took_s: float


class NoInstance(msgspec.Struct, frozen=True, tag=True):
    """A leg found no instance that could serve it: the request waits for a restart.

    Attributes:
        why: Reason in words.
    """

    why: str


class RouteCandidate(msgspec.Struct, frozen=True):
    """A ready instance as the policy saw it.

    Attributes:
        inflight_requests: Number of legs that had been sent to the instance and had not ended.
        inflight_prefill_tokens: Number of tokens of these legs' prompts that were neither cached
            nor computed yet.
    """

    instance: str
    role: str
    inflight_requests: int
    inflight_prefill_tokens: int


class Routed(msgspec.Struct, frozen=True, tag=True):
    """The routing policy chose the instances of a request.

    Attributes:
        policy: Name of the policy, with its package if it is not banaserve's own.
        prefill: Instance of the prefill leg; None where one instance serves the whole request.
        decode: Instance of the decode leg, or of the whole request.
        reason: Reason of the policy for the number of legs.
        split_blocker: Reason why the request cannot be split into legs; None if it can. Its name in
            JSON is the one that readers of traces know.
        candidates: All instances that were ready.
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
        engine_request_id: Id of the leg in the engine's log and notes.
        resumed_tokens: Number of output tokens that another instance had sent before.
    """

    leg: str
    instance: str
    engine_request_id: str
    resumed_tokens: int = 0


class LegOutput(msgspec.Struct, frozen=True, tag=True):
    """The first output with tokens that a decode or whole leg computed itself arrived."""

    leg: str
    instance: str


class LegEnded(msgspec.Struct, frozen=True, tag=True):
    """A leg ended.

    Attributes:
        finish_reason: vLLM's finish reason: ``length``, ``stop`` or ``abort``.
        cached_tokens: Number of prompt tokens that the leg did not have to compute; None if not
            reported.
    """

    leg: str
    instance: str
    finish_reason: str | None
    cached_tokens: int | None = None


class LegFailed(msgspec.Struct, frozen=True, tag=True):
    """A leg was interrupted: its instance died, or the stream moved to another instance.

    Attributes:
        why: Cause in words.
        num_deaths: Number of instances that have died under the request since its last progress.
        next_step: ``tried again``, ``tried again when it is its turn``, ``given up`` or, for a
            stream that moved, ``goes on elsewhere``.
    """

    leg: str
    instance: str
    why: str
    num_deaths: int
    next_step: str


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The answer's first token was ready; an answer that is not streamed is sent with the last.

    Attributes:
        source: ``prefill`` where the prefill leg's token was used, else ``decode``.
        blocker: Reason why the prefill leg's token could not be used; None if it could.
    """

    source: str
    blocker: str | None = None


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """The request left the front door.

    Attributes:
        how: vLLM's finish reason, ``closed`` by the client or by an abort, or ``error``.
        error: Error for the client; empty for none.
        output_tokens: Number of output tokens sent to the client.
    """

    how: str
    output_tokens: int
    error: str = ""


class MoveCommitted(msgspec.Struct, frozen=True, tag=True):
    """Modules of an instance were moved while a leg ran there, which stalled its steps.

    Attributes:
        instance: Instance whose modules moved.
        move_id: Id of the move, as in ``banaserve placement``.
        modules: Description of the modules in words.
        to: Instance beside which the modules run from now on; None for home.
        stall_s: Seconds that the engine stood still, ending at the event.
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
        leaves_tail: True for a prefill leg, all of whose prompt is to be saved.
        handed_over_tokens: Number of tokens that a prefill leg left in the store for this decode
            leg; None for other legs.
    """

    prompt_tokens: int
    leaves_tail: bool
    handed_over_tokens: int | None


class StoreAsked(msgspec.Struct, frozen=True, tag=True):
    """The connector leased the blocks that the store holds and reserved slots for the others.

    Attributes:
        found_blocks: Number of leased blocks; the first ``ready_blocks`` can be read at once.
        reserved_blocks: Number of blocks to be saved once they have been computed.
        is_undecided: True if a tier, or a block being written, was undecided: the store is asked
            again.
        took_s: Seconds of the round trip.
    """

    asked_blocks: int
    found_blocks: int
    ready_blocks: int
    reserved_blocks: int
    is_undecided: bool
    took_s: float


class PromotionEnded(msgspec.Struct, frozen=True, tag=True):
    """The wait for blocks that were promoted from a tier ended.

    Attributes:
        outcome: ``arrived``, ``failed`` or ``late``.
        predicted_s: Seconds that the store predicted when it was asked.
    """

    outcome: str
    pending_blocks: int
    arrived_blocks: int
    wait_s: float
    predicted_s: float


class GateDecided(msgspec.Struct, frozen=True, tag=True):
    """The cost gate's verdict on the blocks that were found.

    Attributes:
        fetched_blocks: Number of blocks, from the first on, to fetch; the others are computed.
        blocks: Number of blocks found.
        tokens: Number of tokens that would be computed if no block were fetched.
        fetch_s, compute_s: Predicted seconds for all blocks; None where nothing was measured yet.
        step_s: Predicted seconds of the step as decided, with the work of other requests in it;
            None where nothing was measured yet.
    """

    decision: str
    fetched_blocks: int
    blocks: int
    tokens: int
    fetch_s: float | None
    compute_s: float | None
    step_s: float | None


class StepsPlanned(msgspec.Struct, tag=True):
    """Engine steps in sequence in which the request took part; grows while they are planned.

    Attributes:
        phase: ``prompt`` or ``decode``.
        first_step, last_step: Numbers of these steps by the connector's count.
        num_steps: Number of steps with the request; fewer than from first to last where it was
            passed over.
        took_s: Seconds from planning the first step to planning the last.
        longest_gap_s: Longest time between planning two consecutive steps, in seconds.
        fetched_blocks, saved_blocks: Numbers of blocks that the steps were to copy for the request.
    """

    phase: str
    first_step: int
    last_step: int
    num_steps: int = 0
    num_tokens: int = 0
    took_s: float = 0.0
    longest_gap_s: float = 0.0
    fetched_blocks: int = 0
    saved_blocks: int = 0


class CopiesEnded(msgspec.Struct, frozen=True, tag=True):
    """A step that copied blocks of the prompt has ended, and what it saved is committed.

    Attributes:
        fetched_blocks, saved_blocks: Numbers of blocks planned for this request.
        compute_s: Seconds of the step's forward pass; None where the worker cannot tell.
        lost_saves: Number of blocks of the step, of all requests, that could not be committed.
        save_s: Seconds of all saves of the step and their commit, whether or not anything waited
            for them.
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
"""Maximum number of events kept of one request in one process; later ones are only counted."""
KEPT_REQUESTS = 1000
"""Number of ended requests whose events one process keeps."""


class EngineNotes(msgspec.Struct):
    """Notes of one engine's connector about one request.

    Attributes:
        events: Pairs of a time, on the machine's monotonic clock, and the event.
        num_dropped: Number of events beyond ``MAX_EVENTS``, which were dropped.
    """

    request_id: str
    events: list[tuple[float, EngineEvent]]
    num_dropped: int


class EngineAnswer(msgspec.Struct):
    """Notes of one engine on several requests.

    Attributes:
        now_s: Time of the engine's monotonic clock at the answer; clocks differ between machines.
        found: Notes for each name that was asked for, in that order.
    """

    now_s: float
    found: list[list[EngineNotes]]


# ---- answers of the admin API


class RequestSummary(msgspec.Struct):
    """Summary of a request in one line.

    Attributes:
        arrived_at_s: Time of arrival, in seconds since 1970.
        instances: Instances of the request's legs, in order.
        ttft_s: Seconds from arrival to the first token, streamed or not; None before that.
        took_s: Seconds from arrival to the end, or until now.
        end: Way in which the request ended; empty while it is under way.
        received_s: Seconds, before the arrival, in which the body was received.
        answered_s: Seconds from arrival to the last byte of the answer; None before that.
        trace_id: Id of the request's OpenTelemetry trace; empty for none.
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
    """Line of a trace: one event.

    Attributes:
        at_s: Seconds since the request's arrival.
        process: ``front door`` or an instance's id.
        leg_id: Engine's id of the leg, or id of its sequence; empty for the whole request.
    """

    at_s: float
    process: str
    event: RequestEvent
    leg_id: str = ""


class TraceSpan(msgspec.Struct):
    """Part of a request's time. Spans without a parent follow one another without gaps.

    Attributes:
        start_s, end_s: Seconds since the request's arrival; receiving the body begins before that.
        process: ``front door`` or an instance's id.
        parent: Index of the span that contains this one; -1 for none.
        attributes: Values by their OpenTelemetry names, without the prefix ``banaserve.``.
        error: Reason why the part was cut short; empty if it was not.
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
    """Trace of one request.

    Attributes:
        lines: Events of all processes in the order of time.
        missing: Descriptions of facts that are not known, with the reason; for people.
        spans: Parts of the request's time, made from the events; each follows its parent.
    """

    summary: RequestSummary
    lines: list[TraceLine]
    missing: list[str]
    spans: list[TraceSpan] = []
