"""Cases of the papers, as far as they describe them, on the loads of ``bench routers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random

from banaserve.sim.trace import Arrival
from banaserve_route.policies.gorgo.tuner import numbers
from banaserve_route.sim.arrivals import replay
from banaserve_route.sim.replica import Accelerator
from banaserve_route.sim.world import RegionSystem, Setting, simulate
from benchmarks.routers.cells import FAR, open_loop
from benchmarks.routers.loads import LOADS, LoadSession, closed_loop, trace_rows, trees

MakeSystem = Callable[[Path], RegionSystem]
"""Function that returns a system which must first be tuned on a load of the data folder."""

Systems = Mapping[str, RegionSystem | MakeSystem]


@dataclass(frozen=True, slots=True)
class PaperCase:
    """Systems that meet one load.

    Attributes:
        setting: Function that returns the setting of a seed, with the loads of a data folder.
        load: Load in words.
        seed_factor: Factor of the number of seeds; above 1 where figures vary much.
    """

    name: str
    load: str
    setting: Callable[[Path, int], Setting]
    systems: Systems
    seed_factor: int = 1


AT = 1.0
"""Level of load that the replicas can just do with one unlimited cache."""

DURATION_S = 90.0
"""Virtual time of closed loops."""

# SkyWalker: one L4 for each replica, and clients with one program at a time.

PUSH = "push"
CHAT = "chat"
TREES = "trees"
MIXED = "mixed trees"
DIURNAL = {num: f"diurnal, {num} replicas" for num in (6, 9, 12)}

RR = RegionSystem("round_robin", central=True)
LL = RegionSystem("least_requests", central=True)
CH = RegionSystem("consistent_hash", "as-coded", central=True)
SGL = RegionSystem("cache_aware", "sglang-0.4", central=True)
GKE = RegionSystem("round_robin", forwards=False)
"""Like a gateway over clusters: the nearest one serves, its replicas in turn."""

SKYWALKER = RegionSystem("skywalker", "as-coded")
SKYWALKER_CH = RegionSystem("skywalker_ch", "as-coded")
_SINGLE = {"round robin": RR, "least load": LL, "hash": CH, "sglang router": SGL, "gateway": GKE}
_BOTH = {"skywalker": SKYWALKER, "skywalker-ch": SKYWALKER_CH}
_BRANCHES = {2: trees(2), 4: trees(4)}


def _clients(
    replicas: tuple[int, int, int], clients: tuple[int, int, int], loads: tuple[str, str, str]
) -> Callable[[Path, int], Setting]:
    """Return the settings of clients in three regions, each with a closed loop of its load."""

    def setting(data: Path, seed: int) -> Setting:
        reads = {"chats": LOADS["chats"], "trees": _BRANCHES[2], "trees of 4": _BRANCHES[4]}
        regions = ("us", "eu", "asia")
        return Setting(
            {one: number for one, number in zip(regions, replicas, strict=True) if number},
            {
                one: [(number, closed_loop(reads[load], data))]
                for one, number, load in zip(regions, clients, loads, strict=True)
                if number
            },
            FAR,
            duration_s=DURATION_S,
        )

    return setting


def skywalker() -> list[PaperCase]:
    """Return the cases of sections 5.1 and 5.2, with the defaults of the authors' code."""
    chats, two = ("chats",) * 3, ("trees",) * 3
    pushes = {
        name: RegionSystem("skywalker", "as-coded", options={"push": push})
        for name, push in (("SP-P", "pending"), ("SP-O", "outstanding"), ("blind", "blind"))
    }
    local = RegionSystem("skywalker", "as-coded", forwards=False)
    repaired = {"skywalker repaired": RegionSystem("skywalker")}
    return [
        PaperCase(
            PUSH,
            "GSM8K trees of 2 branches, 30 clients, 4 replicas",
            _clients((4, 0, 0), (30, 0, 0), two),
            pushes | repaired,
        ),
        PaperCase(
            CHAT,
            "MT-bench chats, 80 clients a region, 8 replicas",
            _clients((3, 2, 3), (80, 80, 80), chats),
            _SINGLE | _BOTH | repaired,
            seed_factor=2,
        ),
        PaperCase(
            TREES,
            "GSM8K trees of 2 branches, 40/20/20 clients, 12 replicas",
            _clients((4, 4, 4), (40, 20, 20), two),
            _SINGLE | _BOTH | repaired,
        ),
        PaperCase(
            MIXED,
            "GSM8K trees, 2 clients of 4 branches and 20/20 of 2, 12 replicas",
            _clients((4, 4, 4), (2, 20, 20), ("trees of 4", "trees", "trees")),
            _SINGLE | _BOTH | repaired,
            seed_factor=2,
        ),
        *(
            PaperCase(
                name,
                f"MT-bench chats, 120/40/40 clients, {num} replicas",
                _clients((num // 3,) * 3, (120, 40, 40), chats),
                {"region-local": local, "skywalker": SKYWALKER} | repaired,
            )
            for num, name in DIURNAL.items()
        ),
    ]


# GORGO v1: three regions of fast replicas. Its clients enter at the nearest region.

V1 = "v1"


def _few_chats(data: Path, seed: int) -> Setting:
    fast = Accelerator(25.0, 0.094, 0.2, 200_000, 150_000, 128, 8192)
    setting = _clients((1, 1, 1), (10, 10, 10), ("chats",) * 3)(data, seed)
    return replace(setting, accelerator=fast)


def gorgo_v1() -> list[PaperCase]:
    """Return the case of tables 2 to 5."""
    return [
        PaperCase(
            V1,
            "MT-bench chats, 10 clients a region, 3 replicas",
            _few_chats,
            {
                "least load": LL,
                "prefix trie": RegionSystem("skywalker", "as-coded", options={"push": "blind"}),
                "geo-proximal": GKE,
                "gorgo as coded": RegionSystem("gorgo_v1", "as-coded"),
                "gorgo repaired": RegionSystem("gorgo_v1"),
                "gorgo-proxy": RegionSystem("gorgo_v1", "proxy-as-coded", central=True),
            },
            seed_factor=3,
        )
    ]


# GORGO v2: one proxy for three regions, and windows of a trace: the first one to tune on, each of
# the others held out, one for each seed.

WINDOW_S = 300.0
TUNING, HELD_OUT, AGENTS = "v2 tuning", "v2 held out", "v2 agents"
FULL, LIGHT, SHORT = "v2 full load", "v2 light load", "v2 short prompts"
_MOONCAKE = "Mooncake conversations"
_L40S = Accelerator(9.0, 0.063, 0.15, 300_000, 2_000_000, 64, 8192)
"""Two L40S with Qwen3.5-35B-A3B, whose KV takes about 20 KiB a token."""

_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 24_000, 128


def window(path: Path, number: int, time_scale: float) -> Setting:
    """Return a window of a trace, with arrivals ``time_scale`` times as far apart.

    Long prompts are left out and answers cut, as in the paper.
    """
    rows: list[Arrival] = [
        row._replace(
            at_s=row.at_s - number * WINDOW_S,
            output_tokens=min(row.output_tokens, _MAX_OUTPUT_TOKENS),
        )
        for row in trace_rows(path)
        if number * WINDOW_S <= row.at_s < (number + 1) * WINDOW_S
        and row.prompt_tokens <= _MAX_PROMPT_TOKENS
    ]
    return Setting(
        {"us": 1, "eu": 1, "asia": 1},
        {},
        FAR,
        _L40S,
        duration_s=3600.0,
        arrivals={"us": replay(rows, time_scale)},
    )


def _window(trace: str, time_scale: float, data: Path, seed: int) -> Setting:
    return window(data / f"traces/{trace}.jsonl.zst", 1 + seed, time_scale)


def _tuning_window(data: Path, seed: int) -> Setting:
    return window(data / "traces/mooncake_conversation.jsonl.zst", 0, 1.0)


def _agents(data: Path, seed: int) -> Setting:
    rng = Random(f"{seed}/agents")
    sessions = list(LOADS["agents"](data, rng, 1200))
    replicas = {"us": 1, "eu": 1, "asia": 1}
    return open_loop(sessions, AT, replicas, {"us": 1.0}, _L40S, seed, rng)[0]


@lru_cache
def _frozen(tuning: Callable[[Path, int], Setting], data: Path) -> RegionSystem:
    """Return GORGO with the weights that its own search has found in a setting to tune on."""
    online = RegionSystem("gorgo", "as-coded", central=True)
    outcome = simulate(tuning(data, -1), online, 0)
    w_rtt, w_queue = numbers(outcome.states[0], "incumbent", 2)
    options = {"w_rtt": w_rtt, "w_queue": w_queue}
    return RegionSystem("gorgo", "published", central=True, options=options)


def gorgo_v2() -> list[PaperCase]:
    """Return the cases of tables 2, 3, 6 and 7."""
    affinity = RegionSystem("session_affinity", "as-coded", central=True)
    frozen: MakeSystem = partial(_frozen, _tuning_window)
    few: Systems = {"gorgo frozen": frozen, "session affinity": affinity, "least request": LL}
    alone = {"w_rtt": 0.23, "w_queue": 0.0}
    others: Systems = {
        "gorgo published": RegionSystem("gorgo", "published", central=True),
        "gorgo repaired": RegionSystem("gorgo", central=True),
        "gorgo, no queue": RegionSystem("gorgo", "published", central=True, options=alone),
        "least load": RegionSystem("least_load", "as-coded", central=True, staleness_s=30.0),
        "prefix cache": RegionSystem("prefix_cache", central=True, staleness_s=30.0),
        "prefix cache, live": RegionSystem("prefix_cache", central=True),
    }
    trace = "mooncake_conversation"
    online = {"gorgo online": RegionSystem("gorgo", "as-coded", central=True)}
    return [
        PaperCase(
            TUNING,
            f"{_MOONCAKE}, tuning window",
            _tuning_window,
            online | {"session affinity": affinity},
        ),
        PaperCase(
            HELD_OUT,
            f"{_MOONCAKE}, held-out windows",
            partial(_window, trace, 1.0),
            {**few, **others},
        ),
        PaperCase(
            AGENTS,
            "coding agents, 3 replicas at what they can do",
            _agents,
            {**few, **others, "gorgo frozen": partial(_frozen, _agents)},
        ),
        PaperCase(FULL, f"{_MOONCAKE}, twice the rate", partial(_window, trace, 0.5), few),
        PaperCase(LIGHT, f"{_MOONCAKE}, two thirds of the rate", partial(_window, trace, 1.5), few),
        PaperCase(
            SHORT,
            "Azure conversations, no shared prefixes",
            partial(_window, "azure2023_conv", 1.0),
            {"gorgo frozen": frozen, "random": RegionSystem("random", central=True)},
        ),
    ]


# Preble: replicas of one region, and requests that arrive whatever is answered.

ABOVE = 2.0
_A6000 = Accelerator(25.0, 0.12, 0.25, 198_516, 100_000, 128, 512)
_CALLS = {"tool use": 1200, "ALFWorld": 2400, "code": 1200, "LooGLE": 600, "Azure": 600}
_LONGEST = {
    "longest prefix": RegionSystem("cache_aware", central=True, options={"balance_abs": 10**9})
}
_STEPS = {
    "E2 only": {"balance_threshold": 0.0, "scales_hot_prefixes": False, "decode_fraction": 1.0},
    "E2 and rebalancing": {"decode_fraction": 1.0},
}
PREBLE = RegionSystem("preble", "published", central=True)
_PAIR = {"round robin": RR, "preble": PREBLE}
MIX = "tool use and LooGLE, Azure's arrivals"


def preble_case(load: str, level: float = ABOVE, num_replicas: int = 4, groups: int = 1) -> str:
    last = f", {groups} groups" if groups > 1 else ""
    return f"{load} at {level:g} on {num_replicas}{last}"


def _sessions(load: str, data: Path, rng: Random) -> list[LoadSession]:
    if load != MIX:
        return list(LOADS[load](data, rng, _CALLS[load]))
    both = [*LOADS["tool use"](data, rng, 600), *LOADS["LooGLE"](data, rng, 300)]
    rng.shuffle(both)
    rows = trace_rows(data / "traces/azure2023_conv.jsonl.zst")[: len(both)]
    return [replace(one, at_s=row.at_s) for one, row in zip(both, rows, strict=True)]


def _open(
    load: str, level: float, num_replicas: int, groups: int, data: Path, seed: int
) -> Setting:
    rng = Random(f"{seed}/{load}")
    spec = replace(_A6000, num_groups=groups)
    sessions = _sessions(load, data, rng)
    return open_loop(sessions, level, {"us": num_replicas}, {"us": 1.0}, spec, seed, rng)[0]


def preble() -> list[PaperCase]:
    """Return the cases of figures 3, 4, 5 and 13."""
    steps = {
        name: RegionSystem("preble", "published", central=True, options=options)
        for name, options in _STEPS.items()
    }
    repaired = {"preble repaired": RegionSystem("preble", central=True)}

    def case(
        load: str,
        systems: Mapping[str, RegionSystem],
        level: float = ABOVE,
        num_replicas: int = 4,
        groups: int = 1,
    ) -> PaperCase:
        words = f"{load}, {level:g} of what {num_replicas} replicas can do"
        if groups > 1:
            words += f", {groups} priority groups"
        name = preble_case(load, level, num_replicas, groups)
        setting = partial(_open, load, level, num_replicas, groups)
        factor = 2 if load in ("tool use", "LooGLE") else 1
        return PaperCase(name, words, setting, systems, factor)

    return [
        case("tool use", _PAIR | _LONGEST | steps | repaired, AT),
        case("tool use", _PAIR | _LONGEST | steps | repaired),
        case("tool use", {"preble": PREBLE}, groups=10),
        case("tool use", _PAIR, num_replicas=2),
        case("ALFWorld", _PAIR),
        case("LooGLE", _PAIR | _LONGEST),
        case("code", _PAIR),
        case(MIX, _PAIR),
        case("Azure", _PAIR, AT),
    ]


PAPERS: Mapping[str, Callable[[], list[PaperCase]]] = {
    "SkyWalker": skywalker,
    "GORGO v1": gorgo_v1,
    "GORGO v2": gorgo_v2,
    "Preble": preble,
}
