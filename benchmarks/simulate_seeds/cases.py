"""Cases that each paper compared, as far as it describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banaserve_route.sim.programs import chat, shared_prefixes, tree_of_thoughts
from banaserve_route.sim.replica import Accelerator
from banaserve_route.sim.world import RegionSystem, Setting

# AWS us-east-2, eu-central-1, ap-northeast-1; SkyWalker says "up to 200 ms".
FAR = {("us", "eu"): 100.0, ("us", "asia"): 150.0, ("eu", "asia"): 220.0}
RR = RegionSystem("round_robin", central=True)
LL = RegionSystem("least_requests", central=True)
CH = RegionSystem("consistent_hash", "as-coded", central=True)
SGL = RegionSystem("cache_aware", "sglang-0.4", central=True)
SKYWALKER = RegionSystem("skywalker", "as-coded")
SKYWALKER_CH = RegionSystem("skywalker_ch", "as-coded")
LOAD_AWARE = RegionSystem("load_aware", central=True)


@dataclass(frozen=True, slots=True)
class PaperCase:
    """A table: a setting, the systems in it, and the paper's statement about it."""

    name: str
    setting: Setting
    systems: dict[str, RegionSystem]
    paper: str


def _regions(
    counts: tuple[int, int, int], clients: Sequence[tuple[int, object]], **more: object
) -> Setting:
    regions = ("us", "eu", "asia")
    return Setting(
        dict(zip(regions, counts, strict=True)),
        {region: [one] for region, one in zip(regions, clients, strict=True)},  # type: ignore[list-item]
        FAR,
        **more,  # type: ignore[arg-type]
    )


def skywalker() -> list[PaperCase]:
    """Return cases of sections 5.1 and 5.2 and figure 10, with the authors' code's defaults."""
    talk, two, four = chat(256, 60, 150), tree_of_thoughts(2), tree_of_thoughts(4)
    single = {"round robin": RR, "least load": LL, "hash": CH, "sglang router": SGL}
    both = {"skywalker": SKYWALKER, "skywalker-ch": SKYWALKER_CH}
    pushes = {
        name: RegionSystem("skywalker", "as-coded", options={"push": push})
        for name, push in (("SP-P", "pending"), ("SP-O", "outstanding"), ("blind", "blind"))
    }
    cases = [
        PaperCase(
            "push: 4 replicas, 30 clients, trees of 2",
            Setting({"us": 4}, {"us": [(30, two)]}),
            pushes,
            "SP-P over blind: throughput 1.27x, p90 TTFT 18.5x lower, hits 0.90 against 0.69; "
            "over SP-O: throughput 1.4x, TTFT alike",
        ),
        PaperCase(
            "chat: 8 replicas, 80 clients a region",
            _regions((3, 2, 3), [(80, talk)] * 3),
            single | both | {"load-aware": LOAD_AWARE},
            "skywalker over least load 1.03x; hits RR 0.11-0.17, LL 0.28-0.31, skywalker 0.37-0.47",
        ),
        PaperCase(
            "trees of 2: 12 replicas, 40/20/20 clients",
            _regions((4, 4, 4), [(40, two), (20, two), (20, two)]),
            single | both,
            "hash 2 % above skywalker, 1.4x least load; hits RR and LL 0.59, skywalker 0.90",
        ),
        PaperCase(
            "mixed trees: 2 x 4-branch in US, 20 and 20 x 2-branch",
            _regions((4, 4, 4), [(2, four), (20, two), (20, two)]),
            single | both,
            "hash clearly below skywalker; most/least outstanding hash 3.36, sglang 2.22",
        ),
    ]
    local = RegionSystem("skywalker", "as-coded", forwards=False)
    for replicas in (2, 3, 4):
        cases.append(
            PaperCase(
                f"diurnal: {3 * replicas} replicas, 120/40/40 clients",
                _regions((replicas,) * 3, [(120, talk), (40, talk), (40, talk)]),
                {"region-local": local, "skywalker": SKYWALKER},
                "skywalker 1.07-1.18x at equal replicas; 9 replicas serve what 12 region-local do",
            )
        )
    return cases


