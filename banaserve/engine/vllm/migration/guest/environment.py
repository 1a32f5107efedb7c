"""Process groups of a guest, which vLLM's layers expect to exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from banaserve.engine.vllm.compat import model as compat
from banaserve.engine.vllm.compat.config import VllmConfig, set_current_vllm_config
from banaserve.engine.vllm.migration.guest.throttle import run_low_priority
from banaserve.engine.vllm.migration.modules.partial_model import device_of
from banaserve.engine.vllm.process_groups import share_group
from banaserve.platform.cpu_features import ask_for_amx


@contextlib.contextmanager
def guest_environment(config: VllmConfig, rendezvous: str, rank: int = 0) -> Iterator[None]:
    """Provide vLLM's process groups of a guest's ranks, as vLLM's layers expect them.

    Args:
        rendezvous: Path of a file, the same for all ranks; see ``join_ranks``.
        rank: Rank of this process; a guest has as many as the host's engine.
    """
    config.parallel_config.rank = rank
    num_ranks = config.parallel_config.tensor_parallel_size
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        ask_for_amx()  # the first step of a guest of heads is attention
    share_group()
    with set_current_vllm_config(config):
        run_low_priority(lambda: compat.join_ranks(rendezvous, rank, num_ranks))
    try:
        yield
    finally:
        compat.end_ranks()
