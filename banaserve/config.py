"""Options of ``banaserve serve``: one frozen schema for command line and configuration file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from banaserve.access.tenants import TenantKey
from banaserve.errors import UserError
from banaserve.types import InstanceId, Role

DEFAULT_SKIP_PREFILL_BELOW_TOKENS = 16
"""Number of uncached tokens up to which a prompt gets no prefill leg, from ``bench short-prompts``.

At 8 and 16 tokens, one leg and two differ by less than their spread; at 32, the streams of a decode
instance stall for 0.22 s with one leg and for 0.13 s with two."""
SCHEDULERS = ("vllm", "preble")
MINIATURE = "miniature"
"""Name of the model that runs in place of a modelled one."""
DEFAULT_MICROBATCHES, MAX_MICROBATCHES = 32, 64
"""Default and maximum limit of the micro-batches of a step; their number is computed at each step.

The default bounds the number in case the computation is wrong. Beyond the maximum, even the largest
steps have micro-batches that are too small to be worth sending."""
MIGRATION_ATTENTION = "auto", "vllm", "kernels", "reference", "triton", "flashinfer"
LEAST_GUEST_SHARE = 0.05
"""Least share of a device for guests: with it, a guest's host waits 20 times the computing time."""

_MAX_DILATION = 1000.0
_SHARE_OF_SEVERAL = 0.5
"""Largest store share of one of several tenants: it cannot evict all blocks of the others."""


Options = tuple[tuple[str, str | int | float], ...]


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


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """Configuration of the orchestrator, which balances instances.

    Attributes:
        mode: ``off``, ``dry-run`` (decides and moves nothing) or ``on``.
        slo_ttft_s, slo_tpot_s: SLO limits of a request, in seconds; 0 is no limit.
        policy: Name of the migration policy.
        options: Options of that policy.
        interval_s: Time between two decisions, in seconds.
        concurrent: Maximum number of steps under way at once.
        per_minute: Maximum number of steps that begin within a minute.
        decision_log: File to which decisions are appended as JSON lines; None for no file.
    """

    mode: str = "dry-run"
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    policy: str = "repaired"
    options: Options = ()
    interval_s: float = 2.0
    concurrent: int = 2
    per_minute: int = 6
    decision_log: Path | None = None

    @property
    def is_elastic(self) -> bool:
        """True if the orchestrator decides by forecasts, that is, by the elastic policy."""
        return self.policy == "elastic" and self.mode != "off"


