"""Requests of clients in a seeded run, what has come for them, and what should have."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind, SamplingParams

from banaserve.engine.compat.requests import RequestOutput
from seeded_engine import MAX_MODEL_LEN, WORDS, token_at


@dataclass
class ClientRequest:
    """What a client asks for and how it behaves.

    Attributes:
        pause_s: Longest wait between two outputs that it reads.
        leaves_after: Number of outputs after which it hangs up; None to read to the end.
        leaves_after_s: Time after which it hangs up, whatever has come; None for never.
        aborts_after_s: Time after which it aborts the request by its id; None for never.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    pause_s: float = 0.0
    leaves_after: int | None = None
    leaves_after_s: float | None = None
    aborts_after_s: float | None = None


@dataclass
class Answer:
    """What has come for a request.

    Attributes:
        tokens, texts, finish: Of each sequence.
        num_ends: Outputs that say they are the last one.
        error: That ended it.
        has_left: Its client has hung up.
    """

    request: ClientRequest
    began_s: float
    losses_before: int
    tokens: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    finish: list[str | None] = field(init=False)
    ended_s: float = 0.0
    paused_s: float = 0.0
    num_ends: int = 0
    error: Exception | None = None
    has_left: bool = False
    is_aborted: bool = False

    def __post_init__(self) -> None:
        n = self.request.params.n
        self.tokens, self.texts, self.finish = [[] for _ in range(n)], [""] * n, [None] * n

    @property
    def is_whole(self) -> bool:
        return self.num_ends == 1 and set(self.finish) <= {"stop", "length"}

    def take(self, output: RequestOutput) -> None:
        assert self.num_ends == 0, "an output comes after the last one"
        is_delta = self.request.params.output_kind is RequestOutputKind.DELTA
        for one in output.outputs:
            at, tokens = one.index, list(one.token_ids)
            assert self.finish[at] is None or not tokens, "tokens come after a sequence's end"
            self.tokens[at] = self.tokens[at] + tokens if is_delta else tokens
            self.texts[at] = self.texts[at] + one.text if is_delta else one.text
            self.finish[at] = one.finish_reason or self.finish[at]
        self.num_ends += output.finished


def expected(request: ClientRequest, weights: str, index: int) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a sequence that nothing disturbs."""
    params, tokens, text = request.params, list[int](), ""
    seed = (params.seed or 0) + (index if params.seed is not None else 0)
    most = min(params.max_tokens or 0, MAX_MODEL_LEN - len(request.prompt))
    for position in range(most):
        tokens.append(token_at(weights, request.prompt, position, seed))
        text += WORDS[tokens[-1]]
        found = [text.find(stop) for stop in params.stop or () if stop in text]
        if found:
            return tokens, text[: min(found)], "stop"
    return tokens, text, "length"


def fits(answer: Answer, weights: str) -> bool:
    """Whether all that has come is what engines with these weights compute."""
    request = answer.request
    for index, given in enumerate(answer.tokens):
        tokens, text, finish = expected(request, weights, index)
        if answer.finish[index] in ("stop", "length"):
            if (given, answer.texts[index], answer.finish[index]) != (tokens, text, finish):
                return False
        elif given != tokens[: len(given)]:
            return False
        elif not text.startswith(answer.texts[index]):
            # An abort also gives the text that was held back for stop strings.
            whole = "".join(WORDS[token] for token in given)
            if answer.finish[index] != "abort" or answer.texts[index] != whole:
                return False
    return answer.is_aborted or "abort" not in answer.finish
