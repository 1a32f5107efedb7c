"""Claims of the papers of SkyWalker, GORGO and Preble, as ratios that a simulation can check."""

from __future__ import annotations

from dataclasses import dataclass

ANY = float("inf")
PUSH = "push: 4 replicas, 30 clients, trees of 2"
CHAT = "chat: 8 replicas, 80 clients a region"
TREES = "trees of 2: 12 replicas, 40/20/20 clients"
MIXED = "mixed trees: 2 x 4-branch in US, 20 and 20 x 2-branch"
V1 = "v1: three regions, 10 clients each"
V2 = "v2: one proxy, three regions, 84 clients, long conversations"
THROUGHPUT = "weighted"


def diurnal(replicas: int) -> str:
    """Return the case of figure 10 with ``replicas`` replicas in all."""
    return f"diurnal: {replicas} replicas, 120/40/40 clients"


def tools(rate: int) -> str:
    """Return Preble's case at ``rate`` requests a second."""
    return f"tool use, Zipf 1.1: {rate} requests/s on 4 replicas"


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim on ``measure`` of one system over another's, or on its value if there is no other.

    Attributes:
        low, high: Range in the paper; equal if the paper has one number.
        why: Reason if the simulation does not confirm the claim.
        other_case: Case of the other system if it differs from ``case``.
    """

    words: str
    case: str
    system: str
    other: str
    measure: str
    low: float
    high: float
    why: str = ""
    other_case: str = ""


_SPREAD = "Clients with one conversation at a time keep a hash ring balanced, so that its replicas \
keep whole conversations; prefixes of less than half a prompt, and forwarding, move SkyWalker's."
_ANEW = "What SkyWalker forwards or moves is computed anew; what a ring keeps in place is not."
_STARTS = "Lengths and shared starts of prompts, which the paper does not give, are assumed."
_FORWARD = (
    "What is forwarded loses its prefix, and long queues in one region meet regions that are \
full themselves."
)
_DISTANCE = "At equal load the proxy pays for its clients the distance that a balancer beside them \
does not; the paper's systems were not loaded alike."
_FULL = "All systems are saturated in this setting, and affinity keeps more of long conversations \
cached; the published weights price a round trip at a tenth of what it costs."
_EVEN = "A hundred prefixes share four replicas evenly by themselves, so that queues, which the \
ratio grows with, come late."

_SKYWALKER = [
    Claim("pushing by pending over blind", PUSH, "SP-P", "blind", THROUGHPUT, 1.27, 1.27,
          "The prompts' common start sends nearly all to one replica when pushed blindly."),
    Claim("blind over pushing by pending: p90 TTFT", PUSH, "blind", "SP-P", "ttft p90", 18.47,
          18.47),
    Claim("pushing by pending over blind: hits", PUSH, "SP-P", "blind", "hits", 1.30, 1.30,
          "Blind pushing follows the prefix as well, and here rarely has to leave it."),
    Claim("pushing by pending over by outstanding", PUSH, "SP-P", "SP-O", THROUGHPUT, 1.4, 1.4,
          "40 places are few for trees that ask for up to 480 requests at once."),
    Claim("by outstanding over by pending: p90 TTFT", PUSH, "SP-O", "SP-P", "ttft p90", 0.8, 1.25,
          "Who has no place among the 40 waits for its first token."),
    Claim("over least load", CHAT, "skywalker", "least load", THROUGHPUT, 1.03, 1.03),
    Claim("over round robin", CHAT, "skywalker", "round robin", THROUGHPUT, 1.12, 2.06),
    Claim("over the sglang router", CHAT, "skywalker", "sglang router", THROUGHPUT, 1.12, 2.06,
          _SPREAD),
    Claim("over hashing", CHAT, "skywalker", "hash", THROUGHPUT, 1.12, 2.06, _SPREAD),
    Claim("over its own ring", CHAT, "skywalker", "skywalker-ch", THROUGHPUT, 1.013, 1.082,
          _SPREAD),
    Claim("hashing over it: p50 TTFT", CHAT, "hash", "skywalker", "ttft p50", 1.74, 6.30),
    Claim("hashing over it: p90 TTFT", CHAT, "hash", "skywalker", "ttft p90", 4.28, 9.92,
          _ANEW),
    Claim("hits, round robin", CHAT, "round robin", "", "hits", 0.108, 0.166,
          _STARTS),
    Claim("hits, least load", CHAT, "least load", "", "hits", 0.283, 0.311, _STARTS),
    Claim("hits, skywalker", CHAT, "skywalker", "", "hits", 0.370, 0.466, _STARTS),
    Claim("hashing over it", TREES, "hash", "skywalker", THROUGHPUT, 1.02, 1.02),
    Claim("hashing over least load", TREES, "hash", "least load", THROUGHPUT, 1.4, 1.4),
    Claim("hits, skywalker", TREES, "skywalker", "", "hits", 0.896, 0.900,
          "Lengths of thoughts are assumed; the share of a prompt that is new follows from them."),
    Claim("over hashing", MIXED, "skywalker", "hash", THROUGHPUT, 1.0, ANY),
    Claim("hashing over it: p90 TTFT", MIXED, "hash", "skywalker", "ttft p90", 1.0, ANY),
    Claim("most over least outstanding, hashing", MIXED, "hash", "", "most/least", 3.36, 3.36,
          "Two clients with great trees meet twelve replicas: some get hardly anything else."),
    *(
        Claim(f"over region-local, {n} replicas", diurnal(n), "skywalker", "region-local",
              THROUGHPUT, 1.07, 1.18, _FORWARD)
        for n in (6, 9, 12)
    ),
    *(
        Claim(f"region-local over it, {n} replicas: p90 TTFT", diurnal(n), "region-local",
              "skywalker", "ttft p90", 1.0, ANY, _FORWARD)
        for n in (6, 9, 12)
    ),
    Claim("9 replicas over 12 region-local ones", diurnal(9), "skywalker", "region-local",
          THROUGHPUT, 1.0, ANY, _FORWARD, other_case=diurnal(12)),
]  # fmt: skip

_GORGO = [
    *(
        Claim(f"{name} over the proxy: p50 TTFT", V1, name, "gorgo-proxy", "ttft p50", 2.4, 2.5,
              _DISTANCE)
        for name in ("least load", "prefix trie")
    ),
    Claim("gorgo as coded over the proxy: p50 TTFT", V1, "gorgo as coded", "gorgo-proxy",
          "ttft p50", 2.4, 2.5, "As coded, a replica is full at five requests; the rest queues."),
    *(
        Claim(f"{name} over affinity: {measure}", V2, name, "session affinity", measure, low, high,
              _FULL)
        for name in ("gorgo published", "gorgo repaired")
        for measure, low, high in (("ttft p95", 0.845, 0.931), ("e2e p95", 0.691, 0.857))
    ),
    Claim("prefix cache over published GORGO: e2e p95", V2, "prefix cache", "gorgo published",
          "e2e p95", 1.51, 3.57),
    Claim("the same with live counters", V2, "prefix cache, live", "gorgo published", "e2e p95",
          1.51, 3.57, "What the baseline loses in the paper is its counters' age of 30 s."),
]  # fmt: skip

_PREBLE = [
    *(
        Claim(f"round robin over it, {rate}/s: {measure}", tools(rate), "round robin",
              "preble published", measure, low, high, _EVEN)
        for measure, low, high in (("e2e mean", 1.5, 14.5), ("e2e p99", 2.0, 10.0))
        for rate in (8, 16, 24, 32)
    ),
    *(
        Claim(f"longest prefix over it, {rate}/s: mean", tools(rate), "longest prefix",
              "preble published", "e2e mean", 1.0, ANY,
              "With a hundred prefixes none fills a replica, and following it costs no balance.")
        for rate in (16, 32)
    ),
    *(
        Claim(f"E2 alone over it, {rate}/s: p99", tools(rate), "E2 only", "preble published",
              "e2e p99", 1.0, ANY,
              "A full batch counts as minutes of work, and prefixes move that had better stay.")
        for rate in (16, 32)
    ),
]  # fmt: skip

CLAIMS = {"SkyWalker": _SKYWALKER, "GORGO": _GORGO, "Preble": _PREBLE}