SLO_AWARE = "slo_aware"
"""Name of the routing policy that uses the limits of ``--slo-ttft`` and ``--slo-tpot``."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A running server whose socket another server takes over.

    Attributes:
        run_dir: Run directory of the running server; None for this user's only server on the port.
    """

    run_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of ``banaserve serve``; vLLM's own options are in ``vllm_argv``.

    Attributes:
        prefill: Number of prefill instances; 0 with ``colocated``.
        decode: Number of decode instances; 0 with ``colocated``.
        colocated: Number of instances that serve both legs; 0 with ``--pd``.
        devices: CUDA_VISIBLE_DEVICES of each instance in the order of their ids, or empty.
        request_bounds: Maximum sizes of parts of a request, by name, that differ from the defaults.
        nodes: ``HOST:PORT`` of the agent of each node that runs engines; empty: all run here.
        cluster: Address of the Ray cluster that runs engines, or ``auto``; empty for none.
        cluster_key: Key that the server shares with the agents of its nodes.
        kv_store: False serves without a store; only possible with ``colocated``.
        kv_store_size: Memory for KV blocks, in human units.
        kv_store_ssd: Folder of a tier on a local disk; None for none.
        kv_store_ssd_size: Budget of that tier, in human units.
        kv_store_distributed: URL of a distributed tier; empty for none.
        kv_store_listen: ``HOST:PORT`` where stores of other machines fetch blocks; empty for none.
        kv_store_peers: ``HOST:PORT`` of each store of another machine that blocks are fetched from.
        kv_store_peer_key: Key that all linked stores share.
        tenants: API keys with limits, in addition to ``api_keys``.
        kv_store_tenant_quota: Largest share of the memory that one tenant may use; 1 for no limit,
            None for half of the memory if there are several tenants.
        kv_store_fetch: ``cheaper`` fetches the part of a prefix that is faster to fetch than to
            compute; ``always`` fetches all of it.
        kv_store_verify: True if KV blocks in memory have checksums.
        rebalances: True if the rebalancer moves streams away from overloaded instances.
        gather_decode_s: Maximum time a decode leg waits to begin together with others, in seconds;
            0 disables waiting.
        threads_per_instance: OMP threads of each engine; 0 shares the cores among the engines.
        restart_grace_s: Maximum time a request waits for a restart if no instance serves its role,
            in seconds.
        engine_stall_s: Silence after which an idle engine on a CPU is restarted, in seconds.
        engine_spin_s: Silence after which any engine is restarted, in seconds.
        max_connections: Maximum number of open client connections; 0: as many as file descriptors
            allow, up to 16,384.
        max_connections_per_address: Maximum number of connections from one address without a key;
            0: a quarter of ``max_connections``.
        body_timeout_s: Time limit for a request's body, in seconds, plus one second for each 64 KiB
            received.
        admin_key: Key of the admin API; empty generates a key for the run.
        ui: True if the front door serves a page under ``/ui``, protected by the admin key.
        metrics_key: Key of ``/metrics``, which API keys then open too; empty leaves it public.
        migration: True if layers and heads can move between instances while they serve, provided
            model and options allow it.
        must_migrate: True if the server must not start where model or options forbid migration.
        migration_kv_growth: Maximum number of KV blocks of an instance, as a multiple of the number
            at its start.
        migration_stall_s: Maximum silence of a guest beyond the time of its work, in seconds.
        migration_overlap: Maximum number of micro-batches of a step, with which an instance and the
            guests of its layers compute at once; 1: the instance waits for its guests.
        migration_guest_share: Share of an instance's device that guests beside it may take.
        migration_guest_saves: True if guests save the KV of their layers to the store themselves.
        migration_poison: True overwrites KV that has moved away with NaN, for tests.
        migration_transport: Transport of KV and activations between an instance and its guests.
        migration_attention: Attention kernels of instances and guests: vLLM's or banaserve's.
        pace: Profile of the GPU and model whose time is modelled, or one for each instance,
            separated by commas; empty for real time.
        dilate: Wall seconds of one modelled second.
        orchestrator: Configuration of the orchestrator, which decides on moves by itself.
        scale_min: Number of instances at which the orchestrator removes no more.
        scale_max: Number of instances at which it adds no more; 0: it neither adds nor removes.
        prefill_budget: Budget of an instance while its role is prefill.
        decode_budget: Budget of an instance while its role is decode.
        prefill_tensor_parallel: Ranks of an engine made for prefill; 0: as vLLM's options say.
        decode_tensor_parallel: Ranks of an engine made for decode; 0: as vLLM's options say.
        scheduler: Order in which an engine takes its waiting requests: one of ``SCHEDULERS``.
        take_over: Running server to replace; None for none.
        log_max_size: Maximum size of each log, and of its kept predecessor, in human units; empty
            for no limit.
    """

    model: str = "smollm2-135m"
    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    tenants: tuple[TenantKey, ...] = ()
    devices: tuple[str, ...] = ()
    engine_start: str = "auto"
    nodes: tuple[str, ...] = ()
    cluster: str = ""
    cluster_key: str = field(default="", repr=False)
    kv_store: bool = True
    kv_store_size: str = "1GiB"
    kv_store_ssd: Path | None = None
    kv_store_ssd_size: str = "20GiB"
    kv_store_distributed: str = ""
    kv_store_listen: str = ""
    kv_store_peers: tuple[str, ...] = ()
    kv_store_peer_key: str = field(default="", repr=False)
    kv_store_tenant_quota: float | None = None
    kv_store_fetch: str = "cheaper"
    kv_store_verify: bool = False
    kv_store_salt: str = ""
    routing_policy: str = "load_aware"
    routing_options: Options = ()
    skip_prefill_below_tokens: int = DEFAULT_SKIP_PREFILL_BELOW_TOKENS
    rebalances: bool = True
    gather_decode_s: float = 0.0
    threads_per_instance: int = 0
    max_concurrent_requests: int = 512
    max_body_size: str = "32MiB"
    max_connections: int = 0
    max_connections_per_address: int = 0
    body_timeout_s: float = 30.0
    request_bounds: Options = ()
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    restart_grace_s: float = 60.0
    engine_stall_s: float = 60.0
    engine_spin_s: float = 600.0
    run_dir: Path | None = None
    log_max_size: str = "64MiB"
    admin_key: str = ""
    ui: bool = True
    metrics_key: str = ""
    migration: bool = True
    must_migrate: bool = False
    migration_kv_growth: float = 2.0
    migration_stall_s: float = 1.0
    migration_overlap: int = DEFAULT_MICROBATCHES
    migration_guest_share: float = 1.0
    migration_guest_saves: bool = True
    migration_poison: bool = False
    migration_transport: str = "shm"
    migration_attention: str = "auto"
    pace: str = ""
    dilate: float = 1.0
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    scale_min: int = 1
    scale_max: int = 0
    prefill_budget: Budget = Budget()
    decode_budget: Budget = Budget()
    prefill_tensor_parallel: int = 0
    decode_tensor_parallel: int = 0
    scheduler: str = "vllm"
    take_over: TakeOver | None = None
    vllm_argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def routing_section(self) -> dict[str, Any]:
        """Options that the routing policy is built with."""
        given: dict[str, Any] = dict(self.routing_options)
        if self.routing_policy != SLO_AWARE:
            return given
        limits = {
            "ttft_s": self.orchestrator.slo_ttft_s,
            "tpot_s": self.orchestrator.slo_tpot_s,
        }
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
    for option, is_given, advice in (
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
            raise UserError(f"{option} and {given} exclude each other: {advice}")


def parse_pd(text: str) -> tuple[int, int]:
    """Return the two numbers of ``P:D``, each at least 1.

    Raises:
        UserError: ``text`` has another form.
    """
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text.strip())
    if match is None or 0 in (prefill := int(match[1]), decode := int(match[2])):
        raise UserError(
            f"--pd {text}: write the number of prefill and of decode instances, such as 1:1 or "
            "2:2 (for engines that do both, use --colocated N)"
        )
    return prefill, decode


def options_from_file(path: Path, flags: Collection[str], valued: Collection[str]) -> list[str]:
    """Return the entries of a TOML file as command-line options: its keys are option names.

    Args:
        flags: banaserve's options without a value: ``false`` leaves the option out.
        valued: banaserve's options with a value; options in neither are vLLM's, for which
            ``x = false`` becomes ``--no-x``.

    Raises:
        UserError: The file cannot be read, or a value has a type that no option takes.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # ValueError: invalid TOML, or a file that is not text
        raise UserError(f"--config {path}: {error}") from error
    argv: list[str] = []
    for key, value in table.items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            if option in valued:
                raise UserError(f"--config {path}: {key} takes a value, see banaserve serve --help")
            if value or option not in flags:
                argv.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, (str, int, float)):
            argv += [option, str(value)]
        elif isinstance(value, list):
            argv += [word for item in value for word in (option, str(item))]
        else:
            raise UserError(f"--config {path}: {key} is neither a value nor a list")
    return argv


