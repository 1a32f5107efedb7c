"""Decision log of a simulation, in the format of a server's control loop; seconds are virtual."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.types import MoveModule, ReturnModule, Step
from banaserve.contracts.control_api import DecisionRecord, WantedStep
from banaserve.contracts.instances import Ending, StepOutcome
from banaserve.orchestrator.control.turn import Mode, Turn
from banaserve.orchestrator.planner.loop.decision_format import decision_of, result_of
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.sim.cluster.cell import Cell
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.result import SIMULATED


class SimulatedLog:
    """Writer of the decisions of one simulated cluster's cell.

    Args:
        path: File of the log; overwritten, since every simulation begins at second 0.

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
        """Log every decision of ``cluster``, which has not run yet.

        Raises:
            UserError: Its instances form several cells: a page shows one policy at a time.
        """
        if len(cluster.cells) != 1:
            raise UserError(
                f"a decision log is of instances that decide together, and these are in "
                f"{len(cluster.cells)} groups: give fewer --instances"
            )
        cell = cluster.cells[0]
        cell.on_turn.append(partial(self._turned, policy, cell))

    def check(self) -> None:
        """Check that every decision so far is in the file.

        Raises:
            UserError: The disk is full, or the file cannot be written any more.
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
        """Record the results of the steps that were committed since the last turn."""
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
    """Return the outcome of a simulated step, which takes its predicted time."""
    action = step.action
    if not isinstance(action, MoveModule | ReturnModule):
        return StepOutcome(Ending.DONE)
    return StepOutcome(Ending.DONE, seconds=step.cost_s, num_bytes=action.num_bytes)