def gorgo() -> list[PaperCase]:
    """Return v1 (tables 2) and v2 (table 3): three regions of fast replicas, long conversations."""
    fast = Accelerator(25.0, 0.094, 0.2, 200_000, 150_000, 128, 8192)
    v1 = PaperCase(
        "v1: three regions, 10 clients each",
        _regions((1, 1, 1), [(10, chat(256, 200, 400))] * 3, accelerator=fast),
        {
            "least load": LL,
            "prefix trie": RegionSystem("skywalker", "as-coded", options={"push": "blind"}),
            "gorgo as coded": RegionSystem("gorgo_v1", "as-coded"),
            "gorgo repaired": RegionSystem("gorgo_v1"),
            "gorgo-proxy": RegionSystem("gorgo_v1", "proxy-as-coded", central=True),
        },
        "median TTFT of the proxy 2.4-2.5x lower than all others, measured at unequal load",
    )
    long = _regions(
        (1, 1, 1),
        [(28, chat(3000, 500, 100))] * 3,
        accelerator=Accelerator(9.0, 0.063, 0.15, 300_000, 250_000, 64, 8192),
        duration_s=180.0,
    )
    v2 = PaperCase(
        "v2: one proxy, three regions, 84 clients, long conversations",
        long,
        {
            "gorgo published": RegionSystem("gorgo", "published", central=True),
            "gorgo as coded": RegionSystem("gorgo", "as-coded", central=True),
            "gorgo untuned": RegionSystem("gorgo", central=True),
            "gorgo repaired": RegionSystem("gorgo", central=True, options={"tuning": "repaired"}),
            "session affinity": RegionSystem("session_affinity", "as-coded", central=True),
            "least load": RegionSystem("least_load", "as-coded", central=True, staleness_s=30.0),
            "least load, live": RegionSystem("least_load", central=True),
            "least request": LL,
            "prefix cache": RegionSystem("prefix_cache", central=True, staleness_s=30.0),
            "prefix cache, live": RegionSystem("prefix_cache", central=True),
        },
        "gorgo over affinity: TTFT p95 -7 to -15 %, E2E p95 -14 to -31 %; TTFT p95 worse at full "
        "load; two of its baselines read counters that are 30 s old",
    )
    return [v1, v2]


def preble() -> list[PaperCase]:
    """Return cases of figures 3 and 5: few long prefixes, four replicas, open loop."""
    a6000 = Accelerator(25.0, 0.12, 0.25, 198_516, 100_000, 128, 512)
    cases = []
    for rate in (8, 16, 24, 32):
        program = shared_prefixes(100, 1536, 280, 43, 1.1)
        setting = Setting(
            {"us": 4},
            {"us": [(rate * 100, program)]},
            accelerator=a6000,
            duration_s=115.0,
            start_within_s=100.0,
        )
        cases.append(
            PaperCase(
                f"tool use, Zipf 1.1: {rate} requests/s on 4 replicas",
                setting,
                {
                    "round robin": RR,
                    "longest prefix": RegionSystem(
                        "cache_aware", central=True, options={"balance_abs": 10**9}
                    ),
                    "E2 only": RegionSystem(
                        "preble",
                        central=True,
                        options={"balance_threshold": 0.0, "scales_hot_prefixes": False},
                    ),
                    "preble published": RegionSystem("preble", "published", central=True),
                    "preble as coded": RegionSystem("preble", "as-coded", central=True),
                    "preble repaired": RegionSystem("preble", central=True),
                },
                "round robin over preble: mean 1.5-14.5x, p99 2-10x, growing with the rate; "
                "longest prefix alone worse in the mean",
            )
        )
    return cases


PAPERS: dict[str, Callable[[], list[PaperCase]]] = {
    "skywalker": skywalker,
    "gorgo": gorgo,
    "preble": preble,
}
