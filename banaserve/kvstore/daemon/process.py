"""Process of the store: ``python -m banaserve.kvstore.daemon --socket PATH --size 2GiB``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from banaserve.base.arguments import Parser, values_of
from banaserve.base.errors import UserError
from banaserve.base.net.sockets import raise_descriptor_limit
from banaserve.base.plugins.discovery import PluginGroup, load_plugins
from banaserve.kvstore.daemon.options import DaemonOptions
from banaserve.kvstore.daemon.server import StoreServer
from banaserve.kvstore.tiers.registry import TIERS

log = logging.getLogger(__name__)

USER_ERROR_EXIT_CODE = 2


def serve(options: DaemonOptions) -> None:
    """Run the store in this process until SIGTERM or SIGINT. Call it from the main thread.

    Once clients can connect, one line is written to ``options.ready_fd``.

    Raises:
        UserError: An option is invalid, or the socket or the memory is not available; one line
            says why.
    """
    options.check()
    raise_descriptor_limit()  # a connection takes two or more
    with ExitStack() as stack:
        if options.metrics_port:
            # Imported only here: the HTTP server would slow down every start without metrics.
            from banaserve.kvstore.daemon.metrics import MetricsServer

            stack.callback(MetricsServer(options.socket_path, options.metrics_port).close)
        server = StoreServer(options)
        stack.callback(server.close)
        signal.set_wakeup_fd(server.wake_fd)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        _announce_ready(options.ready_fd)
        server.run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process by its command line; return its exit code."""
    parser = Parser(prog="banaserve-kvstore", description=__doc__)
    parser.add_options(DaemonOptions)
    options = DaemonOptions(**values_of(DaemonOptions, parser.parse_args(arguments)))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvstore %(levelname)s %(message)s")
    for plugin in load_plugins({PluginGroup.STORE_TIERS: TIERS}):
        if plugin.problem:
            log.warning("%s", plugin)
    try:
        serve(options)
    except UserError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return 0


def _announce_ready(ready_fd: int | None) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)
    except OSError as error:
        raise UserError(f"cannot write to --ready-fd {ready_fd}: {error.strerror}") from error
