"""Command line of ``banaserve serve`` as a ``ServeConfig``."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banaserve.access.key_files import key_of, keys_of
from banaserve.access.tenants import read_tenants
from banaserve.arguments import Parser, read_pair
from banaserve.config import (
    MIGRATION_ATTENTION,
    MINIATURE,
    SCHEDULERS,
    SLO_AWARE,
    Budget,
    OrchestratorConfig,
    ServeConfig,
    TakeOver,
    options_from_file,
    parse_pd,
    split_argv,
)
from banaserve.controller.decisions import DecisionLog
from banaserve.errors import UserError
from banaserve.orchestrator.control import ControlLimits
from banaserve.orchestrator.migration import registry as migration_policies
from banaserve.orchestrator.routing import registry as routing_policies
from banaserve.types import Role

_DEFAULTS = ServeConfig()
_ROLES = (Role.PREFILL, Role.DECODE)
_ORCHESTRATOR = OrchestratorConfig()
_ANY = 10_000


def parse_serve_argv(argv: Sequence[str]) -> ServeConfig:
    """Parse the words after ``banaserve serve``.

    Options that are not banaserve's own are taken to be vLLM's, which checks them.

    Raises:
        UserError: A word or a value that makes no sense.
    """
    ours, for_vllm = split_argv(argv)
    parser = _make_parser()
    # vLLM's positional form. Only the first word can be it: a later one may be the value of an
    # option that only vLLM knows.
    positional = ours.pop(0) if ours and not ours[0].startswith("-") else None
    known, unknown = parser.parse_known_args(ours)
    if known.config is not None:
        ours = [*options_from_file(known.config, *_flags_and_valued(parser)), *ours]
        known, unknown = parser.parse_known_args(ours)
    if known.model and positional and known.model != positional:
        raise UserError(f"two models: {positional} and --model {known.model}")
    known.model = known.model or positional
    _check_instances(known)
    _catch_misspelt(parser, unknown)
    return _config(known, (*unknown, *for_vllm))


def _take_over(given: str | None) -> TakeOver | None:
    if given is None:
        return None
    return TakeOver(Path(given) if given else None)


def _check_instances(known: argparse.Namespace) -> None:
    if known.instances < 0:
        raise UserError(f"--instances {known.instances}: must not be negative")
    given = [name for name in ("pd", "colocated", "instances") if getattr(known, name)]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} exclude each other")
    if known.elastic and known.orchestrator not in (None, "on"):
        raise UserError(f"--elastic and --orchestrator {known.orchestrator} exclude each other")
    if (known.elastic or known.instances) and known.no_kv_store:
        raise UserError("--no-kv-store: instances that change their roles need the store")
    if known.elastic and known.orchestrator_policy not in (None, "elastic"):
        raise UserError(
            f"--elastic and --orchestrator-policy {known.orchestrator_policy} exclude each other"
        )


def _flags_and_valued(parser: argparse.ArgumentParser) -> tuple[set[str], set[str]]:
    """Options of ours that take no value, and those that do."""
    flags = {name for a in parser._actions if a.nargs == 0 for name in a.option_strings}
    return flags, {name for a in parser._actions for name in a.option_strings} - flags


def _catch_misspelt(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """A near miss of our own option is no vLLM option."""
    own = [name for action in parser._actions for name in action.option_strings]
    for word in unknown:
        # Ours for one role ends as vLLM's does, which stays vLLM's.
        likely = [name for name in own if not name.endswith(word[1:])]
        if word.startswith("--") and (near := difflib.get_close_matches(word, likely, 1, 0.87)):
            raise UserError(f"unknown option {word}; did you mean {near[0]}?")


def _config(known: argparse.Namespace, vllm_argv: tuple[str, ...]) -> ServeConfig:
    prefill, decode = parse_pd(known.pd or "1:1")
    if known.colocated or known.instances:
        prefill = decode = 0
    from_env = [key for key in [os.environ.get("BANASERVE_API_KEY", "")] if key]
    return ServeConfig(
        model=known.model or (MINIATURE if known.pace else _DEFAULTS.model),
        prefill=prefill,
        decode=decode,
        colocated=known.colocated or known.instances,
        host=known.host,
        port=known.port,
        api_keys=keys_of("--api-key", known.api_key or (), known.api_key_file, from_env),
        tenants=read_tenants(known.tenants) if known.tenants is not None else (),
        devices=tuple(known.devices.split(";")) if known.devices else (),
        engine_start=known.engine_start,
        kv_store=not known.no_kv_store,
        kv_store_size=known.kv_store_size,
        kv_store_ssd=known.kv_store_ssd,
        kv_store_ssd_size=known.kv_store_ssd_size,
        kv_store_distributed=known.kv_store_distributed,
        kv_store_tenant_quota=known.kv_store_tenant_quota,
        kv_store_verify=known.kv_store_verify,
        kv_store_salt=known.kv_store_salt,
        routing_policy=known.routing_policy or _usual_routing(known),
        routing_options=tuple(read_pair("--routing-option", text) for text in known.routing_option),
        skip_prefill_below_tokens=known.skip_prefill_below_tokens,
        threads_per_instance=known.threads_per_instance,
        max_concurrent_requests=known.max_concurrent_requests,
        max_body_size=known.max_body_size,
        max_connections=known.max_connections,
        max_connections_per_address=known.max_connections_per_address,
        body_timeout_s=known.body_timeout,
        request_bounds=tuple(read_pair("--request-bound", text) for text in known.request_bound),
        request_timeout_s=known.request_timeout,
        drain_timeout_s=known.drain_timeout,
        start_timeout_s=known.start_timeout,
        restart_grace_s=known.restart_grace,
        engine_stall_s=known.engine_stall_timeout,
        engine_spin_s=known.engine_spin_timeout,
        run_dir=known.run_dir,
        log_max_size=known.log_max_size,
        take_over=_take_over(known.take_over),
        admin_key=_key(known, "admin"),
        metrics_key=_key(known, "metrics"),
        migration=known.migration == "on",
        migration_kv_growth=known.migration_kv_growth,
        migration_stall_s=known.migration_stall,
        migration_overlap=known.migration_overlap,
        migration_guest_share=known.migration_guest_share,
        migration_guest_saves=known.migration_guest_saves == "on",
        migration_poison=known.migration_poison,
        migration_attention=known.migration_attention,
        pace=known.pace,
        dilate=known.dilate,
        orchestrator=orchestrator_of(known),
        scale_min=known.scale_min,
        scale_max=known.scale_max,
        prefill_budget=budget_of(known, Role.PREFILL),
        decode_budget=budget_of(known, Role.DECODE),
        scheduler=known.scheduler,
        vllm_argv=vllm_argv,
    )


def _key(known: argparse.Namespace, name: str) -> str:
    """Of ``--NAME-key``, its file or its variable."""
    given, path = getattr(known, f"{name}_key"), getattr(known, f"{name}_key_file")
    usual = os.environ.get(f"BANASERVE_{name.upper()}_KEY", "")
    return key_of(f"--{name}-key", given, path, usual)


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="banaserve serve",
        usage="banaserve serve [MODEL] [options] [-- vLLM options]",
        description="Serve a model with prefill and decode apart, over the OpenAI API.",
        epilog="Every other option, and everything after --, goes to vLLM unchanged: "
        "banaserve serve --model smollm2-135m --pd 2:2 -- --max-model-len 4096",
        allow_abbrev=False,
    )
    _add_instances(parser)
    _add_door(parser)
    _add_store(parser)
    _add_routing(parser)
    _add_migration(parser)
    _add_pacing(parser)
    add_orchestrator(parser)
    add_budgets(parser)
    return parser


def _add_instances(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="smollm2-135m, llama-13b, opt-13b, a Hugging Face id or a folder")
    add("--pd", metavar="P:D", help="prefill and decode instances (1:1)")
    add("--colocated", type=int, default=0, metavar="N", help="N instances that do both")
    add(
        "--instances",
        type=int,
        default=0,
        metavar="N",
        help="N instances that begin as both; what each does is left to the elastic policy",
    )
    add(
        "--elastic",
        action="store_true",
        help="let roles and step sizes follow the load: --orchestrator on with the policy elastic",
    )
    add(
        "--scale-max",
        type=int,
        default=_DEFAULTS.scale_max,
        metavar="N",
        help="let the orchestrator add instances under load, to N in all (0: it adds none)",
    )
    add(
        "--scale-min",
        type=int,
        default=_DEFAULTS.scale_min,
        metavar="N",
        help="with --scale-max: remove idle ones, down to N in all (1)",
    )
    add("--devices", default="", help="CUDA devices of each instance, such as '0;1;2,3;4,5'")
    add("--engine-start", default=_DEFAULTS.engine_start, help="auto, fork (CPU) or spawn (GPU)")
    add(
        "--threads-per-instance",
        type=int,
        default=_DEFAULTS.threads_per_instance,
        help="CPU threads of each engine (0: share the cores)",
    )
    add(
        "--scheduler",
        choices=SCHEDULERS,
        default=_DEFAULTS.scheduler,
        help="order of waiting requests in an engine: vLLM's, or Preble's by the cached fraction",
    )
    add("--start-timeout", type=float, default=_DEFAULTS.start_timeout_s, metavar="S")
    add(
        "--restart-grace",
        type=float,
        default=_DEFAULTS.restart_grace_s,
        metavar="S",
        help="how long a request waits for a restart where nobody serves",
    )
    add(
        "--engine-stall-timeout",
        type=float,
        default=_DEFAULTS.engine_stall_s,
        metavar="S",
        help="an engine on a CPU that is silent and idle for so long is started again",
    )
    add(
        "--engine-spin-timeout",
        type=float,
        default=_DEFAULTS.engine_spin_s,
        metavar="S",
        help="any engine that is silent for so long is started again: more than its longest step",
    )
    add("--run-dir", type=Path, help="where logs go (a fresh folder under the state directory)")
    add(
        "--log-max-size",
        default=_DEFAULTS.log_max_size,
        metavar="SIZE",
        help="of each log, which is then begun anew, and of its last one; '' sets no limit",
    )
    add("--config", type=Path, help="TOML file with these options; the command line wins")


def _add_door(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default=_DEFAULTS.host)
    add("--port", type=int, default=_DEFAULTS.port)
    add(
        "--take-over",
        nargs="?",
        const="",
        metavar="RUN_DIR",
        help="replace the server that runs there, or the one on --port: once this one can serve it "
        "takes its socket, and that one ends with its last request",
    )
    add("--api-key", action="append", help="needed by clients; repeat for several tenants")
    add("--tenants", type=Path, metavar="FILE", help="TOML with API keys, each with its limits")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="holds such keys, one a line; a command line can be read by other users",
    )
    add(
        "--max-concurrent-requests",
        type=int,
        default=_DEFAULTS.max_concurrent_requests,
        help="more are answered 429",
    )
    add("--admin-key", help="opens the admin API (one is made for the run and kept in its folder)")
    add("--admin-key-file", type=Path, metavar="FILE", help="holds that key")
    add("--metrics-key", help="needed for /metrics, where an API key does too (all may read it)")
    add("--metrics-key-file", type=Path, metavar="FILE", help="holds that key")
    add("--max-body-size", default=_DEFAULTS.max_body_size)
    _add_connections(parser)
    add(
        "--request-bound",
        action="append",
        default=[],
        metavar="NAME=N",
        help="what a request may hold at most, such as messages=4096; repeat",
    )
    add(
        "--request-timeout",
        type=float,
        default=_DEFAULTS.request_timeout_s,
        metavar="S",
        help="one time budget for both legs",
    )
    add(
        "--drain-timeout",
        type=float,
        default=_DEFAULTS.drain_timeout_s,
        metavar="S",
        help="so long SIGTERM waits for requests under way; 0: not at all",
    )


def _add_connections(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-connections",
        type=int,
        default=_DEFAULTS.max_connections,
        metavar="N",
        help="of clients; beyond, the oldest without a key is closed (0: by the limit of file "
        "descriptors, 16384 at most)",
    )
    add(
        "--max-connections-per-address",
        type=int,
        default=_DEFAULTS.max_connections_per_address,
        metavar="N",
        help="of these, from one address without a key (0: a quarter)",
    )
    add(
        "--body-timeout",
        type=float,
        default=_DEFAULTS.body_timeout_s,
        metavar="S",
        help="for all of a request's body, and a second more for each 64 KiB that have come",
    )


def _add_store(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-store-size", default=_DEFAULTS.kv_store_size, help="memory for KV blocks")
    add("--kv-store-ssd", type=Path, metavar="FOLDER", help="keep KV blocks on a local disk too")
    add("--kv-store-ssd-size", default=_DEFAULTS.kv_store_ssd_size, metavar="SIZE")
    add(
        "--kv-store-distributed",
        default="",
        metavar="URL",
        help="share KV blocks with other stores, such as mooncake://HOST:PORT",
    )
    add(
        "--kv-store-tenant-quota",
        type=float,
        default=_DEFAULTS.kv_store_tenant_quota,
        metavar="FRACTION",
        help="share of the memory for one API key, or one cache_salt where there are none "
        "(0.5 with several keys, else 1)",
    )
    add(
        "--kv-store-verify",
        action="store_true",
        help="keep checksums of KV blocks in memory and check them before each use",
    )
    add("--kv-store-salt", default="", help="deployments with other salts share no blocks")
    add("--no-kv-store", action="store_true", help="with --colocated: serve without the store")


def _add_routing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--routing-policy",
        metavar="NAME",
        help=f"one of {', '.join(routing_policies.names())} ({_DEFAULTS.routing_policy}; with the "
        f"policy elastic: {SLO_AWARE})",
    )
    add(
        "--routing-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the routing policy, such as preset=published",
    )
    add(
        "--skip-prefill-below-tokens",
        type=int,
        default=_DEFAULTS.skip_prefill_below_tokens,
        help="prompts with at most so many uncached tokens have no prefill leg",
    )


def _add_migration(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--migration",
        choices=("on", "off"),
        default="on" if _DEFAULTS.migration else "off",
        help="whether layers and heads can move between instances while they serve",
    )
    add(
        "--migration-kv-growth",
        type=float,
        default=_DEFAULTS.migration_kv_growth,
        metavar="FACTOR",
        help="address space to reserve for KV blocks, in terms of those at the start",
    )
    add(
        "--migration-stall",
        type=float,
        default=_DEFAULTS.migration_stall_s,
        metavar="S",
        help="a guest that is silent for so much longer than its work takes is given up",
    )
    add(
        "--migration-overlap",
        type=int,
        default=_DEFAULTS.migration_overlap,
        metavar="N",
        help="cut steps into at most so many micro-batches, so that an instance and the guests of "
        "its layers compute at once; 1: it waits for them, which is better where they share cores",
    )
    add(
        "--migration-guest-share",
        type=float,
        default=_DEFAULTS.migration_guest_share,
        metavar="FRACTION",
        help="of an instance's device, that guests of others beside it may take together",
    )
    add(
        "--migration-guest-saves",
        choices=("on", "off"),
        default="on" if _DEFAULTS.migration_guest_saves else "off",
        help="whether a guest saves the KV of its layers to the store, or sends it to its host, "
        "which does",
    )
    add(
        "--migration-attention",
        choices=MIGRATION_ATTENTION,
        default=_DEFAULTS.migration_attention,
        help="what instances and guests attend with: vLLM's kernels, or ours, which know parts of "
        "the heads and of the context on every device; auto: vLLM's on a CPU, ours for what has "
        "moved on a GPU",
    )
    add("--migration-poison", action="store_true", help="fill what moved away with NaN: for tests")


def _add_pacing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--pace",
        default=_DEFAULTS.pace,
        metavar="PROFILE",
        help="model the time of a GPU and model: a profile's name or .toml file (a miniature runs "
        "unless --model is given)",
    )
    add(
        "--dilate",
        type=float,
        default=_DEFAULTS.dilate,
        metavar="N",
        help="with --pace: wall seconds of one modelled second",
    )


def add_budgets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "budgets", "as vLLM's options of the same names, which they may not exceed; by role"
    )
    for role in _ROLES:
        for name in ("max-num-batched-tokens", "max-num-seqs"):
            option = f"--{role.value}-{name}"
            group.add_argument(option, type=int, default=0, metavar="N", help=f"{role.value} only")


def budget_of(known: argparse.Namespace, role: Role) -> Budget:
    """What the options say of ``role``."""
    return Budget(
        getattr(known, f"{role.value}_max_num_batched_tokens"),
        getattr(known, f"{role.value}_max_num_seqs"),
    )


def add_orchestrator(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--orchestrator",
        choices=("off", "dry-run", "on"),
        help="who moves layers, heads and roles: off, on, or dry-run, which decides and moves "
        "nothing (dry-run; off without a store)",
    )
    add(
        "--orchestrator-policy",
        metavar="NAME",
        help=f"one of {', '.join(migration_policies.names())} ({_ORCHESTRATOR.policy})",
    )
    add(
        "--slo-ttft",
        type=float,
        default=0.0,
        metavar="S",
        help="time to first token of a request that is served well (0: no limit); one may name "
        "its own in a header",
    )
    add(
        "--slo-tpot",
        type=float,
        default=0.0,
        metavar="S",
        help="mean time of an output token after the first (0: no limit)",
    )
    add(
        "--orchestrator-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the policy, such as delta_up=0.3",
    )
    add(
        "--orchestrator-interval",
        type=float,
        default=_ORCHESTRATOR.interval_s,
        metavar="S",
    )
    add(
        "--orchestrator-concurrent",
        type=int,
        metavar="N",
        help=f"steps that may be under way at once ({_ORCHESTRATOR.concurrent}; elastic: any)",
    )
    add(
        "--orchestrator-per-minute",
        type=int,
        metavar="N",
        help=f"steps that may begin within a minute ({_ORCHESTRATOR.per_minute}; elastic: any)",
    )
    add("--decision-log", type=Path, metavar="FILE", help="append every decision, as JSON lines")


def orchestrator_of(known: argparse.Namespace) -> OrchestratorConfig:
    """Returns what the options say; without a store nothing is measured, so the default is off."""
    is_elastic = known.elastic or (known.instances and known.orchestrator is None)
    usual = "off" if known.no_kv_store else "on" if is_elastic else _ORCHESTRATOR.mode
    policy = known.orchestrator_policy or ("elastic" if is_elastic else _ORCHESTRATOR.policy)
    # A role that changes by that policy drains nothing: a plan is carried out as a whole.
    concurrent, per_minute = (
        (_ANY, _ANY)
        if policy == "elastic"
        else (_ORCHESTRATOR.concurrent, _ORCHESTRATOR.per_minute)
    )
    return OrchestratorConfig(
        mode=known.orchestrator or usual,
        slo_ttft_s=known.slo_ttft,
        slo_tpot_s=known.slo_tpot,
        policy=policy,
        options=tuple(read_pair("--orchestrator-option", o) for o in known.orchestrator_option),
        interval_s=known.orchestrator_interval,
        concurrent=_given(known.orchestrator_concurrent, concurrent),
        per_minute=_given(known.orchestrator_per_minute, per_minute),
        decision_log=known.decision_log,
    )


def _usual_routing(known: argparse.Namespace) -> str:
    """Roles that follow the load are preferences: requests may be served against them."""
    return SLO_AWARE if orchestrator_of(known).is_elastic else _DEFAULTS.routing_policy


def _given(value: int | None, usual: int) -> int:
    return usual if value is None else value


def check_orchestrator(config: OrchestratorConfig) -> None:
    """Return if policy and limits make sense and the log can be written.

    Raises:
        UserError: One does not or cannot; names it.
    """
    section: dict[str, Any] = dict(config.options)
    migration_policies.make(config.policy, **section)
    ControlLimits(concurrent=config.concurrent, per_minute=config.per_minute)
    DecisionLog(config.decision_log)
