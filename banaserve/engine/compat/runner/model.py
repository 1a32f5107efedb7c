"""Layers of a vLLM model without an engine: the process groups, the weights and the stage."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from vllm.forward_context import get_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models.utils import PPMissingLayer

__all__ = [
    "PPMissingLayer",
    "get_model_loader",
    "initialize_model",
    "process_weights_after_loading",
]

_IDENT = "VLLM_DIST_IDENT"
"""vLLM's variable with the prefix of the names of the shared memory in which ranks add up."""


class _MiddleStage:
    """A pipeline group in which this process is neither first nor last."""

    rank_in_group = 1
    world_size = 3
    is_first_rank = False
    is_last_rank = False


@contextlib.contextmanager
def pipeline_stage(start: int, end: int) -> Iterator[None]:
    """Make models built inside hold decoder layers ``start`` to ``end - 1`` and nothing else.

    ``make_layers`` imports both names when it is called, and the models' loaders skip the layers
    that a pipeline stage lacks. vLLM caches these by the model's address, at which an earlier model
    with other layers may have been: here the cache begins empty.
    """
    import vllm.distributed.parallel_state as parallel_state
    import vllm.distributed.utils as distributed_utils
    import vllm.model_executor.models.utils as model_utils

    with (
        mock.patch.object(distributed_utils, "get_pp_indices", return_value=(start, end)),
        mock.patch.object(parallel_state, "_PP", _MiddleStage()),
        mock.patch.object(model_utils, "_model_to_pp_missing_layer_names", {}),
    ):
        yield


def leave_graphs(model: nn.Module) -> RemovableHandle:
    """Make steps call the model's modules uncompiled, until the returned handle is removed.

    vLLM has this switch for models whose inputs no graph fits.
    """

    def leave(*_: Any) -> None:
        get_forward_context().skip_compiled = True

    return model.register_forward_pre_hook(leave)


def ranks_group() -> Any:
    """Return the host-memory group of this engine's tensor-parallel ranks; None for one rank."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


def join_ranks(
    rendezvous: str, rank: int, num_ranks: int, device_type: str, *, custom_all_reduce: bool = True
) -> None:
    """Make the process groups that vLLM's layers expect, with tensor-parallel ranks only.

    Called once in a guest's process. Ranks on GPUs add up with NCCL or vLLM's own kernel, as those
    of an engine do. A single rank adds up nothing, and ranks on CPUs have gloo.

    Args:
        rendezvous: Path of a file that the first rank creates, unique among all groups of the
            machine.
        device_type: Type of device that the layers compute on; rank ``n`` uses GPU ``n``.
        custom_all_reduce: True if vLLM may use its own kernel in place of NCCL.
    """
    from vllm.distributed import parallel_state

    os.environ[_IDENT] = rendezvous.replace("/", "_")
    where = f"file://{rendezvous}"
    backend = "nccl" if device_type == "cuda" and num_ranks > 1 else "gloo"
    parallel_state.set_custom_all_reduce(custom_all_reduce)
    parallel_state.init_distributed_environment(num_ranks, rank, where, rank, backend)
    parallel_state.initialize_model_parallel(num_ranks, 1)
    unname_shared_memory()


def make_workspace(device: torch.device) -> None:
    """Make the memory on a GPU in which vLLM's experts compute, as its workers do at their start.

    A guest has no worker.
    """
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(device)


def unname_shared_memory() -> None:
    """Unlink the shared memory in which the ranks of this process's groups add up.

    All ranks have mapped it once they have their groups, and a killed rank would leave it behind.
    """
    if ident := os.environ.get(_IDENT):
        for path in Path("/dev/shm").glob(f"{glob.escape(ident)}-*-cpushm_*"):
            path.unlink(missing_ok=True)


def end_ranks() -> None:
    """Undo ``join_ranks``."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
