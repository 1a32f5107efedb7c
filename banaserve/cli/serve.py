"""``banaserve serve``: from the command line to a banner and a server behind it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from banaserve import models
from banaserve.cli import emulation
from banaserve.cli.console import Say, timed
from banaserve.cli.orchestrator_options import check_orchestrator
from banaserve.cli.plugins import use_plugins
from banaserve.cli.serve_options import parse_serve_argv
from banaserve.cli.signals import Leaving
from banaserve.cli.sockets import listening
from banaserve.config import ServeConfig
from banaserve.errors import UserError
from banaserve.kvstore.options import StoreOptions
from banaserve.kvstore.sizes import format_size, parse_size
from banaserve.linux import available_memory_bytes
from banaserve.orchestrator.routing import registry
from banaserve.plugins import PluginGroup
from banaserve.run_dir import RunDir, open_run_dir


def serve_command(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        UserError: Something the user can mend; nothing is left running.
    """
    use_plugins(
        PluginGroup.ROUTING_POLICIES, PluginGroup.MIGRATION_POLICIES, PluginGroup.STORE_TIERS
    )
    config = parse_serve_argv(argv)
    _check(config)
    with (
        Leaving() as leaving,
        listening(config.host, config.port) as sock,
        open_run_dir(config.run_dir) as run,
        _quiet(run) as terminal,
        leaving.insisting(),
    ):
        say = timed(terminal)
        model = emulation.resolve(config, say)
        _serve(config, model, sock, run, say, terminal)
    return 0


def _check(config: ServeConfig) -> None:
    """Refuse at once what would otherwise be found out after vLLM has loaded."""
    _check_pool(config)
    StoreOptions.of(config).tiers()
    parse_size(config.max_body_size)
    section: dict[str, Any] = dict(config.routing_options)
    registry.make(config.routing_policy, **section)
    emulation.profile_of(config)
    check_orchestrator(config.orchestrator)


def _check_pool(config: ServeConfig) -> None:
    needed, available = parse_size(config.kv_store_size), available_memory_bytes()
    if config.kv_store and needed > available:
        raise UserError(
            f"--kv-store-size {config.kv_store_size}: {format_size(available)} of memory are "
            "available: give a smaller one"
        )


def _serve(
    config: ServeConfig,
    model: models.ResolvedModel,
    sock: socket.socket,
    run: RunDir,
    say: Say,
    terminal: TextIO,
) -> None:
    say("loading vLLM")
    from banaserve.cli import launch

    with launch.prepared(config, model, sock, run) as parts:
        scheme = "https" if parts.args.ssl_certfile else "http"
        launch.run(parts, say, lambda: _banner(config, model, run, terminal, scheme))


@contextlib.contextmanager
def _quiet(run: RunDir) -> Iterator[TextIO]:
    """Send vLLM's output to the run directory; yields the terminal for ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved_out, saved_err = os.dup(1), os.dup(2)
    log = os.open(run.logs / "front.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # A library that vLLM's server imports lets the root logger pass errors alone.
    logging.getLogger("banaserve").setLevel(logging.INFO)
    terminal = os.fdopen(saved_out, "w", buffering=1)
    atexit.register(_hush)
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        terminal.flush()
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_err)


def _hush() -> None:
    """Native libraries that vLLM loads report their own leaks when the process exits."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _banner(
    config: ServeConfig, model: models.ResolvedModel, run: RunDir, terminal: TextIO, scheme: str
) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{scheme}://{host}:{config.port}"
    shape = (
        f"{config.colocated} colocated"
        if config.colocated
        else f"prefill {config.prefill}, decode {config.decode}"
    )
    key = ' -H "Authorization: Bearer $BANASERVE_API_KEY"' if config.api_keys else ""
    body = (
        f'{{"model": "{model.served_name}", "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
    )
    lines = [
        "",
        f"  banaserve serves {model.served_name} ({shape})",
        f"  API    {url}/v1",
        f"  logs   {Path(run.logs)}",
        *([f"  time   {time_is}"] if (time_is := emulation.words(config)) else []),
        "",
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        "",
        "  Ctrl-C ends it.",
        "",
    ]
    print("\n".join(lines), file=terminal, flush=True)
