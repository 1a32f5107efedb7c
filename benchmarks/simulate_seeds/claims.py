"""Claims of the papers of SkyWalker, GORGO (both versions) and Preble, and the rule for a verdict.

A claim that a simulation can check names a case and a ratio, or a share of hits. The others name
the reason why nothing here can test them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from banaserve_bench.results.statistics import Interval, mean_interval
from benchmarks.simulate_seeds.cases import (
    AGENTS,
    AT,
    CHAT,
    DIURNAL,
    FULL,
    HELD_OUT,
    LIGHT,
    MIX,
    MIXED,
    PUSH,
    SHORT,
    TREES,
    TUNING,
    V1,
    preble_case,
)

ANY = float("inf")
THROUGHPUT = "weighted"
HITS_APART = 0.05
WIDE = 0.1
REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"
NOT_TESTABLE = "not testable here"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, UNDECIDED, NOT_TESTABLE)
RULE = f"""\
A ratio is taken seed by seed; its mean and 95% interval (Student) are those of its logarithm. It \
is *{REPRODUCED}* if the interval lies on the paper's side of 1 by at least half of the smallest \
effect that the paper states, as a logarithm (1.14 for 1.3); that two systems are alike, if the \
interval lies in the range given; a share of hits, if its interval lies within {HITS_APART:g} \
of the paper's. It is *{UNDECIDED}* if the interval crosses the border and is wider than \
{WIDE:.0%} of the mean, and else *{NOT_REPRODUCED}*: a narrow interval at the border shows no \
effect."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim on ``measure`` of one system over another's, or on its value if there is no other.

    Attributes:
        source: Section, figure or table of the paper.
        low, high: Range in the paper; equal if the paper has one number. 1 to ``ANY``, or 0 to 1:
            a direction without a number.
        why: Reason if the simulation does not confirm the claim.
        other_case: Case of the other system if it differs from ``case``.
    """

    source: str
    words: str
    case: str
    system: str
    other: str
    measure: str
    low: float
    high: float
    why: str = ""
    other_case: str = ""


@dataclass(frozen=True, slots=True)
class UntestableClaim:
    """Claim that no load or machine at hand can test.

    Attributes:
        paper: Figure in the paper.
    """

    source: str
    words: str
    paper: str
    why: str


def needed(claim: Claim) -> tuple[float, float]:
    """Return the least and the highest value that reproduces ``claim``, as ``RULE`` says."""
    if claim.measure == "hits" and not claim.other:
        return claim.low - HITS_APART, claim.high + HITS_APART
    if claim.low >= 1:
        return sqrt(claim.low), ANY
    if claim.high <= 1:
        return 0.0, sqrt(claim.high)
    return claim.low, claim.high


def interval(claim: Claim, values: Sequence[float]) -> Interval:
    """Return the mean of ``values``, one a seed, and its interval; of ratios, the geometric one."""
    if claim.measure == "hits" and not claim.other:
        return mean_interval(values)
    return Interval(*map(exp, mean_interval([log(value) for value in values])))


def verdict(claim: Claim, values: Sequence[float]) -> str:
    """Return the verdict of ``values``, one a seed, on ``claim``."""
    least, highest = needed(claim)
    low, mean, high = interval(claim, values)
    if least < low and high < highest:
        return REPRODUCED
    is_crossed = high >= least and low <= highest
    return UNDECIDED if is_crossed and high - low > WIDE * mean else NOT_REPRODUCED


_BALANCED = (
    "A client has one conversation at a time, so that a ring and the sglang router stay in balance \
and keep every prefix in its place."
)
_START = "All conversations begin with one system prompt, which every replica has cached."
_FORWARD = "What is forwarded loses its prefix, which a region or a ring keeps."
_CHATS = (
    "The share is one of ChatBot Arena's and WildChat's users, which are not at hand; MT-bench's \
conversations begin with one system prompt."
)
_BLIND = "Blind pushing follows the prefix as well, and here rarely leaves it."
_DISTANCE = "At equal load the proxy pays for its clients the distance that a balancer beside them \
does not; the paper's systems had 6.6 to 17.8 requests in flight instead of 10 each."
_REUSE = (
    "Prompts are reused less here than in ART-Chat (78 to 88 %), and the weights price a round \
trip at a tenth of what it costs."
)
_AGENTS = (
    "Of an agent's prompt nearly all is cached where its session began, and affinity never leaves."
)
_SELF = "A session waits for its answer before its next call, so that queues do not grow as with \
independent requests."
_DECODE = "Most of the time is decoding, which routing does not change."
_L4 = "The lengths of thoughts are GSM8K's answers here."

_SKYWALKER: list[Claim | UntestableClaim] = [
    Claim("5.2, fig. 9a", "pushing by pending over blind: throughput", PUSH, "SP-P", "blind",
          THROUGHPUT, 1.27, 1.27),
    Claim("5.2, fig. 9b", "blind over pushing by pending: p90 TTFT", PUSH, "blind", "SP-P",
          "ttft p90", 18.47, 18.47),
    Claim("5.2", "pushing by pending over blind: hits", PUSH, "SP-P", "blind", "hits", 1.30, 1.30,
          _BLIND),
    Claim("5.2, fig. 9a", "pushing by pending over by outstanding: throughput", PUSH, "SP-P",
          "SP-O", THROUGHPUT, 1.4, 1.4),
    Claim("5.2, fig. 9b", "by outstanding as by pending: p50 TTFT", PUSH, "SP-O", "SP-P",
          "ttft p50", 0.8, 1.25,
          "With 10 places a replica, as in the authors' code, requests wait at the balancer."),
    *(
        Claim("5.1, fig. 8a", f"over {name}: throughput", CHAT, "skywalker", name, THROUGHPUT, low,
              high, why)
        for name, low, high, why in (
            ("least load", 1.027, 1.027, _START), ("round robin", 1.12, 2.06, _START),
            ("sglang router", 1.12, 2.06, _BALANCED), ("hash", 1.12, 2.06, _BALANCED),
            ("gateway", 1.43, 1.62, _START),
        )
    ),
    *(
        Claim("5.1", "over its own ring: throughput", case, "skywalker", "skywalker-ch",
              THROUGHPUT, 1.0134, 1.0821, "A ring keeps a tree in its place as well.")
        for case in (CHAT, TREES, MIXED)
    ),
    *(
        Claim("5.1, fig. 8e", f"{name} over it: p50 TTFT", CHAT, name, "skywalker", "ttft p50",
              1.74, 6.30)
        for name in ("least load", "round robin", "sglang router", "hash")
    ),
    *(
        Claim("5.1, fig. 8e", f"{name} over it: p90 TTFT", CHAT, name, "skywalker", "ttft p90",
              4.28, 9.92, _FORWARD)
        for name in ("least load", "round robin", "sglang router", "hash")
    ),
    *(
        Claim("5.1, fig. 8i", f"{name} over it: p50 E2E", CHAT, name, "skywalker", "e2e p50",
              1.05, 2.14, why)
        for name, why in (
            ("least load", _START), ("round robin", _START), ("sglang router", _BALANCED),
            ("hash", _BALANCED),
        )
    ),
    Claim("5.1", "most over least outstanding, hashing", CHAT, "hash", "", "most/least", 2.54,
          4.92, "Each conversation has a key of its own here; the paper's are users."),
    Claim("5.1", "most over least outstanding, sglang router", CHAT, "sglang router", "",
          "most/least", 2.33, 5.08, _BALANCED),
    Claim("5.1, fig. 8c", "hashing over it: throughput", TREES, "hash", "skywalker", THROUGHPUT,
          1.02, 1.02, "Both keep a tree in one place."),
    Claim("5.1, fig. 8c", "hashing over least load: throughput", TREES, "hash", "least load",
          THROUGHPUT, 1.4, 1.4),
    Claim("5.1", "over the gateway: throughput", TREES, "skywalker", "gateway", THROUGHPUT, 1.43,
          2.06),
    Claim("5.1", "hits, skywalker", TREES, "skywalker", "", "hits", 0.896, 0.900, _L4),
    Claim("5.1", "hits, round robin", TREES, "round robin", "", "hits", 0.587, 0.593, _L4),
    Claim("5.1", "hits, least load", TREES, "least load", "", "hits", 0.587, 0.593, _L4),
    Claim("5.1, fig. 8d", "over hashing: throughput", MIXED, "skywalker", "hash", THROUGHPUT, 1.0,
          ANY),
    Claim("5.1, fig. 8d", "over the sglang router: throughput", MIXED, "skywalker",
          "sglang router", THROUGHPUT, 1.0, ANY,
          "A burst between two reports goes to one replica; the repaired form bounds it."),
    Claim("5.1", "most over least outstanding, hashing", MIXED, "hash", "", "most/least", 3.36,
          3.36),
    Claim("5.1", "most over least outstanding, sglang router", MIXED, "sglang router", "",
          "most/least", 2.22, 2.22,
          "The router leaves a replica that has 32 requests more than another."),
    *(
        Claim("5.2, fig. 10", f"over region-local, {num} replicas: throughput", name, "skywalker",
              "region-local", THROUGHPUT, 1.07, 1.18, _FORWARD)
        for num, name in DIURNAL.items()
    ),
    Claim("5.2, fig. 10", "9 replicas over 12 region-local ones: throughput, so 25 % of the cost",
          DIURNAL[9], "skywalker", "region-local", THROUGHPUT, 0.97, 1.03,
          _FORWARD, other_case=DIURNAL[12]),
    UntestableClaim("5.1", "hits in chats: round robin, least load, skywalker, gateway",
                    "0.11-0.17, 0.28-0.31, 0.37-0.47, 0.18-0.24", _CHATS),
    UntestableClaim("2.2, fig. 3", "cost of reserving for the sum of all regions", "-40.5 %",
                    "It follows from WildChat's arrivals by country, which are not at hand."),
    UntestableClaim("3.2, figs. 5 and 6", "similarity of prompts, and hits that a ring misses",
                    "2.47-7.60x; 7-16 %", _CHATS),
]  # fmt: skip

_GORGO_V1: list[Claim | UntestableClaim] = [
    *(
        Claim("tables 2 to 5", f"{name} over the proxy: p50 TTFT", V1, name, "gorgo-proxy",
              "ttft p50", ratio, ratio, _DISTANCE)
        for name, ratio in (
            ("least load", 2.53), ("prefix trie", 2.51), ("gorgo as coded", 2.40),
        )
    ),
    *(
        Claim("tables 2 to 5", f"the proxy over {name}: throughput", V1, "gorgo-proxy", name,
              THROUGHPUT, ratio, ratio, _DISTANCE)
        for name, ratio in (("least load", 1.41), ("prefix trie", 1.66), ("gorgo as coded", 2.51))
    ),
    Claim("7", "GORGO below least load: throughput", V1, "gorgo as coded", "least load",
          THROUGHPUT, 0.57, 0.57),
    Claim("1", "geo-proximal routing over the proxy: p50 TTFT", V1, "geo-proximal", "gorgo-proxy",
          "ttft p50", 1.0, ANY, _DISTANCE),
    UntestableClaim("4.2, table 1", "TTFT over prompt tokens", "150.72 ms + 0.0938 ms a token",
                    "It is a property of an A100 under SGLang."),
]  # fmt: skip

_GORGO_V2: list[Claim | UntestableClaim] = [
    *(
        Claim("5, table 2", f"frozen weights over {name}: {measure}", case, "gorgo frozen", name,
              measure, low, high, why)
        for case, why in ((HELD_OUT, _REUSE), (AGENTS, _AGENTS))
        for name, measure, low, high in (
            ("session affinity", "ttft p95", 0.845, 0.931),
            ("session affinity", "e2e p95", 0.691, 0.857),
            ("least load", "ttft p95", 0.849, 0.871),
            ("least request", "ttft p95", 0.806, 0.855),
            ("prefix cache", "ttft p95", 0.761, 0.881),
        )
    ),
    *(
        Claim("4, table 2", "the same with live counters, prefix cache: ttft p95", case,
              "gorgo frozen", "prefix cache, live", "ttft p95", 0.761, 0.881, why)
        for case, why in ((HELD_OUT, _REUSE), (AGENTS, _AGENTS))
    ),
    Claim("5, table 2", "tuning online, as affinity: ttft p95", TUNING, "gorgo online",
          "session affinity", "ttft p95", 0.9, 1.15, "It is a quarter better than affinity here."),
    Claim("5, table 2", "tuning online over affinity: e2e p95", TUNING, "gorgo online",
          "session affinity", "e2e p95", 0.49, 0.49, "Affinity is not saturated in this window."),
    Claim("5, table 3", "full load over affinity: ttft p95", FULL, "gorgo frozen",
          "session affinity", "ttft p95", 4.5, 4.5, "Affinity sends too much to one replica here."),
    Claim("5, table 3", "full load over affinity: e2e p95", FULL, "gorgo frozen",
          "session affinity", "e2e p95", 0.878, 0.878),
    Claim("5, table 3", "light load over affinity: ttft p95", LIGHT, "gorgo frozen",
          "session affinity", "ttft p95", 0.886, 0.886),
    Claim("5, table 3", "light load over affinity: e2e p95", LIGHT, "gorgo frozen",
          "session affinity", "e2e p95", 0.804, 0.804),
    Claim("5, table 3", "full over light load: e2e p95", FULL, "gorgo frozen", "gorgo frozen",
          "e2e p95", 3.0, 4.85, other_case=LIGHT),
    Claim("D, table 7", "without the queue's weight over affinity: e2e p95", HELD_OUT,
          "gorgo, no queue", "session affinity", "e2e p95", 3.22, 3.22),
    Claim("D, table 7", "without the queue's weight over affinity: ttft p95", HELD_OUT,
          "gorgo, no queue", "session affinity", "ttft p95", 0.63, 0.63,
          "A replica with 64 places does not admit all requests of three."),
    Claim("C, table 6", "short prompts without reuse, over random: ttft p95", SHORT,
          "gorgo frozen", "random", "ttft p95", 1.0, ANY,
          "Its queue term still evens out the load."),
    UntestableClaim("3, table 1", "reuse of prompts in ART-Chat", "89.7 %",
                    "The trace is not at hand; Mooncake's conversations and coding agents stand "
                    "for it."),
    UntestableClaim("5, fig. 3", "the search converges after 672 samples", "18 steps",
                    "Its step size ends it after 19 evaluations without success, whatever the "
                    "traffic (test of CodedTuner)."),
]  # fmt: skip


def _preble(load: str, means: tuple[float, float], tails: tuple[float, float], why: str,
            **more: int) -> list[Claim]:  # fmt: skip
    case = preble_case(load, **more)
    on = f", {more['num_replicas']} replicas" if more else ""
    return [
        Claim("4.3, fig. 3", f"round robin over it, {load}{on}: {measure}", case, "round robin",
              "preble", measure, low, high, why)
        for measure, (low, high) in (("e2e mean", means), ("e2e p99", tails))
    ]  # fmt: skip


_MEANS, _TAILS = (1.5, 14.5), (2.0, 10.0)
_TOOLS = preble_case("tool use", AT)
_PREBLE: list[Claim | UntestableClaim] = [
    *_preble("tool use", _MEANS, _TAILS, _SELF),
    *_preble("tool use", _MEANS, _TAILS, _SELF, num_replicas=2),
    *_preble("ALFWorld", _MEANS, _TAILS, _DECODE),
    *_preble("LooGLE", _MEANS, _TAILS, _SELF),
    *_preble("code", (1.56, 1.8), (3.0, 4.0), _DECODE),
    Claim("4.3", "4 replicas no slower at twice the rate of 2: mean", preble_case("tool use"),
          "preble", "preble", "e2e mean", 0, 1,
          other_case=preble_case("tool use", num_replicas=2)),
    *(
        Claim("4.3, fig. 4", f"round robin over it, Azure's arrivals: {measure}", preble_case(MIX),
              "round robin", "preble", measure, 1.0, ANY)
        for measure in ("e2e mean", "e2e p99", "ttft mean")
    ),
    *(
        Claim("4.4, fig. 5", f"{words}: {measure}", _TOOLS, before, after, measure, 1.0, ANY, why)
        for words, before, after, why in (
            ("without E2 over with it", "round robin", "E2 only", ""),
            ("without rebalancing over with it", "E2 only", "E2 and rebalancing",
             "The loads of three minutes rarely differ by half."),
            ("without the decode ratio over with it", "E2 and rebalancing", "preble", ""),
        )
        for measure in ("e2e mean", "e2e p99")
    ),
    Claim("4.4, fig. 5", "first come over priority groups: p99", preble_case("tool use"), "preble",
          "preble", "e2e p99", 1.0, ANY, "Few requests wait in an engine.",
          other_case=preble_case("tool use", groups=10)),
    Claim("4.4, fig. 5", "first come as priority groups: mean", preble_case("tool use"), "preble",
          "preble", "e2e mean", 0.9, 1.1, other_case=preble_case("tool use", groups=10)),
    *(
        Claim("E, fig. 13", f"longest prefix over it, {load}: mean", preble_case(load),
              "longest prefix", "preble", "e2e mean", 1.0, ANY,
              "The prefixes share four replicas evenly by themselves.")
        for load in ("tool use", "LooGLE")
    ),
    Claim("3", "round robin as it, without shared prompts: mean", preble_case("Azure", AT),
          "round robin", "preble", "e2e mean", 0.9, 1.1),
    UntestableClaim("4.3, fig. 3", "round robin over it, video QA", "1.5-14.5x mean, 2-10x p99",
                    "No questions on videos are at hand."),
    UntestableClaim("4.3, fig. 3", "larger gains with Llama-3 70B on 8 H100", "no number",
                    "Replicas are modelled by token; a larger model only scales their times."),
    UntestableClaim("4.4", "requests that the global scheduler decides per second", "245, 2931",
                    "A rate of another program on another machine; this one's is in the log."),
    UntestableClaim("D, figs. 11 and 12", "gains over vLLM and a later SGLang", "no number",
                    "Engines are modelled, and differ in nothing that a model here has."),
    UntestableClaim("H, fig. 17", "gain over an oracle's partition", "as good or better",
                    "The oracle's partition is made by hand from each workload."),
]  # fmt: skip

CLAIMS: Mapping[str, Sequence[Claim | UntestableClaim]] = {
    "SkyWalker": _SKYWALKER,
    "GORGO v1": _GORGO_V1,
    "GORGO v2": _GORGO_V2,
    "Preble": _PREBLE,
}
