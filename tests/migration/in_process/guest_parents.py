"""Parents of guests, in a process that has never computed anything: only such a one can be forked.

Usage: python guest_parents.py FD. Each message on that socket is the JSON of an engine's arguments,
with the socket that its guests' parent takes orders from.
"""

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    # Folders of tests are not on the path here.
    claims = Path(__file__).parents[2] / "support" / "processor_claims.py"
    runpy.run_path(str(claims))["apply"]()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    from banaserve.mains import engine_parent

    engine_parent.pre_import()
    registry._run_in_subprocess = lambda look: look()  # a process that imports vLLM once more
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, fds, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not message:
            return
        control = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            config = EngineArgs(**json.loads(message)).create_engine_config()
            engine_parent.run_engine_parent(config, control)
            os._exit(0)
        control.close()


if __name__ == "__main__":
    main()
