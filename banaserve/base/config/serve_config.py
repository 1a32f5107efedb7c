"""Configuration of ``banaserve serve``: each field is declared together with its option."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE, PEER_KEY_VARIABLE, key_option
from banaserve.base.access.tenants import TenantKey, read_tenants
from banaserve.base.arguments import (
    ABOVE_0,
    NOT_NEGATIVE,
    Options,
    Rule,
    check_rules,
    derived,
    extra,
    option,
    options_of,
    pairs,
)
from banaserve.base.config.orchestrator_config import SLO_AWARE, OrchestratorConfig
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import InstanceId, Role

DEFAULT_SKIP_PREFILL_BELOW_TOKENS = 16
"""Number of uncached tokens up to which a prompt gets no prefill leg.

Measured (``benchmarks/log/handover-cpu-cost.md``): at 8 and 16 tokens, one leg and two differ by
less than their spread; at 32, the streams of a decode instance stall for 0.22 s with one leg and
for 0.13 s with two."""
SCHEDULERS = ("vllm", "preble")
MINIATURE = "miniature"
"""Name of the model that runs in place of a modelled one."""
DEFAULT_MICROBATCHES, MAX_MICROBATCHES = 32, 64
"""Default and maximum limit of the micro-batches of a step; their number is computed at each step.

The default bounds the number in case the computation is wrong. Beyond the maximum, even the largest
steps have micro-batches that are too small to be worth sending."""
MIGRATION_ATTENTION = "auto", "vllm", "kernels", "reference", "triton", "flashinfer"
GUEST_STALL_ON_CPU_S, GUEST_STALL_ON_GPU_S = 1.0, 10.0
"""Default silence of a guest after which it is given up.

On a CPU a silent guest that uses no processor does nothing. On a GPU it may wait for the GPU."""
LEAST_GUEST_SHARE = 0.05
"""Least share of a device for guests: with it, a guest's host waits 20 times the computing time."""

_MAX_DILATION = 1000.0
_SHARE_OF_SEVERAL = 0.5
"""Largest store share of one of several tenants: it cannot evict all blocks of the others."""
KEPT_QUOTA = 0.25
"""Largest share of the store that requests may keep: most of it follows the load."""
_STARTS = ("auto", "fork", "spawn")
PORT_RULE = Rule(lambda value: 0 < value < 65536, "must be between 1 and 65535")


def parse_pd(text: str, least: int = 1) -> tuple[int, int]:
    """Return the two numbers of ``P:D``, each at least ``least``.

    Raises:
        UserError: ``text`` has another form.
    """
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text.strip(), re.ASCII)
    if match is None or min(prefill := int(match[1]), decode := int(match[2])) < least:
        raise UserError(
            f"--pd {text}: write the number of prefill and of decode instances, such as 1:1 or "
            "2:2 (for engines that do both, use --colocated N)"
        )
    return prefill, decode


