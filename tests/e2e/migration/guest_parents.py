"""Parents of guests, in a process that has never computed anything: only such a one can be forked.

Usage: python guest_parents.py JSON, with JSON = [[control fd, engine arguments], ...].
"""

import json
import os
import socket
import sys

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from banaserve.engine.vllm import engine_parent

    engine_parent.pre_import()
    children = []
    for fd, arguments in json.loads(sys.argv[1]):
        config = EngineArgs(**arguments).create_engine_config()
        control = socket.socket(fileno=fd)
        children.append(os.fork())
        if children[-1] == 0:
            engine_parent.run_engine_parent(config, control)
            os._exit(0)
        control.close()
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