def _check(config: ServeConfig) -> None:
    _check_numbers(config)
    _check_parts(config)
    _check_door(config)


def _check_numbers(config: ServeConfig) -> None:
    positive = {
        "--max-concurrent-requests": config.max_concurrent_requests,
        "--request-timeout": config.request_timeout_s,
        "--body-timeout": config.body_timeout_s,
        "--start-timeout": config.start_timeout_s,
        "--engine-stall-timeout": config.engine_stall_s,
        "--engine-spin-timeout": config.engine_spin_s,
    }
    for option, value in positive.items():
        if not value > 0:  # also true for nan
            raise UserError(f"{option} {value}: must be more than 0")
    not_negative = {
        "--colocated": config.colocated,
        "--threads-per-instance": config.threads_per_instance,
        "--skip-prefill-below-tokens": config.skip_prefill_below_tokens,
        "--gather-decode": config.gather_decode_s,
        "--restart-grace": config.restart_grace_s,
        "--drain-timeout": config.drain_timeout_s,
        "--max-connections": config.max_connections,
        "--max-connections-per-address": config.max_connections_per_address,
        "--prefill-max-num-batched-tokens": config.prefill_budget.num_tokens,
        "--prefill-max-num-seqs": config.prefill_budget.num_requests,
        "--decode-max-num-batched-tokens": config.decode_budget.num_tokens,
        "--decode-max-num-seqs": config.decode_budget.num_requests,
        "--prefill-tensor-parallel-size": config.prefill_tensor_parallel,
        "--decode-tensor-parallel-size": config.decode_tensor_parallel,
    }
    for option, value in not_negative.items():
        if not value >= 0:
            raise UserError(f"{option} {value}: must not be negative")
    if not (config.migration_kv_growth >= 1 and config.migration_stall_s > 0):
        raise UserError("--migration-kv-growth is at least 1 and --migration-stall above 0")
    if not 1 <= config.migration_overlap <= MAX_MICROBATCHES:
        raise UserError(
            f"--migration-overlap {config.migration_overlap}: 1 (an instance waits for its guests) "
            f"to {MAX_MICROBATCHES} parts of a step"
        )
    if not LEAST_GUEST_SHARE <= config.migration_guest_share <= 1:
        given = f"{config.migration_guest_share:g}"
        raise UserError(f"--migration-guest-share {given}: {LEAST_GUEST_SHARE:g} to 1 of a device")
    if not 0 < config.dilate <= _MAX_DILATION:
        raise UserError(f"--dilate {config.dilate:g}: above 0 and at most {_MAX_DILATION:g}")
    if not 0.0 < config.tenant_quota <= 1.0:
        raise UserError(
            f"--kv-store-tenant-quota {config.tenant_quota:g}: a share of the memory, "
            "more than 0 and at most 1"
        )