def parse_attention(text: str) -> str:
    """Return the name of attention kernels.

    Raises:
        UserError: There are no such kernels; the message has the nearest name.
    """
    check_known("attention", text, MIGRATION_ATTENTION)
    return text


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step of an engine; 0 leaves a limit to the engine.

    Attributes:
        num_tokens: Maximum number of tokens that a step computes.
        num_requests: Maximum number of requests that run at once.
    """

    num_tokens: int = 0
    num_requests: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_tokens or self.num_requests)


_instances = partial(option, group="instances")
_nodes = partial(option, group="nodes")
_server = partial(option, group="server")
_server_key = partial(key_option, group="server")
_store = partial(option, group="store")
_routing = partial(option, group="routing")
_migration = partial(option, group="migration")
_pacing = partial(option, group="pacing")


def _tensor_parallel(role: Role) -> Any:
    """Declare the tensor-parallel degree of engines for a role."""
    return _instances(
        f"tensor-parallel ranks of an engine for {role.value} (as --tensor-parallel-size)",
        0,
        name=f"--{role.value}-tensor-parallel-size",
        rule=NOT_NEGATIVE,
    )


def _budget(role: Role) -> Any:
    """Declare the budget of an instance while it has a role."""
    tokens, requests = (
        extra(
            f"--{role.value}-{name}",
            f"most {what} of a step of {role.value} instances (as --{name})",
            0,
            group="budgets",
            rule=NOT_NEGATIVE,
        )
        for name, what in (("max-num-batched-tokens", "tokens"), ("max-num-seqs", "sequences"))
    )

    def read(known: Namespace) -> Budget:
        found = vars(known)
        return Budget(
            found[f"{role.value}_max_num_batched_tokens"], found[f"{role.value}_max_num_seqs"]
        )

    return derived(Budget(), read, tokens, requests)


def _is_split(known: Namespace) -> bool:
    return not (known.colocated or known.instances)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Configuration of ``banaserve serve``; the help text of an option says what a field means.

    Attributes:
        prefill, decode: Numbers of prefill and of decode instances; 0 with ``colocated``.
        colocated: Number of instances that serve both legs; 0 with ``--pd``.
        kv_store_tenant_quota: Largest share of the memory for one tenant; None for half of it if
            there are several tenants, and all of it otherwise.
        take_over: Run directory of a running server whose socket this one takes over; empty for
            this user's only server on the port, None to take over none.
        must_migrate: True if the server must not start where model or options forbid migration.
        migration_stall_s: None for a limit that suits the device.
        vllm_argv: vLLM's own options.
    """

    model: str = _instances(
        "smollm2-135m, llama-13b, opt-13b, a Hugging Face id or a folder",
        "smollm2-135m",
        decided=True,
        read=lambda known: known.model or (MINIATURE if known.pace else None),
    )
    prefill: int = derived(
        1,
        lambda known: (known.pd or (1, 1))[0] * _is_split(known),
        extra(
            "--pd",
            "prefill and decode instances (1:1)",
            kind=parse_pd,
            group="instances",
            metavar="P:D",
        ),
    )
    decode: int = derived(1, lambda known: (known.pd or (1, 1))[1] * _is_split(known))
    colocated: int = _instances(
        "number of instances that do both",
        0,
        rule=NOT_NEGATIVE,
        read=lambda known: known.colocated or known.instances,
        also=(
            extra(
                "--instances",
                "number of instances that begin as both; what each does is left to the elastic "
                "policy",
                0,
                group="instances",
                rule=NOT_NEGATIVE,
            ),
            extra(
                "--elastic",
                "let roles and step sizes follow the load: --orchestrator on with the policy "
                "elastic",
                False,
                group="instances",
            ),
        ),
    )
    scale_max: int = _instances(
        "let the orchestrator add instances under load, to N in all (0: it adds none)", 0
    )
    scale_min: int = _instances("with --scale-max: remove idle ones, down to N in all (1)", 1)
    devices: tuple[str, ...] = _instances(
        "CUDA devices of each instance, such as '0;1;2,3;4,5'",
        (),
        action="store",
        read=lambda known: tuple(known.devices.split(";")) if known.devices else (),
    )
    prefill_tensor_parallel: int = _tensor_parallel(Role.PREFILL)
    decode_tensor_parallel: int = _tensor_parallel(Role.DECODE)
    engine_start: str = _instances(
        "way to start an engine: fork, for CPUs; spawn, for GPUs; auto, which of both fits",
        "auto",
        metavar="WAY",
        rule=Rule(lambda value: value in _STARTS, f"one of {', '.join(_STARTS)}"),
    )
    threads_per_instance: int = _instances(
        "CPU threads of each engine (0: share the cores)", 0, rule=NOT_NEGATIVE
    )
    scheduler: str = _instances(
        "order of waiting requests in an engine: vLLM's, or Preble's by the cached fraction",
        "vllm",
        choices=SCHEDULERS,
    )
    start_timeout_s: float = _instances(
        "time that an engine may take to start", 600.0, rule=ABOVE_0
    )
    restart_grace_s: float = _instances(
        "time that a request waits for a restart where no instance serves", 60.0, rule=NOT_NEGATIVE
    )
    engine_stall_s: float = _instances(
        "silence after which an engine on a CPU that uses no processor is started again",
        60.0,
        name="--engine-stall-timeout",
        rule=ABOVE_0,
    )
    engine_spin_s: float = _instances(
        "silence after which any engine is started again: more than its longest step",
        600.0,
        name="--engine-spin-timeout",
        rule=ABOVE_0,
    )
    run_dir: Path | None = _instances(
        "folder of logs (a new one below the state directory)", None, Path
    )
    log_max_size: str = _instances(
        "size at which a log is begun anew, the last one being kept; '' sets no limit",
        "64MiB",
        metavar="SIZE",
        also=(
            extra(
                "--config",
                "TOML file with these options; the command line wins",
                kind=Path,
                group="instances",
            ),
        ),
    )

    nodes: tuple[str, ...] = _nodes(
        "run the engines on another machine, where `banaserve node` listens; repeat for several",
        (),
        name="--node",
        metavar="HOST:PORT",
    )
    cluster: str = _nodes(
        "run the engines on the nodes of a Ray cluster: its address, or auto for the one that this "
        "machine is in",
        "",
        metavar="ADDRESS",
    )
    cluster_key: str = key_option(
        "--cluster-key",
        "",
        f"file with the key that this server and its nodes share (${CLUSTER_KEY_VARIABLE})",
        CLUSTER_KEY_VARIABLE,
        group="nodes",
    )

    host: str = _server("address to listen at", "127.0.0.1")
    port: int = _server("port to listen at", 8000, metavar="PORT", rule=PORT_RULE)
    take_over: str | None = _server(
        "replace the server of that run folder, or the one on --port: the new server takes its "
        "socket once it can serve, and the old one ends after its last request",
        None,
        nargs="?",
        const="",
        metavar="RUN_DIR",
    )
    api_keys: tuple[str, ...] = _server_key(
        "--api-key",
        "key that clients must give; repeat for several ($BANASERVE_API_KEY)",
        "file with API keys, one a line: other users can read a command line",
        "BANASERVE_API_KEY",
        is_repeated=True,
    )
    tenants: tuple[TenantKey, ...] = _server(
        "TOML file with API keys and their limits",
        (),
        Path,
        action="store",
        metavar="FILE",
        read=lambda known: read_tenants(known.tenants) if known.tenants else (),
    )
    max_concurrent_requests: int = _server(
        "requests that may be under way at once; more are answered with status 429",
        512,
        rule=ABOVE_0,
    )
    admin_key: str = _server_key(
        "--admin-key",
        "key that opens the admin API, also $BANASERVE_ADMIN_KEY (one is made for the run and kept "
        "in its folder)",
        "file with the admin key",
        "BANASERVE_ADMIN_KEY",
    )
    ui: bool = _server("serve no page under /ui", True, name="--no-ui")
    metrics_key: str = _server_key(
        "--metrics-key",
        "key that /metrics then needs, also $BANASERVE_METRICS_KEY; API keys open it too (none: "
        "all may read it)",
        "file with that key",
        "BANASERVE_METRICS_KEY",
    )
    max_body_size: str = _server("most bytes of a request's body", "32MiB", metavar="SIZE")
    max_connections: int = _server(
        "connections of clients; beyond, the oldest without a key is closed (0: by the limit of "
        "file descriptors, 16384 at most)",
        0,
        rule=NOT_NEGATIVE,
    )
    max_connections_per_address: int = _server(
        "connections from one address without a key (0: a quarter of all)", 0, rule=NOT_NEGATIVE
    )
    body_timeout_s: float = _server(
        "time for a request's body, and a second more for each 64 KiB received",
        30.0,
        rule=ABOVE_0,
    )
    request_bounds: Options = pairs(
        "what a request may hold at most, such as messages=4096; repeat for several",
        name="--request-bound",
        metavar="NAME=N",
        group="server",
    )
    request_timeout_s: float = _server(
        "time for a whole request, all of its legs", 600.0, rule=ABOVE_0
    )
    drain_timeout_s: float = _server(
        "time that SIGTERM waits for requests under way; 0 waits for none", 30.0, rule=NOT_NEGATIVE
    )

    kv_store_size: str = _store("memory of the store, such as 8GiB", "1GiB", metavar="SIZE")
    kv_store_ssd: Path | None = _store(
        "folder on a local disk for KV blocks", None, Path, metavar="FOLDER"
    )
    kv_store_ssd_size: str = _store("size of the files on that disk", "20GiB", metavar="SIZE")
    kv_store_distributed: str = _store(
        "share KV blocks with other stores, such as mooncake://HOST:PORT", "", metavar="URL"
    )
    kv_store_listen: str = _store(
        "let the stores of other servers fetch KV blocks here, with the same key and model",
        "",
        metavar="HOST:PORT",
    )
    kv_store_peers: tuple[str, ...] = _store(
        "fetch KV blocks from the store of another server; repeat for several",
        (),
        name="--kv-store-peer",
        metavar="HOST:PORT",
    )
    kv_store_peer_key: str = key_option(
        "--kv-store-peer-key",
        "",
        f"file with the key that these stores share (${PEER_KEY_VARIABLE})",
        PEER_KEY_VARIABLE,
        group="store",
    )
    kv_store_tenant_quota: float | None = _store(
        "share of the memory for one API key, or one cache_salt where there are none (0.5 with "
        "several keys, else 1)",
        None,
        float,
        metavar="FRACTION",
        rule=Rule(
            lambda value: 0.0 < value <= 1.0, "a share of the memory, more than 0 and at most 1"
        ),
    )
    kv_store_kept_quota: float = _store(
        "share of the memory, and of the part of each API key, for KV that requests ask to keep",
        KEPT_QUOTA,
        metavar="FRACTION",
        rule=Rule(lambda value: 0.0 <= value <= 1.0, "a share of the memory, from 0 to 1"),
    )
    kv_store_fetch: str = _store(
        "fetch as much of a prefix as is faster than computing it (cheaper), or all of it (always)",
        "cheaper",
        choices=("cheaper", "always"),
    )
    kv_store_verify: bool = _store(
        "keep checksums of KV blocks in memory and check them before each use", False
    )
    kv_store_salt: str = _store("text; servers with another one share no KV blocks", "")
    kv_store: bool = _store(
        "serve without the store; needs --colocated", True, name="--no-kv-store"
    )

    routing_policy: str = _routing(
        f"one of {{names}} (load_aware; with the policy elastic: {SLO_AWARE})",
        "load_aware",
        metavar="NAME",
        decided=True,
        read=lambda known: (
            known.routing_policy or (SLO_AWARE if OrchestratorConfig.of(known).is_elastic else None)
        ),
    )
    routing_options: Options = pairs(
        "option of the routing policy, such as preset=published; repeat for several",
        name="--routing-option",
        group="routing",
    )
    skip_prefill_below_tokens: int = _routing(
        "most tokens of a prompt, cached ones left out, that decode computes itself",
        DEFAULT_SKIP_PREFILL_BELOW_TOKENS,
        rule=NOT_NEGATIVE,
    )
    rebalances: bool = _routing(
        "let streams leave overloaded instances for nearly idle ones of their role; needs the "
        "store (on)",
        True,
        name="--rebalance",
    )
    gather_decode_s: float = _routing(
        "time that a decode leg waits for prompts that are being computed for the same instance, "
        "to begin together: fewer steps, later second tokens (0: it does not wait)",
        0.0,
        rule=NOT_NEGATIVE,
    )

    migration: bool = derived(
        True,
        lambda known: known.migration != "off",
        extra(
            "--migration",
            "whether layers and heads can move between instances while they serve; auto: where "
            "model and options allow it; on: refuse to start where they do not",
            "auto",
            group="migration",
            choices=("auto", "on", "off"),
        ),
    )
    must_migrate: bool = derived(False, lambda known: known.migration == "on")
    migration_kv_growth: float = _migration(
        "address space to reserve for KV blocks, as a multiple of those at the start",
        2.0,
        metavar="FACTOR",
        rule=Rule(lambda value: value >= 1, "must be at least 1"),
    )
    migration_stall_s: float | None = _migration(
        "silence beyond the time of its work after which a guest is given up (default: "
        f"{GUEST_STALL_ON_CPU_S:g} on CPUs, {GUEST_STALL_ON_GPU_S:g} on GPUs); five times as long "
        "for a guest of several processes",
        None,
        kind=float,
        rule=Rule(lambda value: value > 0, "must be above 0"),
    )
    migration_overlap: int = _migration(
        "most micro-batches that a step is cut into, so that an instance and the guests of its "
        "layers compute at once; 1: it waits for them, which is better where they share cores",
        DEFAULT_MICROBATCHES,
        rule=Rule(
            lambda value: 1 <= value <= MAX_MICROBATCHES,
            f"1 (an instance waits for its guests) to {MAX_MICROBATCHES} parts of a step",
        ),
    )
    migration_guest_share: float = _migration(
        "share of an instance's device that guests of other instances may take together",
        1.0,
        metavar="FRACTION",
        rule=Rule(
            lambda value: LEAST_GUEST_SHARE <= value <= 1, f"{LEAST_GUEST_SHARE:g} to 1 of a device"
        ),
    )
    migration_guest_saves: bool = _migration(
        "who saves the KV of a guest's layers to the store: on, the guest; off, its host",
        True,
        choices=("on", "off"),
    )
    migration_transport: str = _migration(
        "way of KV and activations between an instance and its guests", "shm", choices=()
    )
    migration_attention: str = _migration(
        "kernels of attention: vLLM's, or banaserve's, which know parts of the heads and of the "
        "context on every device; auto: vLLM's on a CPU, and on a GPU banaserve's for what has "
        "moved",
        "auto",
        kind=parse_attention,
        choices=MIGRATION_ATTENTION,
    )
    migration_poison: bool = _migration(
        "fill the memory of moved modules with NaN: for tests", False
    )

    pace: str = _pacing(
        "model the time of a GPU and model: a profile's name or .toml file (a miniature runs "
        "unless --model is given), or one for each instance, prefill first, all of one model",
        "",
        metavar="PROFILE[,PROFILE...]",
    )
    dilate: float = _pacing(
        "with --pace: wall seconds of one modelled second",
        1.0,
        metavar="N",
        rule=Rule(
            lambda value: 0 < value <= _MAX_DILATION, f"above 0 and at most {_MAX_DILATION:g}"
        ),
    )

    orchestrator: OrchestratorConfig = derived(
        OrchestratorConfig(), OrchestratorConfig.of, *options_of(OrchestratorConfig)
    )

    prefill_budget: Budget = _budget(Role.PREFILL)
    decode_budget: Budget = _budget(Role.DECODE)

    vllm_argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self)
        _check_parts(self)
        _check_door(self)

    @property
    def routing_section(self) -> dict[str, Any]:
        """Options that the routing policy is built with."""
        given: dict[str, Any] = dict(self.routing_options)
        if self.routing_policy != SLO_AWARE:
            return given
        limits = {"ttft_s": self.orchestrator.slo_ttft_s, "tpot_s": self.orchestrator.slo_tpot_s}
        return {**limits, **given}

    @property
    def keys(self) -> tuple[TenantKey, ...]:
        """All API keys, keys without limits first."""
        return (*(TenantKey(key=key) for key in self.api_keys), *self.tenants)

    @property
    def tenant_quota(self) -> float:
        """Largest share of the store's memory for one tenant."""
        if self.kv_store_tenant_quota is not None:
            return self.kv_store_tenant_quota
        keys = self.keys
        has_several = len(keys) > 1 or any(one.is_balancer for one in keys)
        return _SHARE_OF_SEVERAL if has_several else 1.0

    @property
    def paces(self) -> tuple[str, ...]:
        """Profiles named by ``pace``; empty in real time."""
        return tuple(one.strip() for one in self.pace.split(",")) if self.pace else ()

    @property
    def tensor_parallel_by_role(self) -> dict[Role, int]:
        """Tensor-parallel ranks of engines made for a role, by role; only roles with the option."""
        given = {
            Role.PREFILL: self.prefill_tensor_parallel,
            Role.DECODE: self.decode_tensor_parallel,
        }
        return {role: degree for role, degree in given.items() if degree}

    @property
    def has_nodes(self) -> bool:
        """True if engines run on other machines."""
        return bool(self.nodes or self.cluster)

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode + self.colocated

    def without_legs(self) -> ServeConfig:
        """Return this configuration with all instances colocated and without a store.

        Raises:
            UserError: An option is set that needs the store.
        """
        orchestrator = self.orchestrator
        if orchestrator.mode != "on":  # the user did not ask for an orchestrator that acts
            orchestrator = replace(orchestrator, mode="off")
        return replace(
            self,
            prefill=0,
            decode=0,
            colocated=self.num_instances,
            kv_store=False,
            orchestrator=orchestrator,
        )

    def instances(self) -> list[tuple[InstanceId, Role]]:
        """Return ids and roles, prefill first: p0, p1, d0, ... or c0, c1, ..."""
        made = [(InstanceId(f"p{i}"), Role.PREFILL) for i in range(self.prefill)]
        made += [(InstanceId(f"d{i}"), Role.DECODE) for i in range(self.decode)]
        made += [(InstanceId(f"c{i}"), Role.COLOCATED) for i in range(self.colocated)]
        return made


