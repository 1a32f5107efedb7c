"""Groups of a process that is alone are one; groups of several processes are as they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ALONE = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from banaserve.engine.process_groups import share_group

def num_threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())

share_group()
share_group()
for life in "ab":
    dist.init_process_group("gloo", f"file://{sys.argv[1]}{life}", rank=0, world_size=1)
    before = num_threads()
    groups = [dist.new_group([0], backend="gloo") for _ in range(8)]
    assert num_threads() == before, num_threads()
    for group in groups:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [1, 1, 1]
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
print("done")
"""
TOGETHER = """
import sys
import torch
import torch.distributed as dist
from banaserve.engine.process_groups import share_group

share_group()
rank = int(sys.argv[2])
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
both, first = dist.new_group([0, 1], backend="gloo"), dist.new_group([0], backend="gloo")
assert both is not dist.group.WORLD and first is not dist.group.WORLD
found = torch.tensor([rank + 1])
dist.all_reduce(found, group=both)
assert found.tolist() == [3]
dist.destroy_process_group(both)
dist.barrier()
dist.destroy_process_group(dist.group.WORLD)
assert not dist.is_initialized()
print("done")
"""


@pytest.mark.parametrize(
    ("program", "ranks"), [(ALONE, [0]), pytest.param(TOGETHER, [0, 1], marks=pytest.mark.deep)]
)
def test_groups(program: str, ranks: list[int], tmp_path: Path) -> None:
    place = str(tmp_path / "rendezvous")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, place, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in ranks
    ]
    assert [one.communicate(timeout=120)[0] for one in running] == ["done\n"] * len(ranks)
