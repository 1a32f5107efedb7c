"""Command line of ``banaserve serve`` as a ``ServeConfig``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from banaserve.access.tenants import read_tenants
from banaserve.arguments import read_pair
from banaserve.cli.serve.options.budgets import add_budgets, budget_of
from banaserve.cli.serve.options.front_door import (
    add_front_door,
    api_keys_of,
    operator_key_of,
    take_over_of,
)
from banaserve.cli.serve.options.help_pages import ServeParser, asked_group
from banaserve.cli.serve.options.instances import add_instances
from banaserve.cli.serve.options.migration import add_migration
from banaserve.cli.serve.options.nodes import add_nodes, cluster_key_of
from banaserve.cli.serve.options.orchestrator import add_orchestrator, orchestrator_of
from banaserve.cli.serve.options.pacing import add_pacing
from banaserve.cli.serve.options.routing import add_routing, usual_routing
from banaserve.cli.serve.options.store import add_store, peer_key_of
from banaserve.config import (
    MINIATURE,
    ServeConfig,
    options_from_file,
    parse_pd,
    split_argv,
)
from banaserve.errors import UserError
from banaserve.types import Role

_DEFAULTS = ServeConfig()


def parse_serve_argv(argv: Sequence[str]) -> ServeConfig:
    """Parse the words after ``banaserve serve``.

    Options that are not banaserve's own are passed to vLLM, which checks them.

    Raises:
        UserError: An option or a value is not valid.
        SystemExit: Help was asked for and has been printed.
    """
    ours, for_vllm = split_argv(argv)
    parser = make_parser()
    if (group := asked_group(ours)) is not None:
        print(parser.format_group(group), end="")
        raise SystemExit(0)
    # The model as vLLM's positional argument. Only the first word can be the model: a later word
    # may be the value of an option that only vLLM knows.
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
    """Return our options without a value, and those with one."""
    flags = {name for a in parser._actions if a.nargs == 0 for name in a.option_strings}
    return flags, {name for a in parser._actions for name in a.option_strings} - flags


def _catch_misspelt(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Refuse an unknown option that resembles one of ours: it is no option of vLLM."""
    own = [name for action in parser._actions for name in action.option_strings]
    for word in unknown:
        # An option of ours for one role ends like an option of vLLM, which remains vLLM's.
        likely = [name for name in own if not name.endswith(word[1:])]
        if word.startswith("--") and (near := difflib.get_close_matches(word, likely, 1, 0.87)):
            raise UserError(f"unknown option {word}; did you mean {near[0]}?")


def _config(known: argparse.Namespace, vllm_argv: tuple[str, ...]) -> ServeConfig:
    prefill, decode = parse_pd(known.pd or "1:1")
    if known.colocated or known.instances:
        prefill = decode = 0
    return ServeConfig(
        model=known.model or (MINIATURE if known.pace else _DEFAULTS.model),
        prefill=prefill,
        decode=decode,
        colocated=known.colocated or known.instances,
        host=known.host,
        port=known.port,
        api_keys=api_keys_of(known),
        tenants=read_tenants(known.tenants) if known.tenants is not None else (),
        devices=tuple(known.devices.split(";")) if known.devices else (),
        engine_start=known.engine_start,
        nodes=tuple(known.node),
        cluster=known.cluster,
        cluster_key=cluster_key_of(known),
        kv_store=not known.no_kv_store,
        kv_store_size=known.kv_store_size,
        kv_store_ssd=known.kv_store_ssd,
        kv_store_ssd_size=known.kv_store_ssd_size,
        kv_store_distributed=known.kv_store_distributed,
        kv_store_listen=known.kv_store_listen,
        kv_store_peers=tuple(known.kv_store_peer),
        kv_store_peer_key=peer_key_of(known),
        kv_store_tenant_quota=known.kv_store_tenant_quota,
        kv_store_fetch=known.kv_store_fetch,
        kv_store_verify=known.kv_store_verify,
        kv_store_salt=known.kv_store_salt,
        routing_policy=known.routing_policy or usual_routing(known),
        routing_options=tuple(read_pair("--routing-option", text) for text in known.routing_option),
        skip_prefill_below_tokens=known.skip_prefill_below_tokens,
        rebalances=known.rebalance,
        gather_decode_s=known.gather_decode,
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
        take_over=take_over_of(known),
        admin_key=operator_key_of(known, "admin"),
        ui=not known.no_ui,
        metrics_key=operator_key_of(known, "metrics"),
        migration=known.migration != "off",
        must_migrate=known.migration == "on",
        migration_kv_growth=known.migration_kv_growth,
        migration_stall_s=known.migration_stall,
        migration_overlap=known.migration_overlap,
        migration_guest_share=known.migration_guest_share,
        migration_guest_saves=known.migration_guest_saves == "on",
        migration_poison=known.migration_poison,
        migration_transport=known.migration_transport,
        migration_attention=known.migration_attention,
        pace=known.pace,
        dilate=known.dilate,
        orchestrator=orchestrator_of(known),
        scale_min=known.scale_min,
        scale_max=known.scale_max,
        prefill_budget=budget_of(known, Role.PREFILL),
        decode_budget=budget_of(known, Role.DECODE),
        prefill_tensor_parallel=known.prefill_tensor_parallel_size,
        decode_tensor_parallel=known.decode_tensor_parallel_size,
        scheduler=known.scheduler,
        vllm_argv=vllm_argv,
    )


_GROUPS = {
    "instances": add_instances,
    "nodes": add_nodes,
    "server": add_front_door,
    "store": add_store,
    "routing": add_routing,
    "migration": add_migration,
    "pacing": add_pacing,
    "orchestrator": add_orchestrator,
    "budgets": add_budgets,
}


def make_parser() -> ServeParser:
    """Return the parser of banaserve's own options."""
    parser = ServeParser(
        prog="banaserve serve",
        usage="banaserve serve [MODEL] [options] [-- vLLM options]",
        description="Serve a model with prefill and decode apart, over the OpenAI API.",
        epilog="Every other option, and everything after --, goes to vLLM unchanged: "
        "banaserve serve --model smollm2-135m --pd 2:2 -- --max-model-len 4096",
        allow_abbrev=False,
    )
    for name, add in _GROUPS.items():
        add(parser)
        parser.end_group(name)
    return parser