def _check_nodes(config: ServeConfig) -> None:
    """Raise ``UserError`` for options that are invalid if engines run on other machines."""
    for name, is_given, advice in (
        ("--devices", config.devices, "each node gives its own GPUs"),
        ("--kv-store-listen", config.kv_store_listen, "the stores of the nodes are linked already"),
        ("--kv-store-peer", config.kv_store_peers, "the stores of the nodes are linked already"),
        ("--pace", config.pace, "modelled time is of one machine"),
        (
            "--prefill- or --decode-tensor-parallel-size",
            config.tensor_parallel_by_role,
            "places on nodes are of one size: give --tensor-parallel-size for all",
        ),
    ):
        if is_given:
            given = "--node" if config.nodes else "--cluster"
            raise UserError(f"{name} and {given} exclude each other: {advice}")


def _check_parts(config: ServeConfig) -> None:
    if config.dilate != 1 and not config.pace:
        raise UserError("--dilate stretches modelled time: give --pace PROFILE too")
    if len(config.paces) not in (0, 1, config.num_instances):
        raise UserError(
            f"--pace names {len(config.paces)} profiles: give one, or one for each of the "
            f"{config.num_instances} instances"
        )
    orchestrator = config.orchestrator
    for name, limit_s in (
        ("--slo-ttft", orchestrator.slo_ttft_s),
        ("--slo-tpot", orchestrator.slo_tpot_s),
    ):
        if limit_s and not orchestrator.is_elastic and config.routing_policy != SLO_AWARE:
            raise UserError(
                f"{name} is used only by --elastic and --routing-policy {SLO_AWARE}: give one of "
                "them, or leave it out"
            )
    if orchestrator.mode != "off" and not config.kv_store:
        raise UserError(
            f"--orchestrator {orchestrator.mode} needs the store, with which steps are measured: "
            "leave out --no-kv-store, or give --orchestrator off"
        )
    _check_scaling(config)
    if not config.kv_store and not config.colocated:
        raise UserError("--no-kv-store needs --colocated N: the store is how KV is handed over")
    if config.has_nodes:
        _check_nodes(config)
    for role in config.tensor_parallel_by_role:
        option = f"--{role.value}-tensor-parallel-size"
        if config.colocated:
            raise UserError(
                f"{option} is for engines that are started for {role.value}: give --pd P:D, or "
                "--tensor-parallel-size for all"
            )
        if config.pace:
            raise UserError(
                f"{option} and --pace exclude each other: modelled engines have one rank"
            )
    if config.devices and len(config.devices) != config.num_instances:
        raise UserError(
            f"--devices names {len(config.devices)} sets for {config.num_instances} instances"
        )


