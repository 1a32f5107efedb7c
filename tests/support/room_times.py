"""Processor time that the tests of each room take: a pytest plugin.

The processes that tests start are counted too. With ``--check-shares`` a room that takes more than
its share in ``tests/rooms.toml`` fails the run; with ``--time-limit`` files that would begin later
are skipped, and named. With ``--record-green``, which is for runs of all tests of a room, rooms of
which nothing failed are noted as green.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from fork_server import cpu_s_of_ended, fork_servers
from room_map import TESTS, RoomError, record_green, room_of, rooms

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LATE = "left out for time"
_SAID_FROM_S = 30.0
"""Core-seconds of a run; those of less are not printed."""

# Processor time -----------------------------------------------------------------------------------


def _cpu_s() -> float:
    """Core-seconds of this process, of all processes below it and of those forked for it.

    Those of a fork server serve the tests of several processes: they count when they have ended.
    """
    times, children = {}, defaultdict(list)
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:  # It has ended since.
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        pid = int(entry.name)
        children[int(fields[1])].append(pid)
        times[pid] = sum(map(int, fields[11:15])) * _TICK_S
    apart = fork_servers()
    total, left = cpu_s_of_ended(), [os.getpid()]
    while left:
        pid = left.pop()
        if pid not in apart:
            total += times.get(pid, 0.0)
            left += children[pid]
    return total


class CoreSeconds:
    """Counts core-seconds of rooms in the process that runs their tests."""

    def __init__(self) -> None:
        self.of_rooms: dict[str, float] = defaultdict(float)
        self.of_files: dict[str, float] = defaultdict(float)
        self._last_s = _cpu_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                now_s = _cpu_s()
                self.of_rooms[room_of(item.path)] += now_s - self._last_s
                self.of_files[item.path.relative_to(TESTS).as_posix()] += now_s - self._last_s
                self._last_s = now_s

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["core_seconds"] = [dict(self.of_rooms), dict(self.of_files)]


class Report:
    """Prints core-seconds a room, in the process that prints."""

    def __init__(self, config: pytest.Config, own: CoreSeconds | None) -> None:
        self._own = own
        self._plugins = config.pluginmanager
        self._shares = config.getoption("--check-shares")
        self._path = config.getoption("--core-seconds")
        self.of_rooms: dict[str, float] = defaultdict(float)
        self.of_files: dict[str, float] = defaultdict(float)
        self._records = config.getoption("--record-green")
        self._recorded = ""
        self._ran: set[str] = set()
        self._failed: set[str] = set()
        self._left_out: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._add(*getattr(node, "workeroutput", {}).get("core_seconds", ({}, {})))

    def _add(self, of_rooms: dict[str, float], of_files: dict[str, float]) -> None:
        for total, part in ((self.of_rooms, of_rooms), (self.of_files, of_files)):
            for name, seconds in part.items():
                total[name] += seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        room = room_of(TESTS.parent / report.nodeid.partition("::")[0])
        self._ran.add(room)
        if report.failed:
            self._failed.add(room)
            self._say_now(report)
        if report.skipped and _LATE in str(report.longrepr):
            self._left_out.add(report.nodeid.partition("::")[0])

    def _say_now(self, report: pytest.TestReport) -> None:
        """Say a failure in a line when it happens: a run that is cut off has no summary."""
        crash = getattr(report.longrepr, "reprcrash", None)
        words = str(report.longrepr if crash is None else crash.message).split("\n")
        reporter = self._plugins.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"{report.when} of {report.nodeid}: {words[0][:300]}", red=True)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._own is not None:
            self._add(self._own.of_rooms, self._own.of_files)
        if self._over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        has_ended = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        green = self._ran - self._failed - {room_of(TESTS.parent / one) for one in self._left_out}
        if self._records and has_ended and green:
            try:
                self._recorded = record_green(green)
            except RoomError as error:
                self._recorded = f"not recorded as green: {error}"

    def _over(self) -> list[str]:
        """Lines about rooms that have taken more than their shares."""
        if self._shares is None:
            return []
        shares = {one.name: getattr(one, f"{self._shares}_s") for one in rooms().values()}
        return [
            f"room {name} took {took:.0f} core-seconds of the {shares[name]:.0f} that "
            "tests/rooms.toml gives it"
            for name, took in sorted(self.of_rooms.items())
            if took > shares[name]
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total_s = sum(self.of_rooms.values())
        if total_s >= _SAID_FROM_S:
            terminalreporter.section("core-seconds by room")
            ranked = sorted(self.of_rooms.items(), key=lambda one: -one[1])
            words = [f"{name} {took:.0f}" for name, took in ranked]
            terminalreporter.write_line(f"all {total_s:.0f}: {', '.join(words)}")
        if self._recorded:
            terminalreporter.write_line(self._recorded)
        for line in self._over():
            terminalreporter.write_line(line, red=True)
        for name in sorted(self._left_out):
            terminalreporter.write_line(f"left out for time: {name}", yellow=True)
        if self._path is not None:
            lines = (f"{took:8.1f} {name}" for name, took in self.of_files.items())
            Path(self._path).write_text("\n".join(sorted(lines, reverse=True)) + "\n")


class TimeLimit:
    """Skips files that would begin after the time limit."""

    def __init__(self, limit_s: float) -> None:
        self._until_s = time.monotonic() + limit_s
        self._skipped: Path | None = None
        self._running: Path | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.path != self._running:
            self._running = item.path
            self._skipped = item.path if time.monotonic() > self._until_s else None
        if item.path == self._skipped:
            pytest.skip(_LATE)


# The plugin ---------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rooms")
    group.addoption(
        "--check-shares",
        choices=("spine", "all"),
        help="fail where a room takes more core-seconds than its share in tests/rooms.toml",
    )
    group.addoption("--time-limit", type=float, metavar="S", help="begin no file later than this")
    group.addoption("--record-green", action="store_true", help="note rooms that are green")
    group.addoption("--core-seconds", metavar="FILE", help="write core-seconds of each file")


def pytest_configure(config: pytest.Config) -> None:
    try:
        rooms()
    except RoomError as error:
        raise pytest.UsageError(str(error)) from None
    manager = config.pluginmanager
    is_worker = hasattr(config, "workerinput")
    has_workers = bool(config.getoption("numprocesses", None))
    own = None if has_workers and not is_worker else CoreSeconds()
    if own is not None:
        manager.register(own)
    if not is_worker:
        manager.register(Report(config, own))
    if (limit_s := config.getoption("--time-limit")) is not None:
        manager.register(TimeLimit(limit_s))
