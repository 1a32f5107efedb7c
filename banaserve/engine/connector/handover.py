"""Note that the two legs of a request pass each other in vLLM's ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from banaserve.kvstore.wire import MAX_READERS

_KEY = "banaserve_handover"
_TO = "banaserve_push_to"
_FROM = "banaserve_pushed_from"
_HOLD = "banaserve_hold"
_READER = "banaserve_reader"
_MAX_HOLD = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Handover:
    """Facts that a leg is told about the other legs of its request.

    Attributes:
        leaves_tail: True for a prefill leg: the partial last block is saved too, and blocks of
            the local prefix cache that the store lacks.
        push_to: Store that gets the prompt's blocks while a prefill leg computes them, as
            ``HOST:PORT``: that of the decode leg, if on another machine; empty for none.
        tokens: Number of tokens in the store that a prefill leg left for this decode leg; None for
            other legs.
        hold: Number under which the store keeps the prompt's blocks from the prefill leg on until
            the decode legs have read them; 0 for none.
        num_readers: Number of decode legs that read the blocks of this prefill leg.
        reader: Index of this decode leg among the readers, from 0 on.
        pushed_from: Store on the machine of this decode leg's prefill leg, as ``HOST:PORT``, if it
            is another machine; that store keeps the blocks too. Empty for none.
        is_stored: True for a leg without a prefill leg, because the store has its prompt.
    """

    leaves_tail: bool = False
    push_to: str = ""
    tokens: int | None = None
    is_stored: bool = False
    hold: int = 0
    num_readers: int = 1
    reader: int = 0
    pushed_from: str = ""

    @classmethod
    def of(cls, kv_transfer_params: Mapping[str, Any] | None) -> Handover:
        """Read a request's ``kv_transfer_params``; anything unknown counts as no handover."""
        params = kv_transfer_params or {}
        value = params.get(_KEY)
        hold, reader = _number(params, _HOLD, _MAX_HOLD), _number(params, _READER, MAX_READERS - 1)
        if value == "prefill":
            return cls(
                leaves_tail=True, push_to=_text(params, _TO), hold=hold, num_readers=reader + 1
            )
        if value == "stored":
            return cls(is_stored=True)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            pushed_from = _text(params, _FROM)
            return cls(tokens=value, hold=hold, reader=reader, pushed_from=pushed_from)
        return cls()

    def to_params(self) -> dict[str, Any]:
        # For a prefill leg it is the index of the last reader.
        reader = self.num_readers - 1 if self.leaves_tail else self.reader
        said: dict[str, Any] = {_HOLD: self.hold} if self.hold else {}
        if self.hold and reader:
            said[_READER] = reader
        if self.pushed_from:
            said[_FROM] = self.pushed_from
        if self.leaves_tail:
            return {**said, _KEY: "prefill", **({_TO: self.push_to} if self.push_to else {})}
        return {**said, _KEY: "stored" if self.is_stored else self.tokens}


def _text(params: Mapping[str, Any], name: str) -> str:
    said = params.get(name)
    return said if isinstance(said, str) else ""


def _number(params: Mapping[str, Any], name: str, most: int) -> int:
    """Return a parameter's number from 0 to ``most``; 0 for anything else."""
    said = params.get(name)
    return said if isinstance(said, int) and 0 <= said <= most else 0
