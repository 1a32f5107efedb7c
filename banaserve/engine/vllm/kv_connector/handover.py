"""Note that the two legs of a request pass each other in vLLM's ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "banaserve_handover"
_TO = "banaserve_push_to"
_HOLD = "banaserve_hold"
_MAX_HOLD = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Handover:
    """Facts of the other leg.

    Attributes:
        leaves_tail: This is a prefill leg: the partial last block is saved too, and blocks of
            the local prefix cache that the store lacks.
        push_to: This is a prefill leg whose decode leg runs on another machine: ``HOST:PORT`` of
            the store there, which gets the prompt's blocks while they are computed; empty for none.
        tokens: This is a decode leg: so many tokens lie in the store.
        hold: Number under which the store keeps the prompt's blocks from the prefill leg on until
            the decode leg has read them; 0 for none.
        is_stored: This leg comes without a prefill leg because the store has its prompt.
    """

    leaves_tail: bool = False
    push_to: str = ""
    tokens: int | None = None
    is_stored: bool = False
    hold: int = 0

    @classmethod
    def of(cls, kv_transfer_params: Mapping[str, Any] | None) -> Handover:
        """Read from a request's ``kv_transfer_params``; anything unknown means none."""
        params = kv_transfer_params or {}
        value, said = params.get(_KEY), params.get(_HOLD)
        hold = said if isinstance(said, int) and 0 < said <= _MAX_HOLD else 0
        if value == "prefill":
            to = params.get(_TO)
            return cls(leaves_tail=True, push_to=to if isinstance(to, str) else "", hold=hold)
        if value == "stored":
            return cls(is_stored=True)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(tokens=value, hold=hold)
        return cls()

    def to_params(self) -> dict[str, Any]:
        said: dict[str, Any] = {_HOLD: self.hold} if self.hold else {}
        if self.leaves_tail:
            return {**said, _KEY: "prefill", **({_TO: self.push_to} if self.push_to else {})}
        return {**said, _KEY: "stored" if self.is_stored else self.tokens}
