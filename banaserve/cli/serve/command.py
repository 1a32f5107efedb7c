"""``banaserve serve``: from the command line to a running server and its banner."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from banaserve.base.config.orchestrator_config import OrchestratorConfig
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.models import cache
from banaserve.base.net.sockets import raise_descriptor_limit
from banaserve.base.platform.linux import available_memory_bytes
from banaserve.base.platform.run_dir import RunDir, find_offer, open_run_dir
from banaserve.base.plugins.discovery import PluginGroup
from banaserve.cli.plugins import rivalries, use_plugins
from banaserve.cli.serve import emulation, machine
from banaserve.cli.serve.command_line import make_parser, parse_serve_argv
from banaserve.cli.terminal.console import counting, print_error, quiet, timed
from banaserve.contracts.environment import set_environment
from banaserve.frontdoor.bodies.bounds import RequestBounds
from banaserve.frontdoor.lifecycle.listening_socket import FrontSocket, SocketClaim
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.sizes import parse_size
from banaserve.nodes.places import check_places
from banaserve.orchestrator.control.move_policies import registry as migration_policies
from banaserve.orchestrator.control.routing import registry
from banaserve.orchestrator.control.turn import ControlLimits, Mode
from banaserve.orchestrator.planner.forecast_profile import forecast_profile
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.transport import registry as transports
from banaserve.transport.interface import MIN_SECRET_BYTES, TransportOptions

__all__ = ["check_config", "make_parser", "serve_command"]

_AGAIN_S = 0.5
logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def serve_command(argv: list[str]) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        UserError: An error that the user can correct; nothing is left running.
    """
    found = use_plugins(
        PluginGroup.ROUTING_POLICIES, PluginGroup.MIGRATION_POLICIES, PluginGroup.STORE_TIERS
    )
    config = parse_serve_argv(argv)
    check_config(config)
    raise_descriptor_limit()
    contested = rivalries(*_asked(config))
    for line in contested:
        print_error(line)
    with (
        Leaving() as leaving,
        _front_socket(config) as front,
        open_run_dir(config.run_dir) as run,
        quiet(run.logs / "front.log") as terminal,
        leaving.insisting(),
    ):
        # Also logged, since standard error, where these lines were printed, is often not kept.
        for line in [*(str(plugin) for plugin in found if plugin.problem), *contested]:
            logger.warning("%s", line)
        _serve(config, front, run, terminal)
    return 0


def check_config(config: ServeConfig) -> None:
    """Check early what would otherwise fail only after vLLM has loaded.

    Raises:
        UserError: Options contradict each other, or name something that does not exist.
    """
    StoreOptions.of(config).check()
    check_places(config)
    parse_size(config.max_body_size)
    if config.log_max_size:
        parse_size(config.log_max_size)
    RequestBounds.of(config.request_bounds)
    registry.make(config.routing_policy, **config.routing_section)
    emulation.profile_of(config)
    _check_orchestrator(config.orchestrator)
    if config.migration and config.migration_transport != transports.SHARED_MEMORY:
        _check_transport(config.migration_transport)
    if config.orchestrator.is_elastic:
        forecast_profile(config)
    if not config.has_nodes:
        machine.check_memory(config, 0, available_memory_bytes())


def _check_orchestrator(config: OrchestratorConfig) -> None:
    """Check that policy and limits are valid and the log can be written."""
    section: dict[str, Any] = dict(config.options)
    migration_policies.make(config.policy, **section)
    ControlLimits(concurrent=config.concurrent, per_minute=config.per_minute)
    DecisionLog(config.decision_log)


def _check_transport(name: str) -> None:
    """Check that a transport's requirements are installed: guests are started only much later."""
    options = TransportOptions(folder=tempfile.gettempdir(), secret=bytes(MIN_SECRET_BYTES))
    transports.create(name, options).close()


@contextlib.contextmanager
def _front_socket(config: ServeConfig) -> Iterator[FrontSocket]:
    """Yield the socket of the front door, bound, or claimed from the server that has it.

    Raises:
        UserError: The address is in use or not this machine's, or no server there can be taken
            over.
    """
    address = config.host, config.port
    if config.take_over is None:
        front = FrontSocket(*address)
    else:
        run_dir = Path(config.take_over) if config.take_over else None
        front = SocketClaim(find_offer(run_dir, config.port), *address)
    with contextlib.closing(front):
        yield front


def _asked(config: ServeConfig) -> Iterator[tuple[PluginGroup, str]]:
    """Yield the names in use that plugins can offer."""
    yield PluginGroup.ROUTING_POLICIES, config.routing_policy
    if config.orchestrator.mode != Mode.OFF:
        yield PluginGroup.MIGRATION_POLICIES, config.orchestrator.policy
    yield PluginGroup.STORE_TIERS, urlsplit(config.kv_store_distributed).scheme


def _serve(config: ServeConfig, front: FrontSocket, run: RunDir, terminal: TextIO) -> None:
    say, tick = timed(terminal), timed(terminal, end="\r")
    with counting(terminal, tick):
        model = emulation.resolve(config, say)
        say("loading vLLM")
        available_bytes = available_memory_bytes()
        _set_environment(config)
        from banaserve.cli.serve import banner, launch

    with (
        launch.prepared(config, model, front, run, available_bytes) as parts,
        counting(terminal, tick) as stop_counting,
    ):
        facts = banner.facts_of(parts)

        def on_open(page_code: str) -> None:
            stop_counting()
            banner.print_banner(parts, facts, terminal, page_code)

        launch.run_server(parts, say, on_open)


def _set_environment(config: ServeConfig) -> None:
    """Set what vLLM and torch read when they are imported, and what engines inherit."""
    threads = config.threads_per_instance or max(1, (os.cpu_count() or 1) // config.num_instances)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # torch's default is a folder of a known name in the temporary folder, which all may write.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.cache_root() / "torchinductor"))
    set_environment()


class Leaving:
    """Context in which SIGINT and SIGTERM raise SystemExit with 128 + the signal's number, once.

    Later signals are ignored, so that they do not interrupt the clean-up. Main thread only.
    """

    def __init__(self) -> None:
        self._number = 0
        self._insists = False

    def __enter__(self) -> Leaving:
        self._previous = {number: signal.signal(number, self._leave) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def insisting(self) -> Iterator[None]:
        """Raise again every half second after a signal, until the block is left.

        One exception is not enough while foreign code runs: an import may catch every exception,
        and Python drops exceptions raised in a destructor or a callback from C.
        """
        self._insists = True
        try:
            yield
        finally:
            self._insists = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _leave(self, number: int, _: object) -> None:
        if self._number and not self._insists:
            return
        if number != signal.SIGALRM:
            self._number = self._number or number
        if self._insists:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise SystemExit(128 + self._number)
