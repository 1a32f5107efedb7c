"""Faults: which processes of a server they meet, in an order that a seed decides."""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from banaserve.base.errors import UserError
from banaserve.base.platform.fail_points import FailPoint
from banaserve.base.platform.processes import is_running
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers
from banaserve.frontdoor.admin_client import AdminClient
from link import Link
from observing import until, writers
from router import Router
from service import Service
from waiting import lasts

_LONGEST_STOP_S = 8.0
_LONG_PAUSE_S = 20.0
"""Of one in four: the server takes it for a hung process, and may end it before it goes on."""
_SLOW_DISK_S = 0.5
"""Of each write and read."""


class Harm(enum.Enum):
    """What is done."""

    KILL = "killed"
    STOP = "stopped"
    PAUSE = "stopped for a while"
    FILL = "filled"
    SLOW = "slow for a while"
    CUT = "cut for a while"
    END = "told to end"


_OF_PROCESSES = (Harm.KILL, Harm.STOP, Harm.PAUSE)
_OWN_HARMS = {
    "front": (Harm.PAUSE,),
    "server": (Harm.KILL, Harm.END),
    "route": (Harm.KILL, Harm.PAUSE),  # nobody would notice that it has been stopped for good
    "link": (Harm.CUT,),
    "disk": (Harm.FILL, Harm.SLOW),
}


@dataclass(frozen=True)
class Choice:
    """A fault that is to come.

    Attributes:
        target: ``server`` (all of it, which is started again), ``front``, ``parent``, ``kvstore``,
            the name of an instance, ``guest``, ``route``, ``link`` (of both) or ``disk``.
        then_kill: An instance that is killed while the target is stopped; empty for none.
    """

    harm: Harm
    target: str
    then_kill: str = ""

    @property
    def cuts(self) -> bool:
        """Whether clients lose their connections."""
        return (self.harm, self.target) == (Harm.KILL, "route")

    @property
    def drains(self) -> bool:
        """Whether what was under way is to be answered nevertheless."""
        return self.harm is Harm.END

    def __str__(self) -> str:
        then = f", then {self.then_kill} killed" if self.then_kill else ""
        return f"{self.target} {self.harm.value}{then}"


def plan(seed: int, names: tuple[str, ...], others: tuple[str, ...]) -> Iterator[Choice]:
    """Faults without end; the first ones meet every process, the engine parent before all.

    Args:
        names: Of the instances.
        others: Further targets, such as ``disk``.
    """
    draw = random.Random(seed)
    yield Choice(Harm.KILL, "parent")
    yield Choice(Harm.STOP, "kvstore")
    yield Choice(Harm.STOP, draw.choice(names))
    yield Choice(Harm.STOP, "parent", draw.choice(names))
    yield Choice(Harm.KILL, draw.choice(names))
    yield Choice(Harm.KILL, "kvstore")
    if "disk" in others:
        yield Choice(Harm.FILL, "disk")
    while True:
        target = draw.choice(("front", "parent", "kvstore", *names, *others))
        if target in _OWN_HARMS:
            yield Choice(draw.choice(_OWN_HARMS[target]), target)
            continue
        harm = draw.choice(_OF_PROCESSES)
        with_death = target == "parent" and harm is not Harm.KILL
        yield Choice(harm, target, draw.choice(names) if with_death else "")


