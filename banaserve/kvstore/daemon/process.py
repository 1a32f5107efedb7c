"""Process of the store: ``python -m banaserve.kvstore.daemon --socket PATH --size 2GiB``."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from banaserve.errors import UserError
from banaserve.kvstore.daemon.options import DEFAULT_SSD_SIZE, DISTRIBUTED_VARIABLE, StoreOptions
from banaserve.kvstore.daemon.server import DaemonConfig, StoreServer
from banaserve.kvstore.peers.options import PeerOptions, key_from_environment
from banaserve.kvstore.tiers.registry import TIERS
from banaserve.plugins import PluginGroup, load_plugins

if TYPE_CHECKING:
    from banaserve.kvstore.daemon.metrics import MetricsServer

log = logging.getLogger(__name__)

USER_ERROR_EXIT_CODE = 2


def serve(config: DaemonConfig, on_ready: Callable[[], None] | None = None) -> None:
    """Run the store in this process until SIGTERM or SIGINT. Call it from the main thread.

    Args:
        config: Configuration of the store.
        on_ready: Callback once clients can connect and the memory is filled.

    Raises:
        UserError: The socket or the memory is not available; one line says why.
    """
    # Each connection takes two file descriptors or more; the usual soft limit suffices only for
    # some hundred connections.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        if config.metrics_port:
            stack.callback(_serve_metrics(config).close)
        server = StoreServer(config)
        stack.callback(server.close)
        signal.set_wakeup_fd(server.wake_fd)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        if on_ready is not None:
            on_ready()
        server.run()


def _serve_metrics(config: DaemonConfig) -> MetricsServer:
    # Imported only here: the HTTP server's import would slow down every start without metrics.
    from banaserve.kvstore.daemon.metrics import MetricsServer

    return MetricsServer(config.socket_path, config.metrics_port)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process by its command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="banaserve-kvstore", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="where clients connect")
    parser.add_argument("--size", required=True, help="memory for blocks, such as 2GiB")
    parser.add_argument("--ssd", type=Path, help="folder of a tier on a local disk")
    parser.add_argument("--ssd-size", default=DEFAULT_SSD_SIZE, help="its budget")
    parser.add_argument("--distributed", default="", help="URL of a distributed tier")
    parser.add_argument("--listen", default="", help="HOST:PORT where other stores fetch blocks")
    parser.add_argument("--peer", action="append", default=[], help="HOST:PORT of another store")
    parser.add_argument("--tenant-quota", type=float, default=1.0, help="share of the memory")
    parser.add_argument("--verify-memory", action="store_true", help="checksums of memory")
    parser.add_argument("--metrics-port", type=int, default=0, help="of localhost; 0 for none")
    parser.add_argument("--ready-fd", type=int, help="gets one line when clients can connect")
    parser.add_argument("--die-with-parent", action="store_true", help="stop with the starter")
    parser.add_argument("--poison-free-slots", action="store_true", help="for debugging; slow")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvstore %(levelname)s %(message)s")
    for plugin in load_plugins({PluginGroup.STORE_TIERS: TIERS}):
        if plugin.problem:
            log.warning("%s", plugin)
    try:
        config = StoreOptions(
            size=options.size,
            ssd=options.ssd,
            ssd_size=options.ssd_size,
            distributed=options.distributed or os.environ.get(DISTRIBUTED_VARIABLE, ""),
            tenant_quota=options.tenant_quota,
            verify_memory=options.verify_memory,
            poison_free_slots=options.poison_free_slots,
            peers=PeerOptions(options.listen, tuple(options.peer), key_from_environment()),
        ).config(
            options.socket,
            metrics_port=options.metrics_port,
            die_with_parent=options.die_with_parent,
        )
        serve(config, lambda: announce_ready(options.ready_fd))
    except UserError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return 0


def announce_ready(ready_fd: int | None) -> None:
    """Write one line to ``ready_fd`` and close it; do nothing if it is None.

    Raises:
        UserError: Its other end is closed.
    """
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)
    except OSError as error:
        raise UserError(f"cannot write to --ready-fd {ready_fd}: {error.strerror}") from error