def _check_parts(config: ServeConfig) -> None:
    if config.dilate != 1 and not config.pace:
        raise UserError("--dilate stretches modelled time: give --pace PROFILE too")
    if len(config.paces) not in (0, 1, config.num_instances):
        raise UserError(
            f"--pace names {len(config.paces)} profiles: give one, or one for each of the "
            f"{config.num_instances} instances"
        )
    orchestrator = config.orchestrator
    if not orchestrator.interval_s > 0:
        raise UserError(f"--orchestrator-interval {orchestrator.interval_s:g}: must be above 0")
    for option, limit_s in (
        ("--slo-ttft", orchestrator.slo_ttft_s),
        ("--slo-tpot", orchestrator.slo_tpot_s),
    ):
        if not limit_s >= 0:
            raise UserError(f"{option} {limit_s:g}: seconds above 0, or 0 for no limit")
        if limit_s and not orchestrator.is_elastic and config.routing_policy != SLO_AWARE:
            raise UserError(
                f"{option} is looked at by --elastic and --routing-policy {SLO_AWARE} alone: give "
                "one of them, or leave it out"
            )
    if orchestrator.mode != "off" and not config.kv_store:
        raise UserError(
            f"--orchestrator {orchestrator.mode} needs the store, with which steps are measured: "
            "leave out --no-kv-store, or give --orchestrator off"
        )
    _check_scaling(config)
    if config.engine_start not in ("auto", "fork", "spawn"):
        raise UserError(f"--engine-start {config.engine_start}: one of auto, fork, spawn")
    if not config.kv_store and not config.colocated:
        raise UserError("--no-kv-store needs --colocated N: the store is how KV is handed over")
    if config.nodes or config.cluster:
        _check_nodes(config)
    for role in config.tensor_parallel_by_role:
        option = f"--{role.value}-tensor-parallel-size"
        if config.colocated:
            raise UserError(
                f"{option} is of engines that are made for {role.value}: give --pd P:D, or "
                "--tensor-parallel-size for all"
            )
        if config.pace:
            raise UserError(f"{option} and --pace exclude each other: modelled engines have a rank")
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
        raise UserError("--scale-max leaves it to the orchestrator: give --orchestrator on too")
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
    if not 0 < config.port < 65536:
        raise UserError(f"--port {config.port}: must be between 1 and 65535")
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


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before ``--``, and those after it, which go to vLLM unchanged."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
