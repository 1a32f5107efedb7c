"""Questions of one layer to the guests that have parts of the layer, asked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from banaserve.base.errors import GuestLostError
from banaserve.migration.rpc.guest_client import GuestClient

T = TypeVar("T")


class GuestQuestion(NamedTuple, Generic[T]):
    """Question to one guest; both functions raise ``GuestLostError`` if the guest is lost.

    Attributes:
        submit: Function that sends the question without waiting.
        collect: Function that waits for the answer and returns it.
    """

    link: GuestClient
    submit: Callable[[], None]
    collect: Callable[[], T]

    def ask(self) -> GuestLostError | None:
        """Send the question; return the error if the guest is lost."""
        try:
            self.submit()
        except GuestLostError as lost:
            return lost
        return None

    def answer(self, lost: GuestLostError | None) -> T | GuestLostError:
        """Return the answer, unless the guest is ``lost`` already or is lost meanwhile."""
        try:
            return self.collect() if lost is None else lost
        except GuestLostError as error:
            return error


class GuestQuestions(Generic[T]):
    """Questions that are submitted at once, so that this process can compute meanwhile.

    Each guest is asked once; its further questions follow after its answer. Two large requests to
    one guest would wait for each other: the guest cannot read the second while its answer to the
    first is not read.
    """

    def __init__(self, questions: Sequence[GuestQuestion[T]]) -> None:
        self._questions = questions
        self._asked: dict[int, GuestLostError | None] = {}
        links: set[GuestClient] = set()
        for number, question in enumerate(questions):
            if question.link not in links:
                links.add(question.link)
                self._asked[number] = question.ask()

    def answers(self) -> list[T | GuestLostError]:
        """Wait for all answers, even if one of the guests is lost; return them in order."""
        found = {
            number: self._questions[number].answer(lost) for number, lost in self._asked.items()
        }
        for number, question in enumerate(self._questions):
            if number not in found:
                found[number] = question.answer(question.ask())
        return [found[number] for number in range(len(self._questions))]
