"""Typed calls over vLLM's RPC, which knows methods by name and carries plain values.

A contract is a class whose methods have annotated arguments and replies, and no bodies. The caller
makes a ``RemoteCall`` of such a method, the called process wraps its implementation with
``implements``. mypy checks both against the contract, and msgspec checks the values that are sent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

import msgspec

from banaserve.base.errors import BanaServeError, MigrationError, ProtocolError

P = ParamSpec("P")
R = TypeVar("R")


class Answered(msgspec.Struct, Generic[R], frozen=True, tag=True):
    """Reply of a method that has succeeded."""

    value: R


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reply of a method that did nothing, with the reason in one line.

    An exception would lose its class in vLLM's RPC.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[R]):
    """A method of a contract with its arguments, ready for vLLM's RPC.

    Attributes:
        name: Name of the method in the other process.
        args: Arguments as plain values.
    """

    name: str
    args: tuple[Any, ...]
    _reply_type: Any

    def read(self, reply: object) -> R:
        """Return the value of a reply.

        Raises:
            MigrationError: The other process refused the call.
            ProtocolError: The reply breaks the contract.
        """
        try:
            found = msgspec.convert(reply, self._reply_type)
        except msgspec.ValidationError as wrong:
            raise ProtocolError(f"{self.name} has a reply that breaks its contract: {wrong}") from (
                wrong
            )
        if isinstance(found, Refused):
            raise MigrationError(found.reason)
        value: R = found.value
        return value


def call(
    method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> RemoteCall[R]:
    """Make a call of a contract's method; arguments are given by position."""
    assert not kwargs, "vLLM's utility calls have no keywords"
    plain = tuple(msgspec.to_builtins(argument) for argument in args)
    return RemoteCall(method.__name__, plain, _types_of(method)[1])


def implements(
    contract: Callable[Concatenate[Any, P], R],
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[..., object]]:
    """Return a decorator that serves a contract's method with plain values as arguments and reply.

    ``BanaServeError`` and arguments that break the contract become the reply ``Refused``.
    """
    argument_types, _ = _types_of(contract)

    def serving(method: Callable[Concatenate[Any, P], R]) -> Callable[..., object]:
        @functools.wraps(method)
        def serve(owner: Any, *args: Any) -> object:
            reply: Answered[R] | Refused
            try:
                given = zip(args, argument_types[: len(args)], strict=True)
                typed = [msgspec.convert(argument, kind) for argument, kind in given]
                reply = Answered(method(owner, *typed))  # type: ignore[call-arg]
            except (BanaServeError, msgspec.ValidationError) as refused:
                reply = Refused(str(refused))
            return msgspec.to_builtins(reply)

        return serve

    return serving


@functools.cache
def _types_of(contract: Callable[..., Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the types of a method's arguments, and the type of its replies."""
    hints = get_type_hints(contract)
    answered: Any = Answered
    reply_type = answered[hints.pop("return")] | Refused
    names = list(inspect.signature(contract).parameters)[1:]
    return tuple(hints[name] for name in names), reply_type
