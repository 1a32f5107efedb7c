"""Inspection of a node: its resources, and whether it has the model."""

from __future__ import annotations

import platform
import time

import psutil

from banaserve.base.errors import UserError
from banaserve.base.platform.linux import available_memory_bytes, visible_gpus
from banaserve.nodes.messages import Inspect, Inspected
from banaserve.nodes.model_check import check_model
from banaserve.nodes.versions import own_version


def inspect_node(asked: Inspect, server: str) -> Inspected:
    """Inspect this machine; blocking.

    Args:
        server: Name of the server that uses this node; empty for none.
    """
    problem = ""
    try:
        check_model(asked.vllm_argv, asked.model_digest)
    except UserError as error:
        problem = str(error)
    return Inspected(
        version=own_version(),
        python=platform.python_version(),
        gpus=tuple(visible_gpus()),
        memory_bytes=available_memory_bytes(),
        num_processors=len(psutil.Process().cpu_affinity()),
        time_s=time.time(),
        model_problem=problem,
        server=server,
    )
