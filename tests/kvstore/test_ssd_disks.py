"""The SSD tier on disks of other kinds, and on one that fills up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL_DISK = """
import os, select, sys
from pathlib import Path
from banaserve.kvstore.tiers.interface import BlockName, TierOutcome
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.tier import SsdTier
disk = Path(sys.argv[1])
now = 0.0
tier = SsdTier(disk / "tier", 2**23, now=lambda: now)
ballast = disk / "ballast"
block = aligned_bytes(20000)
def end_of(ticket):
    while not (ended := tier.poll()):
        select.select([tier.fd], [], [])
    return ended[0].outcome
def store(number):
    while True:
        ticket = tier.submit_store(BlockName(b"%32d" % number, None), block)
        if ticket is not None:
            return end_of(ticket)
        if tier.is_idle:
            return None
        tier.poll()
for number in range(20):
    assert store(number) is TierOutcome.DONE
fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
try:
    while os.write(fd, bytes(4096)):
        pass
except OSError:
    os.close(fd)
number = 20
while store(number) is TierOutcome.DONE:
    number += 1
stats = tier.stats()
assert stats.available and "No space left on device; make room" in stats.problem, stats
for stored in range(number):
    assert end_of(tier.submit_load(b"%32d" % stored, block)) is TierOutcome.DONE
ballast.unlink()
assert store(number) is None, "it tries again only later"
now += 10
assert store(number) is TierOutcome.DONE
assert tier.stats().problem == ""
tier.check()
tier.close()
print("ok", number)
"""


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_other_file_systems(kind: str, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_ssd_tier as tests
from banaserve.kvstore.tiers.ssd.tier import SsdTier
folder = Path(sys.argv[1])
for _ in range(2):
    tier = SsdTier(folder, tests.MIB)
    for number in range(100):
        if not tests.hits(tier, number):
            tests.store(tier, number)
    assert tests.load(tier, 99) is tests.TierOutcome.DONE
    print(tier.direct)
    tier.close()
"""
    lines = mounted(tmp_path, kind, script, str(Path(__file__).parent))
    # Only some kernels let tmpfs pass O_DIRECT; none lets ramfs.
    assert lines in (["False"] * 2, ["True"] * 2)
    assert kind == "tmpfs" or lines == ["False"] * 2


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    (line,) = mounted(tmp_path, "tmpfs -o size=5m", FULL_DISK)
    assert line.startswith("ok")


def mounted(folder: Path, kind: str, script: str, *arguments: str) -> list[str]:
    """Run a script with a file system of its own mounted on ``folder``; what it prints."""
    trial = ["unshare", "-rm", "mount", "-t", *kind.split(), "none", str(folder)]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("mounting is forbidden here")
    shell = f'mount -t {kind} none {folder} && exec "$0" "$@"'
    command = ["unshare", "-rm", "sh", "-c", shell, sys.executable, "-c", script, str(folder)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
