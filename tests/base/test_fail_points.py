"""Points at which tests let processes fail."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from banaserve.base.platform import fail_points
from banaserve.base.platform.fail_points import FailPoint, InjectedError

ROOT = Path(fail_points.__file__).parents[2]


def armed(folder: Path) -> fail_points._Armed:
    return fail_points._Armed(folder)


def test_without_the_variable_nothing_happens() -> None:
    for point in FailPoint:
        fail_points.reach(point)
    assert fail_points.reach is fail_points._pass


def test_an_error_comes_once_at_the_pass_that_was_asked_for(tmp_path: Path) -> None:
    points = armed(tmp_path)
    points.reach(FailPoint.SSD_WRITE)  # before it is armed
    (tmp_path / "ssd.write").write_text("error 3")
    points.reach(FailPoint.SSD_WRITE)
    points.reach(FailPoint.SSD_READ)
    points.reach(FailPoint.SSD_WRITE)
    with pytest.raises(InjectedError, match=r"ssd\.write") as failed:
        points.reach(FailPoint.SSD_WRITE)
    assert failed.value.errno == errno.ENOSPC
    points.reach(FailPoint.SSD_WRITE)
    (tmp_path / "ssd.write").write_text("error")
    with pytest.raises(InjectedError):
        points.reach(FailPoint.SSD_WRITE)


def test_one_process_of_many_fails(tmp_path: Path) -> None:
    first, second = armed(tmp_path), armed(tmp_path)
    (tmp_path / "ssd.write").write_text("error 2")
    first.reach(FailPoint.SSD_WRITE)
    second.reach(FailPoint.SSD_WRITE)
    with pytest.raises(InjectedError):
        first.reach(FailPoint.SSD_WRITE)
    second.reach(FailPoint.SSD_WRITE)


def test_every_pass_is_held_up_while_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(fail_points.time, "sleep", waits.append)
    first, second = armed(tmp_path), armed(tmp_path)
    (tmp_path / "ssd.write").write_text("wait 0.25")
    for points in (first, first, second):
        points.reach(FailPoint.SSD_WRITE)
        points.reach(FailPoint.SSD_READ)
    (tmp_path / "ssd.write").unlink()
    first.reach(FailPoint.SSD_WRITE)
    assert waits == [0.25] * 3


def test_each_point_stands_in_the_code_once() -> None:
    found = [
        name
        for path in ROOT.rglob("*.py")
        for name in re.findall(r"reach\(FailPoint\.(\w+)\)", path.read_text())
    ]
    assert sorted(found) == sorted(point.name for point in FailPoint)
