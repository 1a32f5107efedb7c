"""Errors that earlier advice has had, in a file of JSON lines in the user's state folder."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import state_folder
from banaserve_bench.plan.search.trial import Device

_NAME = "plan-errors.jsonl"
_MOST_BYTES = 4 << 20


class PastError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Error of one confirmed prediction.

    Attributes:
        at: Time of the confirmation, in ISO 8601.
        digest: Digest of the step times; other ones have had other errors.
        place: ``paced`` for paced engines, ``url`` for a running server.
        ttft: Relative error of the predicted mean TTFT, with its sign.
        tpot: Relative error of the predicted mean TPOT, with its sign.
        goodput: Predicted share of requests within the limits, less the real one.
    """

    at: str
    profile: str
    digest: str
    system: str
    place: str
    ttft: float
    tpot: float
    goodput: float


class PastErrors(NamedTuple):
    """Errors that a file holds.

    Attributes:
        problem: Reason why the file is ignored, in one line; empty if it is not.
    """

    errors: Sequence[PastError]
    problem: str = ""

    def of(self, digest: str) -> list[PastError]:
        """Return the errors of the step times with ``digest``."""
        return [one for one in self.errors if one.digest == digest]


def digest_of(device: Device) -> str:
    """Return a digest of a device's step times."""
    measured = "" if device.measured is None else device.measured.name
    return sha256(f"{device.profile!r} {measured}".encode()).hexdigest()[:16]


def errors_path() -> Path:
    return state_folder() / _NAME


def read_errors(path: Path) -> PastErrors:
    """Return the errors in ``path``, none if there is no such file."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES + 1).splitlines()
    except FileNotFoundError:
        return PastErrors([])
    except OSError as error:
        return PastErrors([], f"{path} is ignored: {error.strerror}")
    if sum(map(len, lines)) > _MOST_BYTES - len(lines):
        return PastErrors([], f"{path} is ignored: it is larger than {_MOST_BYTES >> 20} MiB")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=PastError))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            words = f"line {number} is no error of a plan ({error})"
            return PastErrors([], f"{path} is ignored: {words}: move it away")
    return PastErrors(found)


def append_errors(path: Path, errors: Sequence[PastError]) -> None:
    """Append ``errors`` to the file, which is made if there is none.

    Raises:
        UserError: The file cannot be written.
    """
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in errors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def past_words(errors: Sequence[PastError]) -> str:
    """Return one line about the errors that advice on these step times has had."""
    if not errors:
        return "error that such advice has had: none is known, since none was confirmed (--confirm)"
    figures = ", ".join(
        f"{name} {_mean(values):.1%} (worst {max(map(abs, values)):.1%})"
        for name, values in (
            ("TTFT", [one.ttft for one in errors]),
            ("TPOT", [one.tpot for one in errors]),
        )
    )
    points = 100 * _mean([one.goodput for one in errors])
    last = max(one.at for one in errors)[:10]
    return (
        f"error that such advice has had: {figures}, goodput {points:.1f} percentage points; "
        f"{len(errors)} confirmed, the last one on {last}"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(map(abs, values)) / len(values)
