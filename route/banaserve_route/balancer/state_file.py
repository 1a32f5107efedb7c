"""File with the learned state of a policy, which survives restarts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from banaserve.base.errors import UserError
from banaserve_route.policies.interface import ReplicaPolicy

_PERIOD_S = 30.0
_MAX_BYTES = 1 << 20


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: str
    state: dict[str, float | int | str | list[float]]


class StateFile:
    """File whose state is read once and written periodically; a reader always sees a whole file."""

    def __init__(self, path: Path, name: str, policy: ReplicaPolicy) -> None:
        self._path, self._name, self._policy = path, name, policy
        self._written_at_s = 0.0

    def restore(self, log: Callable[[str], None]) -> None:
        """Restore the saved state; an invalid file is logged, and the policy learns afresh."""
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                raise UserError("too large")
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
            if kept.policy == self._name:
                self._policy.restore(kept.state)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, UserError) as error:
            log(f"{self._path} holds no state of {self._name} ({error}); it learns afresh")

    def tick(self, now_s: float, log: Callable[[str], None]) -> None:
        """Write the state every half minute."""
        if now_s - self._written_at_s >= _PERIOD_S:
            self._written_at_s = now_s
            self.write(log)

    def write(self, log: Callable[[str], None]) -> None:
        """Write the state, if the policy has any."""
        state = self._policy.state()
        if not state:
            return
        scratch = self._path.with_name(self._path.name + ".new")
        try:
            scratch.write_bytes(msgspec.json.encode(_Kept(self._name, state)))
            os.replace(scratch, self._path)
        except OSError as error:
            log(f"cannot write {self._path}: {error.strerror}")
