"""Process groups and memory of a guest, which vLLM's layers expect to exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from banaserve.base.platform.cpu_features import ask_for_amx
from banaserve.engine.compat.config import VllmConfig, set_current_vllm_config
from banaserve.engine.compat.runner import model as compat
from banaserve.engine.process_groups import share_group
from banaserve.migration.guest.throttle import run_low_priority
from banaserve.migration.modules.partial_model import device_of
from banaserve.migration.ranks import check_devices


@contextlib.contextmanager
def guest_environment(config: VllmConfig, rendezvous: str, rank: int = 0) -> Iterator[None]:
    """Provide what a worker has that vLLM's layers expect: process groups, on a GPU also memory.

    Args:
        rendezvous: Path of a file, the same for all ranks; see ``join_ranks``.
        rank: Rank of this process; a guest has as many as the host's engine, each on its own GPU.

    Raises:
        MigrationError: There are fewer GPUs than ranks.
    """
    parallel = config.parallel_config
    parallel.rank = rank
    num_ranks = parallel.tensor_parallel_size
    device = device_of(config)
    if device.type == "cuda":
        check_devices(num_ranks, torch.cuda.device_count())
        torch.cuda.set_device(device)
        compat.make_workspace(device)
    else:
        ask_for_amx()  # the first step of a guest of heads is attention
    share_group()

    def join() -> None:
        own_kernel = not parallel.disable_custom_all_reduce
        compat.join_ranks(rendezvous, rank, num_ranks, device.type, custom_all_reduce=own_kernel)

    with set_current_vllm_config(config):
        if device.type == "cuda":
            join()  # NCCL's threads would keep a low priority, and steps wait for them
        else:
            run_low_priority(join)
    try:
        yield
    finally:
        compat.end_ranks()
