"""Decision log of a simulation, as the control loop of a server writes it; seconds are virtual."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from banaserve.controller.decision_format import decision_of, result_of
from banaserve.controller.decisions import DecisionLog
from banaserve.controller.schemas import DecisionRecord, WantedStep
from banaserve.engine.interface import Ending, StepOutcome
from banaserve.errors import UserError
from banaserve.orchestrator.control import Mode, Turn
from banaserve.sim.cell import Cell
from banaserve.sim.cluster import SimCluster
from banaserve.sim.result import SIMULATED
from banaserve.types import MoveModule, ReturnModule, Step


class SimulatedLog:
    """Writes what the cells of one simulated cluster decide.

    Args:
        path: Is written anew: two simulations both begin at second 0.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        self._path = path
        self._log = DecisionLog(path)
        self._open: list[tuple[Step, WantedStep, DecisionRecord]] = []
        self._num_done = 0

    def watch(self, policy: str, cluster: SimCluster) -> None:
        """See every decision of ``cluster``, which has not run yet.

        Raises:
            UserError: Its instances do not decide together: a page shows one policy at a time.
        """
        if len(cluster.cells) != 1:
            raise UserError(
                f"a decision log is of instances that decide together, and these are in "
                f"{len(cluster.cells)} groups: give fewer --instances"
            )
        cell = cluster.cells[0]
        cell.on_turn.append(partial(self._turned, policy, cell))

    def check(self) -> None:
        """Return if every decision so far is in the file.

        Raises:
            UserError: The disk was full, or the file could not be written any more.
        """
        if self._log.problem:
            raise UserError(f"the decision log {self._path} is incomplete: {self._log.problem}")

    def _turned(self, policy: str, cell: Cell, turn: Turn) -> None:
        self._take_done(cell)
        decision = decision_of(turn, Mode.ON.value, policy, turn.view.now_s, SIMULATED)
        decision = self._log.add(decision)
        for step, wanted in zip(turn.begin, decision.steps, strict=False):
            self._open.append((step, wanted, decision))

    def _take_done(self, cell: Cell) -> None:
        """Note the steps that were committed since the last turn."""
        done = cell.placing.done[self._num_done :]
        self._num_done += len(done)
        for ended_s, step in done:
            for one in self._open:
                if one[0] is step:
                    self._open.remove(one)
                    _, wanted, decision = one
                    wanted.result = result_of(_outcome(step), ended_s)
                    self._log.write(decision)
                    break


def _outcome(step: Step) -> StepOutcome:
    """A simulated step takes what was predicted of it."""
    action = step.action
    if not isinstance(action, MoveModule | ReturnModule):
        return StepOutcome(Ending.DONE)
    return StepOutcome(Ending.DONE, seconds=step.cost_s, num_bytes=action.num_bytes)
