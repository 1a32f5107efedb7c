"""One process group in place of many, in a process that is the only member of all of them.

vLLM makes two groups for each kind of parallelism (tensor, pipeline, expert and so on), even for an
engine with one worker. Each gloo group has threads that wake a hundred times a second even if
nothing is sent: 39 threads of an idle engine took 0.02 of a core, and interrupted the computing
thread a thousand times a second.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_GLOO = "gloo"
_makes, _destroys = dist.new_group, dist.destroy_process_group


def share_group() -> None:
    """Replace each gloo group of this process alone by the process's world group.

    The replacement ends with the world group. Groups of several processes or of other backends are
    made as usual.
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
