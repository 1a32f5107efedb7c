"""One process group in place of many, in a process that is alone in all of them.

vLLM makes two groups for each way to share a model, tensors, stages, experts and so on, for an
engine of one worker too. Each gloo group has threads that wake a hundred times a second whether
anything is sent or not: 39 threads of an idle engine took 0.02 of a core, and interrupted the
thread that computes a thousand times a second.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_GLOO = "gloo"
_makes, _destroys = dist.new_group, dist.destroy_process_group


def share_group() -> None:
    """Let each gloo group that this process makes alone be its group of the whole world.

    It ends with the world. Groups of several processes, and others than gloo's, are as ever.
    """
    dist.new_group = _new_group
    dist.destroy_process_group = _destroy_process_group


def _new_group(*args: Any, **kwargs: Any) -> Any:
    backend = kwargs.get("backend") or dist.get_backend()
    if dist.get_world_size() == 1 and backend == dist.get_backend() == _GLOO:
        return dist.group.WORLD
    return _makes(*args, **kwargs)


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    if group is None or group is not dist.group.WORLD or dist.get_world_size() > 1:
        _destroys(group)