def _parent_of(pid: int) -> int:
    """Return the parent of a process; 0 for none, or if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid() if pid else 0
    return 0


class Victims:
    """Finds the processes of one server."""

    def __init__(self, service: Service, names: tuple[str, ...]) -> None:
        self._service = service
        self._names = names

    def of(self, target: str) -> int:
        """Process id of a target; 0 where there is none now."""
        server = self._service.run
        found = dict(reversed(list(writers(server.run_dir))))
        if target in ("front", "server"):
            return server.process.pid
        if target == "guest":
            return next((pid for log, pid in found.items() if "guest" in log), 0)
        if target != "parent":
            return found.get(f"{target}.log", 0)
        for name in self._names:
            with contextlib.suppress(psutil.Error, KeyError):
                parent = psutil.Process(found[f"{name}.log"]).ppid()
                if psutil.Process(parent).ppid() == server.process.pid:
                    return parent
        return 0


class Disk:
    """A small disk that can be filled, in memory; kept by a process with mounts of its own.

    Attributes:
        folder: Where the server finds it.

    Args:
        fail_points: Folder of the server's fail points, by which it is slow.
    """

    _SIZE = "24m"

    def __init__(self, place: Path, fail_points: Path) -> None:
        place.mkdir()
        self._slow = [fail_points / one for one in (FailPoint.SSD_WRITE, FailPoint.SSD_READ)]
        mount = f"mount -t tmpfs -o size={self._SIZE} none {place} && echo mounted && exec cat"
        self._keeper = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._keeper.stdout is not None
        self.is_there = self._keeper.stdout.readline() == b"mounted\n"
        self.folder = Path(f"/proc/{self._keeper.pid}/root{place}")

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", 0) as ballast:
            while True:
                ballast.write(bytes(1 << 16))
        with contextlib.suppress(OSError), (self.folder / "rest").open("wb", 0) as rest:
            while True:
                rest.write(b"0")

    def empty(self) -> None:
        for name in ("ballast", "rest"):
            (self.folder / name).unlink(missing_ok=True)

    def be_slow(self) -> None:
        for point in self._slow:
            point.write_text(f"wait {_SLOW_DISK_S}")

    def be_quick(self) -> None:
        for point in self._slow:
            point.unlink(missing_ok=True)

    def close(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()


class Nemesis:
    """Does what a plan says to one server.

    Args:
        disk: Of its SSD tier; None where none can be mounted here.
        router: In front of it; None where clients talk to the server itself.
        link: Between both.
        longest_stop_s: Longest time of most harms that end.
        long_pause_s: Time of one pause in four.
    """

    def __init__(
        self,
        service: Service,
        names: tuple[str, ...],
        disk: Disk | None,
        router: Router | None,
        link: Link | None,
        seed: int,
        longest_stop_s: float = _LONGEST_STOP_S,
        long_pause_s: float = _LONG_PAUSE_S,
    ) -> None:
        self._longest_stop_s, self._long_pause_s = longest_stop_s, long_pause_s
        self._victims = Victims(service, names)
        self._service = service
        self._names = names
        self._disk = disk
        self._router = router
        self._link = link
        self._draw = random.Random(seed)
        self._lost: dict[str, int] = {}
        self._lost_guest = 0

    def strike(self, choice: Choice) -> bool:
        """Do it; False where there is no such process now.

        Returns when it is over: a process that is to go on does so. Those that were stopped for
        good are for the server to end.
        """
        self._lost, self._lost_guest = {}, 0
        if choice.harm in (Harm.FILL, Harm.SLOW, Harm.CUT):
            begin, end = self._surroundings(choice.harm)
            begin()
            lasts(self._draw.uniform(1.0, self._longest_stop_s))
            end()
            return True
        if choice.target == "server":
            is_kill = choice.harm is Harm.KILL
            os.kill(self._victims.of("server"), signal.SIGKILL if is_kill else signal.SIGTERM)
            code = self._service.start_again()
            assert code == (-signal.SIGKILL if is_kill else 0), code
            return True
        if choice.target == "guest":
            self._lend_layers()
        if choice.target == "route":
            assert self._router is not None
            pid = self._router.pid
        else:
            pid = self._victims.of(choice.target)
        if not pid:
            return False
        before = {name: self._victims.of(name) for name in self._names}
        # After a stop there may be two parents, each with engines of its own.
        children = {name: one for name, one in before.items() if _parent_of(one) == pid}
        is_kill = choice.harm is Harm.KILL
        try:
            os.kill(pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
        except ProcessLookupError:  # the server has ended it meanwhile
            return False
        if choice.cuts and self._router is not None:
            self._router.start_again()
        elif choice.target == "parent" and is_kill:
            self._lost = {"parent": pid, **children}  # they end with it
        elif choice.target == "guest" and choice.harm is not Harm.PAUSE:
            self._lost_guest = pid
        elif choice.target not in ("parent", "route") and choice.harm is not Harm.PAUSE:
            self._lost = {choice.target: pid}
        if choice.then_kill and (other := before[choice.then_kill]):
            os.kill(other, signal.SIGKILL)
            self._lost[choice.then_kill] = other
        if choice.harm is Harm.PAUSE:
            is_long = self._draw.random() < 0.25
            short_s = self._draw.uniform(0.5, self._longest_stop_s)
            lasts(self._long_pause_s if is_long else short_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return True

    def _surroundings(self, harm: Harm) -> tuple[Callable[[], None], Callable[[], None]]:
        """How what no process is begins to be wrong, and how it ends."""
        if harm is Harm.CUT:
            assert self._link is not None
            return self._link.cut, self._link.mend
        assert self._disk is not None
        if harm is Harm.FILL:
            return self._disk.fill, self._disk.empty
        return self._disk.be_slow, self._disk.be_quick

    def _lend_layers(self) -> None:
        """Let a guest run some layers of one instance, unless one does so already."""
        if self._victims.of("guest"):
            return
        admin = AdminClient(*find_admin(self._service.run.run_dir))
        host, target = self._draw.sample(self._names, 2)
        first = self._draw.randrange(25)
        with contextlib.suppress(UserError):  # the instance may be busy with another move
            admin.run(MoveLayers(host, target, (first, first + 3)))

    def missing(self) -> list[str]:
        """What is not as before the last fault; lost processes must have others in their place."""
        router, server = self._router, self._service.run
        missing = ["balancer"] if router is not None and not router.is_ready() else []
        if self._lost_guest and is_running(self._lost_guest):
            missing.append(f"end of guest {self._lost_guest}")
        missing += [
            f"successor of {name} {pid}"
            for name, pid in self._lost.items()
            if self._victims.of(name) in (0, pid)
        ]
        missing += [
            name
            for name in self._names
            if server.metric("banaserve_instance_ready", instance_id=name) != 1
        ]
        return missing + ["store"] * (server.metric("banaserve_kvstore_up") != 1)

    def wait_whole(self, deadline_s: float) -> None:
        try:
            until(lambda: not self.missing(), "the server is whole again", deadline_s)
        except AssertionError as late:
            late.add_note(f"missing: {self.missing()}")
            raise
