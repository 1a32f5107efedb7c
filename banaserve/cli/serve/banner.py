"""Banner of ``banaserve serve``: where the server answers, and what it does in which way.

Imports vLLM: import this module only after the environment is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from banaserve.base.config.serve_config import MINIATURE, ServeConfig
from banaserve.base.net.addresses import written
from banaserve.base.platform.cpu_features import DtypeChoice
from banaserve.base.platform.run_dir import RunDir, admin_note
from banaserve.cli.serve.engine_options import (
    EAGER,
    compile_choice,
    cpu_dtype,
    gives,
    migration_blocker,
)
from banaserve.cli.serve.machine import CompileChoice, GpuUse, gpu_words, installed
from banaserve.engine.compat.config import is_on_cpu
from banaserve.engine.cuda_graphs import graph_words
from banaserve.engine.engine_args import goes_without_rotary_kernel, pools
from banaserve.engine.tool_parsers import choose_tool_parser
from banaserve.frontdoor.page.records import page_link
from banaserve.mains.serve import Parts, scheme_of
from banaserve.orchestrator.control.routing.registry import POLICIES

_TOOL_OPTIONS = (
    "--enable-auto-tool-choice",
    "--no-enable-auto-tool-choice",
    "--tool-call-parser",
)


def facts_of(parts: Parts) -> dict[str, str]:
    """Return the facts that the banner tells, by name; empty ones are left out of it.

    Gives vLLM's server the parser of tool calls that the model needs.
    """
    return {
        "dtype": _dtype_words(parts),
        "model": _model_words(parts),
        "tools": _give_tool_parser(parts),
        "moves": _migration_words(parts),
        "GPUs": _gpu_line(parts),
        "time": parts.time,
    }


def print_banner(parts: Parts, facts: Mapping[str, str], terminal: TextIO, page_code: str) -> None:
    """Print the banner.

    Args:
        page_code: One-time code that opens the page; empty without a page.
    """
    # Not the configuration that was asked for: a pooling model is served with other instances.
    config, model, run = parts.config, parts.model_name, parts.run
    url = f"{scheme_of(parts.args)}://{written(config.host, config.port)}"
    shape = (
        f"{config.colocated} colocated"
        if config.colocated
        else f"prefill {config.prefill}, decode {config.decode}"
    )
    key = ' -H "Authorization: Bearer $BANASERVE_API_KEY"' if config.keys else ""
    path, asked = "chat/completions", '"messages": [{"role": "user", "content": '
    asked += '"Name the capital of France."}], "temperature": 0'
    if pools(parts.engine_config):
        path, asked = "embeddings", '"input": "The capital of France."'
    body = f'{{"model": "{model}", {asked}}}'
    lines = [
        "",
        f"  banaserve serves {model} ({shape})",
        f"  API    {url}/v1",
        *([f"  page   {page_line(url, config, run, terminal, page_code)}"] if config.ui else []),
        f"  logs   {Path(run.logs)}",
        f"  routing  {POLICIES.label(config.routing_policy)}",
        *(f"  {name:<5}  {words}" for name, words in facts.items() if words),
        "",
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'",
        "",
        "  Ctrl-C ends it.",
        "",
    ]
    print("\n".join(lines), file=terminal, flush=True)


def page_line(url: str, config: ServeConfig, run: RunDir, terminal: TextIO, code: str) -> str:
    """Return the address of the page.

    On a terminal it is a link that opens the page once. Collected output may be read by others, so
    it says only where the key is. The key itself is never printed.
    """
    if terminal.isatty():
        return f"{page_link(url, code)} (opens once; `banaserve ui` gives another)"
    return f"{url}/ui (its key: {'--admin-key' if config.admin_key else admin_note(run.logs)})"


def _dtype_words(parts: Parts) -> str:
    """Return words on the engines' number type; empty on GPUs, where the model sets it."""
    if not is_on_cpu():
        return ""
    name = str(parts.engine_config.model_config.dtype).removeprefix("torch.")
    if gives(parts.config.vllm_argv, "--dtype"):
        return str(DtypeChoice(name, "given by --dtype"))
    if parts.config.model == MINIATURE:
        return str(DtypeChoice(name, "what miniatures compute in"))
    return str(cpu_dtype())


def _model_words(parts: Parts) -> str:
    """Return words on how engines run the model; for GPUs see also ``_gpu_line``."""
    kept = ""
    if pools(parts.engine_config):
        kept = "it pools, so each instance does all of a request, without the store"
    elif parts.config.kv_store and parts.engine_config.model_config.is_hybrid:
        kept = "its states lie in the store, so vLLM's own prefix cache is off"
    if not is_on_cpu():
        return kept
    if gives(parts.config.vllm_argv, *EAGER):
        is_eager = parts.engine_config.model_config.enforce_eager
        words = str(CompileChoice(not is_eager, "given by --[no-]enforce-eager"))
    else:
        words = str(compile_choice(parts.config))
    if goes_without_rotary_kernel(parts.engine_config):
        words += "; MLA without vLLM's rotary kernel, which is wrong on CPUs"
    return f"{words}; {kept}" if kept else words


def _give_tool_parser(parts: Parts) -> str:
    """Give vLLM's server the parser of tool calls that the model needs, unless the user gave one.

    Returns:
        Words on it; empty for a model without tools, and for a parser given by the user.
    """
    if pools(parts.engine_config) or gives(parts.config.vllm_argv, *_TOOL_OPTIONS):
        return ""
    choice = choose_tool_parser(parts.args, parts.engine_config)
    parts.args.enable_auto_tool_choice = bool(choice.name)
    parts.args.tool_call_parser = choice.name or None
    return str(choice)


def _migration_words(parts: Parts) -> str:
    """Return words on moves; empty if moves are possible, or migration is off."""
    blocker = migration_blocker(parts.engine_config) if parts.config.migration else ""
    return f"nothing can move: {blocker}" if blocker else ""


def _gpu_line(parts: Parts) -> str:
    """Return words on what is on and off on GPUs; empty on a CPU."""
    if is_on_cpu():
        return ""
    off = "" if parts.config.migration else "--migration is off"
    use = GpuUse(
        blocker=off or migration_blocker(parts.engine_config),
        graphs=graph_words(parts.engine_config),
        num_ranks=parts.engine_config.parallel_config.tensor_parallel_size,
        crosses=parts.config.has_nodes,
        transport=parts.config.migration_transport,
        attention=parts.config.migration_attention,
    )
    return gpu_words(use, installed())
