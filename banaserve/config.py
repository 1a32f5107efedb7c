"""Options of ``banaserve serve``: one frozen schema for the command line and the file."""

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
"""From ``bench short-prompts``: one leg and two differ less than they spread at 8 and 16 tokens;
at 32 the streams of a decode instance stand still for 0.22 s with one leg, for 0.13 s with two."""
SCHEDULERS = ("vllm", "preble")
MINIATURE = "miniature"
"""The model that runs in the place of a modelled one."""
DEFAULT_MICROBATCHES, MAX_MICROBATCHES = 32, 64
"""Beyond the most, a micro-batch of the largest steps is smaller than it pays to send. Their number
is computed for each step: the default bounds it where the computation might be wrong."""
MIGRATION_ATTENTION = "auto", "vllm", "kernels", "reference", "triton"
LEAST_GUEST_SHARE = 0.05
"""With less a guest makes its host wait twenty times as long as it computes."""

_MAX_DILATION = 1000.0
_SHARE_OF_SEVERAL = 0.5
"""Of the store's memory for one of several tenants: what the others have cannot all be evicted."""


Options = tuple[tuple[str, str | int | float], ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """What an engine may do in one step; 0 is what the engine itself says.

    Attributes:
        num_tokens: That it computes.
        num_requests: That run at once.
    """

    num_tokens: int = 0
    num_requests: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_tokens or self.num_requests)


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """How instances are balanced.

    Attributes:
        mode: ``off``, ``dry-run`` (decides and moves nothing) or ``on``.
        slo_ttft_s, slo_tpot_s: Limits of a request that is served well; 0 is none.
        policy: Name of the migration policy; ``options`` are its.
        interval_s: From one decision to the next.
        concurrent: Steps that may be under way at once.
        per_minute: Steps that may begin within a minute.
        decision_log: Decisions are appended to this file as JSON lines; None for no file.
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
        """Whether it decides by forecast."""
        return self.policy == "elastic" and self.mode != "off"


SLO_AWARE = "slo_aware"
"""The routing policy that takes the limits of ``--slo-ttft`` and ``--slo-tpot``."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A running server whose socket another one takes.

    Attributes:
        run_dir: Its run directory; None where it is the only one of this user's on the port.
    """

    run_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What ``banaserve serve`` was asked for; vLLM's own options are in ``vllm_argv``.

    Attributes:
        prefill: Number of prefill instances; 0 with ``colocated``.
        decode: Number of decode instances; 0 with ``colocated``.
        colocated: Number of instances that do both legs; 0 with ``--pd``.
        devices: CUDA_VISIBLE_DEVICES of each instance in the order of their ids, or empty.
        request_bounds: What requests may hold at most, by name, where it is not the usual.
        nodes: ``HOST:PORT`` of the agent of each node that engines run on; none: all run here.
        cluster: Address of the Ray cluster that engines run on, or ``auto``; empty for none.
        cluster_key: That their agents know too.
        kv_store: False serves without a store; only possible with ``colocated``.
        kv_store_size: Memory for KV blocks, in human units.
        kv_store_ssd: Folder of a tier on a local disk; None for none.
        kv_store_ssd_size: Its budget, in human units.
        kv_store_distributed: URL of a distributed tier; empty for none.
        kv_store_listen: ``HOST:PORT`` where stores of other machines fetch blocks; empty for none.
        kv_store_peers: ``HOST:PORT`` of each store of another machine that blocks are fetched from.
        kv_store_peer_key: That all of these know.
        tenants: API keys with limits, beside ``api_keys``.
        kv_store_tenant_quota: Largest share of the memory that one tenant may use; 1 for no limit,
            None for half of it where there are several tenants.
        kv_store_fetch: ``cheaper`` fetches as much of a prefix as is faster than computing it;
            ``always`` all of it.
        kv_store_verify: Whether memory gets checksums.
        rebalances: Flag: the rebalancer moves streams away from overloaded instances.
        gather_decode_s: So long a decode leg waits for others that it could begin with; 0: not.
        threads_per_instance: OMP threads of each engine; 0 shares the cores among them.
        restart_grace_s: How long a request waits for a restart where no instance serves its role.
        engine_stall_s: An engine on a CPU that is silent and idle for so long is started again.
        engine_spin_s: Any engine that is silent for so long is started again.
        max_connections: Of clients, open at once; 0: as many as descriptors allow, up to 16,384.
        max_connections_per_address: Of these, from one address without a key; 0: a quarter.
        body_timeout_s: For a request's body, longer by a second for each 64 KiB that have come.
        admin_key: Opens the admin API; empty makes one for the run.
        ui: Whether the front door has a page under ``/ui``, behind the admin key.
        metrics_key: Opens ``/metrics``, as API keys do then; empty leaves it open to all.
        migration: Whether layers and heads can move between instances while they serve, where model
            and options allow it.
        must_migrate: Whether a server where they do not is refused.
        migration_kv_growth: How many times the KV blocks of the start an instance may once have.
        migration_stall_s: How long a guest may be silent beyond what its work should take.
        migration_overlap: Micro-batches of a step at most, so that an instance and the guests
            of its layers compute at once; 1: it waits for them.
        migration_guest_share: Of an instance's device that guests beside it may take.
        migration_guest_saves: Whether guests save the KV of their layers to the store themselves.
        migration_poison: Overwrite KV that has moved away with NaN: for tests.
        migration_transport: By which KV and activations travel between an instance and its guests.
        migration_attention: What instances and guests attend with: vLLM's kernels or ours.
        pace: Profile of the GPU and model whose time is modelled, or one for each instance, with
            commas between them; empty for real time.
        dilate: Wall seconds of one modelled second.
        orchestrator: Who decides what moves by itself.
        scale_min: Instances of which the orchestrator removes none.
        scale_max: Instances to which it adds none; 0: it adds and removes none at all.
        prefill_budget: Of an instance while it is for prefill.
        decode_budget: Of one while it is for decode.
        prefill_tensor_parallel: Ranks of an engine that is made for prefill; 0: as vLLM's options
            say.
        decode_tensor_parallel: The same of one that is made for decode.
        scheduler: In which order an engine takes its waiting requests: ``SCHEDULERS``.
        take_over: The running server that is to be replaced; None for none.
        log_max_size: Of each log, in human units, and of what it held before; empty for no limit.
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
        """What the routing policy is built with."""
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
        """All API keys, those without limits first."""
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
        """Profiles of ``pace``; none where time is real."""
        return tuple(one.strip() for one in self.pace.split(",")) if self.pace else ()

    @property
    def tensor_parallel_by_role(self) -> dict[Role, int]:
        """Ranks of engines that are made for a role, where that has been given."""
        given = {
            Role.PREFILL: self.prefill_tensor_parallel,
            Role.DECODE: self.decode_tensor_parallel,
        }
        return {role: degree for role, degree in given.items() if degree}

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode + self.colocated

    def without_legs(self) -> ServeConfig:
        """The same with as many instances that do all of a request, and without a store.

        Raises:
            UserError: Something was asked for that needs one.
        """
        orchestrator = self.orchestrator
        if orchestrator.mode != "on":  # nobody has asked for one that acts
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
        """Ids and roles, prefill first: p0, p1, d0, ... or c0, c1, ..."""
        made = [(InstanceId(f"p{i}"), Role.PREFILL) for i in range(self.prefill)]
        made += [(InstanceId(f"d{i}"), Role.DECODE) for i in range(self.decode)]
        made += [(InstanceId(f"c{i}"), Role.COLOCATED) for i in range(self.colocated)]
        return made


def _check_nodes(config: ServeConfig) -> None:
    """Refuse what makes no sense where engines run on other machines."""
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
    """``P:D``, both at least 1.

    Raises:
        UserError: Anything else.
    """
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text.strip())
    if match is None or 0 in (prefill := int(match[1]), decode := int(match[2])):
        raise UserError(
            f"--pd {text}: write the number of prefill and of decode instances, such as 1:1 or "
            "2:2 (for engines that do both, use --colocated N)"
        )
    return prefill, decode


def options_from_file(path: Path, flags: Collection[str], valued: Collection[str]) -> list[str]:
    """A TOML file as command-line options: its keys are the options' names.

    Args:
        flags: Our options that take no value: ``false`` leaves them out.
        valued: Our other ones; what is in neither is vLLM's, where ``--no-x`` is ``x = false``.

    Raises:
        UserError: The file cannot be read or holds something that is no option's value.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # of TOML, or of a file that is no text
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
        if not value > 0:  # as nan is not
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
    """Whether vLLM's options choose its scheduler by priority."""
    words = " ".join(config.vllm_argv).replace("=", " ").replace("_", "-")
    return "--scheduling-policy priority" in words


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The part before ``--`` and the part after it, which goes to vLLM unchanged."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