def _check_scaling(config: ServeConfig) -> None:
    least, most, now = config.scale_min, config.scale_max, config.num_instances
    if not most:
        if least != 1:
            raise UserError(f"--scale-min {least} bounds what --scale-max N allows: give that too")
        return
    if config.orchestrator.mode != "on":
        raise UserError("--scale-max lets the orchestrator scale: give --orchestrator on too")
    if not 1 <= least <= now <= most:
        raise UserError(
            f"--scale-min {least} and --scale-max {most} do not enclose the {now} instances of "
            "the start"
        )


def _check_door(config: ServeConfig) -> None:
    keys = [one.key for one in config.keys]
    if config.admin_key and config.admin_key in keys:
        raise UserError("--admin-key is one of the --api-keys: give it a key of its own")
    if not all(keys):
        raise UserError("--api-key is empty: give a key, or leave the option out")
    if len(set(keys)) < len({*config.api_keys}) + len(config.tenants):
        raise UserError("--tenants: an API key is there twice: remove one")
    if any(one.priority is not None for one in config.tenants) and not _has_priorities(config):
        raise UserError(
            "--tenants: priorities need vLLM's scheduler for them: add --scheduling-policy priority"
        )
    if not is_loopback(config.host) and not keys:
        raise UserError(
            f"--host {config.host} lets other machines in: set --api-key KEY (or "
            "BANASERVE_API_KEY), or stay on 127.0.0.1"
        )


def _has_priorities(config: ServeConfig) -> bool:
    """Return whether vLLM's options choose its priority scheduler."""
    words = " ".join(config.vllm_argv).replace("=", " ").replace("_", "-")
    return "--scheduling-policy priority" in words


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    return host in ("localhost", "::1") or host.startswith("127.")
